"""Stages that Python runs, as csrc/bindings/ranks.cpp asks them: CUDA's (cuda_stages.py).

Rows come and go as float32 arrays of the host, which hold bfloat16 and float16 exactly. A stage holds the rows of one
text, so the loop over such stages has one answer at a time (csrc/decoding/passes.h).
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt

from .. import _native
from ..pipeline.schedule import MAX_ROWS
from ..sampling.params import SamplingParams

Rows = npt.NDArray[np.float32]  # [rows, hidden]
Cancelled = Callable[[], bool] | None


class Held(Protocol):
    """The rows of a text that a stage holds. length: those that a later answer may keep."""

    @property
    def length(self) -> int: ...

    def begin(self, keep: int, end: int, prompt: int, params: SamplingParams) -> None:
        """An answer of at most `end` rows, of which `keep` are there already; its prompt has `prompt` tokens."""


class Verify(Held, Protocol):
    def run(self, start: int, ids: Sequence[int], hidden: Rows, cancelled: Cancelled) -> Rows | None:
        """hidden [rows, hidden] at positions start.. -> the rows after the last layer; None: they became void."""

    def choose(self, last: int) -> list[int]:
        """The model's own token after each of the last rows that ran."""


class Draft(Held, Protocol):
    def learn(self, position: int, hidden: Rows) -> None:
        """What the last layer made of the newest verified row [1, hidden]."""

    def step(self, start: int, ids: Sequence[int], draw: bool, cancelled: Cancelled) -> tuple[int, float] | None:
        """(draft token, the head's own probability of it), 0s where none is drawn; None: it became void on the way."""

    def exported(self, start: int, count: int) -> Rows:
        """Exit hidden states [count, hidden] of rows at positions start.. ."""


class PythonStation(_native.PythonStation):
    """last: after the last layer of all, where tokens are chosen. delay: of every message, seconds."""

    def __init__(self, stage: Verify, hidden: int, last: bool, delay: float) -> None:
        self._stage, self._hidden, self._last = stage, hidden, last
        super().__init__(stage, hidden, last, delay)

    def pin(self) -> None:
        """Its threads go where the process may."""

    def time_pass(self, rows: int, context: int) -> float:
        """Seconds of a pass over so many rows after `context` others, the choice of tokens included."""
        if not _kept(self._stage, context):
            self._run(0, context)
        begun = perf_counter()
        self._run(context, rows)
        if self._last:
            self._stage.choose(min(rows, MAX_ROWS))
        return perf_counter() - begun

    def _run(self, start: int, rows: int) -> None:
        hidden = np.linspace(-0.5, 0.5, rows * self._hidden, dtype=np.float32).reshape(rows, -1)
        self._stage.run(start, [0] * rows, hidden, None)


class PythonDrafter:
    """draws: there is an exit head. hears: it receives last hidden states."""

    def __init__(self, stage: Draft, hidden: int, vocab_size: int, draws: bool, hears: bool) -> None:
        self._stage, self._draws = stage, draws
        self._how = hidden, vocab_size, draws, hears

    def loop(self, stages: int, blocks: int) -> _native.Loop:
        return _native.loop_of_python(self._stage, *self._how, stages, blocks)

    def time_step(self, draw: bool, context: int) -> float:
        """Seconds of a row through the early layers after `context` others; draw: and of the exit head."""
        if not _kept(self._stage, context):
            self._stage.step(0, [0] * context, self._draws, None)
        begun = perf_counter()
        self._stage.step(context, [0], draw and self._draws, None)
        if not draw:
            self._stage.exported(context, 1)  # waits for a GPU
        return perf_counter() - begun


TEXT_BLOCKS = (1 << 19) // 64  # of 64 positions, for the longest text of the loop; here they take no memory


def _kept(stage: Held, context: int) -> bool:
    """A prompt of `context` rows and one more begins; are those rows there?"""
    keep = context if stage.length >= context else 0
    stage.begin(keep, context + MAX_ROWS, context + 1, SamplingParams())
    return keep > 0
