"""Sampling parameters."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from secrets import randbits
from typing import Any, Self

import numpy as np

from ..arguments import real_number, whole_number
from ..errors import UsageError
from ..printable import quoted
from .grammar import Grammar

LEAST_TEMPERATURE = 1e-6  # its inverse scales logits in float32; what is below differs from greedy in ties at most
MOST_TEMPERATURE = 1e30  # so much that logits make no difference; its inverse is above 0 in float32
DRAWN_BITS = 53  # of seeds that are drawn: JSON readers keep so many
LEAST_TOP_P = 1e-30  # the most probable token alone, as 0
MOST_LOGPROBS = 20
NO_LIMIT = -1  # of what is a limit: as if it were not given
# Numbers of a request, both ends included: as OpenAI publishes them, of other fields as vLLM and llama.cpp take them.
RANGES: Mapping[str, tuple[float, float]] = {
    "max_tokens": (NO_LIMIT, 2**63 - 1),
    "min_tokens": (0, 2**31 - 1),
    "temperature": (0, 2),  # of requests; SamplingParams takes all that is finite
    "top_p": (0, 1),
    "top_k": (NO_LIMIT, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "logit_bias": (-100, 100),
    "logprobs": (0, MOST_LOGPROBS),
    "seed": (-9223372036854776000, 2**64 - 1),
    "n": (1, 128),
    "best_of": (0, 128),
}
# What not every backend does: all but a temperature and where the answer ends.
FILTERS = frozenset({"top_k", "top_p", "min_p"})
EXTRAS = FILTERS | {
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs", "grammar", "min_tokens",
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when an answer ends. Temperature 0 is greedy.

    UsageError, which names the field, for a value of another type or out of range.
    """

    max_tokens: int | None = None  # None or -1: to the end of the context
    min_tokens: int = 0  # so many tokens before an end-of-sequence or stop id may be chosen, or a stop string ends it
    temperature: float = 0.0  # 0, or from LEAST_TEMPERATURE
    top_k: int = 0  # keep the k most likely ids; 0 or -1: all
    top_p: float = 1.0  # keep the smallest set of ids with at least this much probability; 0: the most probable id
    min_p: float = 0.0  # keep ids with at least this share of the best id's probability
    repetition_penalty: float = 1.0  # Keskar et al., arXiv 1909.05858: divides the logits of ids already in the text
    presence_penalty: float = 0.0  # OpenAI's: taken off the logits of ids already in the answer
    frequency_penalty: float = 0.0  # the same, for each time that the id is in the answer
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()  # added to the logits of ids; kept as pairs
    logprobs: int | None = None  # report the log-probability of every token, and of so many of the most probable ids
    grammar: Grammar | None = None  # what the text of the answer must be, up to its end or to max_tokens
    seed: int | None = None  # the same seed, prompt and index: the same answer; None: every answer draws its own
    index: int = 0  # the answer's number, of several to one prompt with one seed
    stop: str | Sequence[str] = ()  # the answer ends before the first of these strings; kept as a tuple
    stop_token_ids: Sequence[int] = ()  # besides the model's own end-of-sequence ids; kept as a tuple
    ignore_eos: bool = False
    skip_special_tokens: bool = True  # the text has none; else it has them all but the end of sequence

    def __post_init__(self) -> None:
        for name in ("min_tokens", "top_k", "index"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, real_number(name, getattr(self, name)))
        for name in ("max_tokens", "logprobs", "seed"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        if not isinstance(self.grammar, Grammar | None):
            raise UsageError(
                f"grammar must be Grammar.json(), Grammar.json_schema(...) or another one, not {quoted(self.grammar)}"
            )
        if self.grammar and self.ignore_eos:
            raise UsageError("ignore_eos does not go with a grammar, which says where the answer may end")
        if self.grammar and self.min_tokens:
            raise UsageError("min_tokens does not go with a grammar, which says where the answer may end")
        object.__setattr__(self, "stop", _strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids))
        object.__setattr__(self, "top_k", 0 if self.top_k == NO_LIMIT else self.top_k)
        object.__setattr__(self, "max_tokens", None if self.max_tokens == NO_LIMIT else self.max_tokens)
        for name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            check_range(name, getattr(self, name))
        check_range("logprobs", self.logprobs or 0)
        checks = {
            "max_tokens must be at least 1, or None": self.max_tokens is None or self.max_tokens >= 1,
            f"min_tokens must be from 0 to max_tokens ({self.max_tokens})": (
                self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens)
            ),
            f"temperature must be 0 (greedy) or a number from {LEAST_TEMPERATURE:g}": (
                self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature < float("inf")
            ),
            "seed must be from 0 to 2^64 - 1": 0 <= (self.seed or 0) < 2**64,
            "index must be from 0 to 2^64 - 1": 0 <= self.index < 2**64,
            "stop_token_ids must be from 0 to 2^31 - 1": all(0 <= id < 2**31 for id in self.stop_token_ids),
        }
        for rule, holds in checks.items():
            if not holds:
                value = getattr(self, rule.split()[0])
                raise UsageError(f"{rule}, not {quoted(value)}")

    def seeded(self) -> Self:
        """With a seed, where tokens are sampled: drawn where there is none, and then no number tells answers apart."""
        if self.seed is not None or self.temperature == 0:
            return self
        return replace(self, seed=randbits(DRAWN_BITS), index=0)

    def for_backend(self, prompt: Sequence[int]) -> Self:
        """As a backend takes them for an answer to these ids: `seed` is the key of its noise."""
        key = noise_key(self.seed or 0, prompt, self.index)
        temperature, top_p = min(self.temperature, MOST_TEMPERATURE), max(self.top_p, LEAST_TOP_P)
        return replace(self, seed=key, index=0, temperature=temperature, top_p=top_p)

    @property
    def looks_back(self) -> bool:
        """Does the choice of a token depend on which ids precede it, beyond the model's logits?"""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalties or self.grammar is not None

    @property
    def plain(self) -> bool:
        """Are temperature and seed all that matters?"""
        return not self.extras()

    def extras(self) -> list[str]:
        """The names of the fields that are set and that not every backend does. Greedy choices know no filters."""
        without = FILTERS if self.temperature == 0 else ()
        set_ = (field.name for field in fields(self) if getattr(self, field.name) != field.default)
        return [name for name in set_ if name in EXTRAS and name not in without]


def check_range(name: str, value: float, of: str = "") -> None:
    """UsageError for a number outside of its range. of: what else the message says of it."""
    least, most = RANGES[name]
    if not least <= value <= most:
        raise UsageError(f"{name} must be from {least} to {most}, not {value:g}{of}")


def noise_key(seed: int, prompt: Sequence[int], index: int) -> int:
    """Of the answer number `index` to these ids: 64 bits, BLAKE2b (RFC 7693) of all that it depends on.

    So answers to different prompts, and several to one, are independent under one seed, and can be repeated.
    """
    numbers = seed.to_bytes(8, "little") + index.to_bytes(8, "little")
    text = np.asarray(prompt, "<u4").tobytes()
    return int.from_bytes(hashlib.blake2b(numbers + text, digest_size=8).digest(), "little")


def _bias(bias: Mapping[int, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """By id."""
    items = bias.items() if isinstance(bias, Mapping) else _items("logit_bias", bias)
    try:
        pairs = [
            (whole_number("logit_bias: an id", id), real_number("logit_bias: a bias", value)) for id, value in items
        ]
    except (TypeError, ValueError):
        raise UsageError(f"logit_bias must be a dict of ids and biases, not {quoted(bias)}") from None
    for id, value in pairs:
        check_range("logit_bias", value, f" for id {id}")
    if len(dict(pairs)) < len(pairs):
        raise UsageError("logit_bias names an id twice")
    return tuple(sorted(pairs))


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
