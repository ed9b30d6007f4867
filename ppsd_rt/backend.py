"""What an engine asks of a backend."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import PpsdError, UsageError
from .models.head_file import HeadFile, HeadInfo
from .pipeline.rounds import Drafted, Limits, Logprob, Round
from .pipeline.schedule import Auto, Schedule
from .sampling.grammar import Masks
from .sampling.params import SamplingParams

if TYPE_CHECKING:
    from ._native import LoopAnswer

NO_NUMBER = "the model's output is not a number: its weights are damaged, or overflow in this format"
SHARED = 2**64 - 2  # the owner of all that is shared
ENDED = "this generation was ended: what the engine was asked for next needs it alone"
_TOGETHER = 64  # rows of logits that are held at once

Logits = Callable[[Sequence[int], int], npt.NDArray[np.float32]]  # as Backend.logits


@dataclass(frozen=True)
class Oracle:
    """For benchmarks: drafts that are right with probability `acceptance`, whatever the head says.

    truth: the ids of the whole text, prompt included, as plain decoding gives it. The work of drafting is done all the
    same, so schedules can be measured at any acceptance.
    """

    truth: tuple[int, ...]
    acceptance: float
    seed: int = 0


@dataclass(frozen=True)
class RunOptions:
    """What to do besides decoding: report draft tokens as they are drawn, record a timeline, draft by an oracle.

    masks: the engine's, of the grammar that the sampling asks for.
    prompt_progress: called now and then while the prompt is computed, with the rows done and the rows to do; the last
    time with all of them, however it ends. The cpu and torch backends call it.
    owner: drafts are copied from this text and from others of the same owner, and from nobody else's; None: from this
    text alone, and nobody copies from it.
    shared: but from all texts that are shared, whoever owns them, and from no other ones.
    kept: where the engine keeps answers to learn from, or prompts in a file, this one too.
    """

    report_drafts: bool = False
    trace: bool = False
    oracle: Oracle | None = None
    masks: Masks | None = None
    prompt_progress: Callable[[int, int], None] | None = None
    owner: int | None = 0
    shared: bool = False
    kept: bool = True

    @property
    def copied_by(self) -> int | None:
        return copied_by(self.owner, self.shared)


def copied_by(owner: int | None, shared: bool) -> int | None:
    """The owner of a text in the memory of answers. What was shared is found only by what is shared."""
    return SHARED if shared and owner is not None else owner


class Cancellation:
    """How an answer in the making is told to end, by any thread.

    source: what is asked whether an event is there already; None: nothing can tell.
    """

    def __init__(self) -> None:
        self.asked = False
        self.source: LoopAnswer | None = None
        self._tell: Callable[[], None] | None = None

    def ask(self) -> None:
        self.asked = True
        if self._tell is not None:
            self._tell()

    def tells(self, cancel: Callable[[], None]) -> None:
        """Call `cancel` when it is asked for, in the thread that asks; or now, if that has been."""
        self._tell = cancel
        if self.asked:
            cancel()


# What an answer is: (prompt, params, schedule, limits, options, cancellation)
Request = tuple[Sequence[int], SamplingParams, Schedule | Auto, Limits, RunOptions, Cancellation]


class Backend(Protocol):
    """One model, one exit head or none."""

    @property
    def name(self) -> str: ...
    @property
    def concurrency(self) -> int:
        """How many answers are decoded at the same time; others wait."""

    @property
    def longest(self) -> int:
        """Tokens of a text, prompt included, that there is memory for: how far an answer without max_tokens goes."""

    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def copies(self) -> bool:
        """Can drafts be copied (`lookup` and `recycle` of the schedules)?"""

    @property
    def extras(self) -> frozenset[str]:
        """Which of `sampling.params.EXTRAS` it does."""

    @property
    def head(self) -> HeadInfo | None: ...
    def use_head(self, file: HeadFile | None) -> None: ...
    def know(self, successors: npt.NDArray[np.int32] | None) -> None:
        """Forget what earlier answers said, from which drafts are copied.

        successors: what usually follows, as of HeadFile, to begin with.
        """

    def rounds(self, *request: *Request) -> Generator[Round | Drafted, None, None]:
        """Decode one answer. What takes longer than a round is told of the cancellation; the caller looks at it between
        rounds, and closes the generator.
        """

    def explain(self) -> str:
        """What `auto` expects of every schedule, and what it has measured; empty when it has not been used."""

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        """[last, vocabulary]: the model's logits after each of the `last` ids, as plain decoding computes them.

        UsageError: an id that the model does not have, or fewer than `last` of them.
        """

    def logprobs(self, ids: Sequence[int], top: int) -> list[Logprob]:
        """Of every id but the first, given those before it, with the `top` most probable ids."""

    def bytes_per_token(self, context: int) -> int:
        """What a plain step must read with `context` rows in the KV cache: all weights once, and the cache."""

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        """The timeline of the last answer: (name, track, rows, begin, end) in microseconds; empty without `trace`."""

    def facts(self) -> dict[str, Any]:
        """What `ppsd-run info` should say of it."""


def kv_dtype_of(backend: Backend) -> str:
    """What it keeps keys and values as."""
    return str(backend.facts().get("kv_dtype", backend.dtype))


def logprobs_by_logits(logits: Logits, ids: Sequence[int], top: int) -> list[Logprob]:
    """`Backend.logprobs` of a backend's `logits`."""
    said: list[Logprob] = []
    for first in range(1, len(ids), _TOGETHER):
        after = ids[first : first + _TOGETHER]
        for row, id in zip(logits(ids[: first + len(after) - 1], len(after)).astype(np.float64), after, strict=True):
            if not np.isfinite(row).all():
                raise PpsdError(NO_NUMBER)
            row -= row.max()
            row -= np.log(np.exp(row).sum())
            best = np.argsort(-row, kind="stable")[:top].tolist()
            said.append(Logprob(float(row[id]), tuple((other, float(row[other])) for other in best)))
    return said


def check_ids(ids: Sequence[int], last: int, vocab_size: int) -> None:
    """What every backend asks of `logits`."""
    if not 1 <= last <= len(ids):
        raise UsageError(f"of {len(ids)} ids there are logits after 1 to {len(ids)}, not after {last}")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UsageError(f"token ids are 0 to {vocab_size - 1}")


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
