"""Sampling parameters."""

from dataclasses import dataclass
from math import isfinite

from .errors import UsageError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when an answer ends. Temperature 0 is greedy."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0  # keep the k most likely ids; 0: all
    top_p: float = 1.0  # keep the smallest set of ids with at least this much probability
    min_p: float = 0.0  # keep ids with at least this share of the best id's probability
    repetition_penalty: float = 1.0  # Keskar et al., arXiv 1909.05858: divides the logits of ids already in the text
    seed: int = 0
    stop: tuple[str, ...] = ()  # the answer ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # besides the model's own end-of-sequence ids
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = {
            "max_tokens must be at least 1": self.max_tokens >= 1,
            "temperature must be 0 (greedy) or more": self.temperature >= 0 and isfinite(self.temperature),
            "top_k must be 0 (off) or more": self.top_k >= 0,
            "top_p must be above 0 and at most 1": 0 < self.top_p <= 1,
            "min_p must be from 0 to 1": 0 <= self.min_p <= 1,
            "repetition_penalty must be above 0": self.repetition_penalty > 0 and isfinite(self.repetition_penalty),
            "seed must be from 0 to 2^64 - 1": 0 <= self.seed < 2**64,
        }
        for rule, holds in checks.items():
            if not holds:
                value = getattr(self, rule.split()[0])
                raise UsageError(f"{rule}, not {value!r}")
        if not all(self.stop):
            raise UsageError("stop strings must not be empty")
