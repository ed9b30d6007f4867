"""Sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .arguments import real_number, whole_number
from .errors import UsageError
from .printable import quoted

LEAST_TEMPERATURE = 1e-6  # its inverse scales logits in float32; what is below differs from greedy in ties at most
PENALTIES = (0.01, 100.0)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when an answer ends. Temperature 0 is greedy.

    UsageError, which names the field, for a value of another type or out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0  # 0, or from LEAST_TEMPERATURE
    top_k: int = 0  # keep the k most likely ids; 0: all
    top_p: float = 1.0  # keep the smallest set of ids with at least this much probability
    min_p: float = 0.0  # keep ids with at least this share of the best id's probability
    repetition_penalty: float = 1.0  # Keskar et al., arXiv 1909.05858: divides the logits of ids already in the text
    seed: int = 0
    stop: str | Sequence[str] = ()  # the answer ends before the first of these strings; kept as a tuple
    stop_token_ids: Sequence[int] = ()  # besides the model's own end-of-sequence ids; kept as a tuple
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("max_tokens", "top_k", "seed"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            object.__setattr__(self, name, real_number(name, getattr(self, name)))
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids))
        least, most = PENALTIES
        checks = {
            "max_tokens must be at least 1": self.max_tokens >= 1,
            f"temperature must be 0 (greedy) or a number from {LEAST_TEMPERATURE:g}": (
                self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < float("inf")
            ),
            "top_k must be 0 (off) or more": self.top_k >= 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "min_p must be from 0 to 1": 0 <= self.min_p <= 1,
            f"repetition_penalty must be from {least:g} to {most:g}": least <= self.repetition_penalty <= most,
            "seed must be from 0 to 2^64 - 1": 0 <= self.seed < 2**64,
            "stop_token_ids must be from 0 to 2^31 - 1": all(0 <= id < 2**31 for id in self.stop_token_ids),
        }
        for rule, holds in checks.items():
            if not holds:
                value = getattr(self, rule.split()[0])
                raise UsageError(f"{rule}, not {quoted(value)}")


def _strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else _items("stop strings", stop)
    if not all(isinstance(string, str) for string in strings):
        raise UsageError(f"stop strings must be texts, not {next(s for s in strings if not isinstance(s, str))!r}")
    if not all(strings):
        raise UsageError("stop strings must not be empty")
    return strings


def _ids(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(whole_number("stop_token_ids: an id", id) for id in _items("stop_token_ids", ids))


def _items(name: str, value: Sequence[Any]) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise UsageError(f"{name} must be a list, not {quoted(value)}") from None
