"""The verify-while-draft loop, written once, for every schedule: the readable twin of the fast pipelines.

Concurrency is simulated in lock-step: time advances in ticks, in each of which the draft stage makes at most one step,
and a chunk occupies the verification stages for a given number of ticks. The work itself is done in program order, so
a run gives the same rounds every time.

Positions count tokens from 0, the prompt included. A *row* is a token on its way through the layers; row p yields the
token for position p + 1. At any moment

    tokens                 committed, never taken back; the last one's row is not verified yet
    drafts                 what the exit head proposes to follow
    draft stage length     rows that have passed layers [0, E)
    launched               rows that have been handed to verification

and launched <= draft stage length <= len(tokens) + len(drafts).
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..protocol import Draft, Drafted, Limits, Round
from ..schedule import Schedule
from .lookup import Lookup
from .sampler import Sampler, confidence
from .timeline import DRAFT, VERIFY, Timeline


class Drafting(Protocol):
    """What the loop asks of the draft stage (`stage.DraftStage`, or a toy in the tests)."""

    length: int

    @property
    def draft_ids(self) -> Tensor | None: ...
    def run_tokens(self, ids: Sequence[int]) -> None: ...
    def exit_hidden(self, start: int, count: int) -> Tensor: ...
    def draft_logits(self) -> Tensor: ...
    def learn(self, position: int, last_hidden: Tensor) -> None: ...
    def rollback(self, length: int) -> None: ...


class Verifying(Protocol):
    """What the loop asks of the verification stages."""

    length: int

    def logits(self, exit_hidden: Tensor, last: int) -> Tensor: ...
    def last_hidden(self) -> Tensor: ...
    def rollback(self, length: int) -> None: ...


@dataclass(frozen=True)
class Ticks:
    """How long verification takes in lock-step: `stages` stages that each hold a chunk for `per_stage` ticks."""

    stages: int = 1
    per_stage: int = 1


@dataclass
class _Flight:
    """A chunk on its way through verification."""

    start: int
    true_ids: list[int]
    last_hidden: Tensor  # [rows, hidden]
    lands: int


class Pipeline:
    """One answer: draft, verify, commit, roll back, until the limits end it."""

    def __init__(
        self,
        draft: Drafting,
        verify: Verifying,
        schedule: Schedule,
        sampler: Sampler,
        limits: Limits,
        ticks: Ticks,
        timeline: Timeline | None = None,
    ) -> None:
        self.draft, self.verify = draft, verify
        self.schedule, self.sampler, self.limits, self.ticks = schedule, sampler, limits, ticks
        self.timeline = timeline
        self.controller = schedule.stop_rule.start(sampler.params.seed)
        self.tokens: list[int] = []
        self.drafts: list[Draft] = []
        self.lookup = Lookup(schedule.lookup) if schedule.lookup else None
        self.finished = False
        self.tick = 0
        self._epoch = 0
        self._launched = 0
        self._flights: deque[_Flight] = deque()
        self._stage_free_at = 0
        self._restarted = True
        self._stopped = False  # the exit head is not asked any more, by the stop rule, until the next verdict

    def run(self, prompt: Sequence[int]) -> Iterator[Round | Drafted]:
        """Rounds, and draft tokens as they are drawn. Rows that the stages already hold must be `prompt`'s first."""
        yield self._prefill(prompt)
        while not self.finished:
            self.tick += 1
            if self._flights and self._flights[0].lands <= self.tick:
                yield self._commit(self._flights.popleft())
            if self._ready():
                self._launch()
            if self._may_step():
                yield from self._step()

    def _prefill(self, prompt: Sequence[int]) -> Round:
        """The prompt through all layers, in one go; its last row gives the first token."""
        self.tokens = list(prompt)
        start = self.verify.length
        rows = len(prompt) - start
        with self._span("prompt", DRAFT, len(prompt) - self.draft.length):
            self.draft.run_tokens(prompt[self.draft.length :])
        with self._span("prompt", VERIFY, rows):
            logits = self.verify.logits(self.draft.exit_hidden(start, rows), last=1)
            self.tokens.append(self.sampler.choose(logits[0], len(prompt), prompt))
        self.draft.learn(len(prompt) - 1, self.verify.last_hidden()[-1])
        if self.lookup:
            self.lookup.learn(self.tokens)
        self._launched = len(prompt)
        self.finished = self._ended()
        return Round(self._epoch, len(prompt), rows, (self.tokens[-1],), prompt=True)

    # -- draft ---------------------------------------------------------------------------------------------------------

    def _may_step(self) -> bool:
        return not self.finished and (self.schedule.overlap or not self._flights) and self._has_step()

    def _has_step(self) -> bool:
        """Is there a row to run, or a draft token to draw? (The last position before the end needs neither.)"""
        row_waits = self.draft.length < min(len(self.tokens) + len(self.drafts), self.limits.end - 1)
        return row_waits or self._may_draft() or self._to_copy() is not None

    def _may_draft(self) -> bool:
        in_range = len(self.tokens) + len(self.drafts) < self.limits.end - 1
        ends = self._stopped or self._drafted_end()
        return in_range and not ends and len(self.drafts) < self.schedule.lookahead

    def _to_copy(self) -> Draft | None:
        """What the text goes on with if it repeats itself, where drafting may go on."""
        most = max(self.schedule.lookahead, self.schedule.max_chunk)
        room = len(self.tokens) + len(self.drafts) < self.limits.end - 1 and len(self.drafts) < most
        if self.lookup is None or not room or self._drafted_end():
            return None
        copy = self.lookup.propose(self._known())
        if copy is None or not self.controller.may_copy(copy.confidence, self._stopped):
            return None
        head_is_better = self.schedule.drafts and not self.lookup.beats_head(copy.confidence)
        return None if head_is_better else copy

    def _drafted_end(self) -> bool:
        return bool(self.drafts) and self.drafts[-1].token in self.limits.stop_ids

    def _step(self) -> Iterator[Drafted]:
        """One draft step: copies, the new tokens' rows through the early layers, and the exit head on the last one."""
        while (copy := self._to_copy()) is not None:
            yield self._add(copy, self.controller.stop_copying(copy.confidence))
        known = self._known()
        drafted = None
        with self._span("draft", DRAFT, len(known) - self.draft.length):
            if self.draft.length < len(known):
                self.draft.run_tokens(known[self.draft.length :])
            if self._may_draft():
                drafted = self._draw(known)
        if drafted:
            yield drafted

    def _draw(self, known: Sequence[int]) -> Drafted:
        logits, ids = self.draft.draft_logits(), self.draft.draft_ids
        token = self.sampler.choose(logits, len(known), known, ids)
        draft = Draft(token, confidence(logits, token, ids))
        return self._add(draft, self.controller.stop(draft.confidence))

    def _add(self, draft: Draft, stops: bool) -> Drafted:
        self.drafts.append(draft)
        self._stopped = self._stopped or stops
        return Drafted(len(self.tokens) + len(self.drafts) - 1, draft.token)

    # -- verify --------------------------------------------------------------------------------------------------------

    def _ready(self) -> bool:
        """The first verification stage is free, and enough rows wait or no more will come."""
        pending = self.draft.length - self._launched
        if self.finished or pending == 0 or self.tick < self._stage_free_at:
            return False
        enough = self.schedule.first_chunk if self._restarted else 0
        return pending - self._committed_row_waits() >= enough or not self._has_step()

    def _launch(self) -> None:
        """Hand the pending rows to verification, at most a chunk and the row of the last committed token."""
        start = self._launched
        count = min(self.draft.length - start, self.schedule.max_chunk + self._committed_row_waits())
        known = self._known()
        with self._span("verify", VERIFY, count):
            logits = self.verify.logits(self.draft.exit_hidden(start, count), last=count)
            # Choosing an id waits for the device, so that the span is the work and not its being asked for.
            true_ids = [self.sampler.choose(row, start + i, known[: start + i]) for i, row in enumerate(logits, 1)]
        lands = self.tick + self.ticks.stages * self.ticks.per_stage
        self._flights.append(_Flight(start, true_ids, self.verify.last_hidden(), lands))
        self._stage_free_at = self.tick + self.ticks.per_stage
        self._launched = start + count
        self._restarted = False

    def _committed_row_waits(self) -> bool:
        return self._launched == len(self.tokens) - 1

    # -- commit, roll back ---------------------------------------------------------------------------------------------

    def _commit(self, flight: _Flight) -> Round:
        """The verdict: true ids are committed up to and including the first that no draft token foresaw."""
        judged, accepted = [], 0
        for true_id in flight.true_ids:
            self.tokens.append(true_id)
            draft = self.drafts.pop(0) if self.drafts else None
            if draft is not None:
                judged.append(draft)
                accepted += draft.token == true_id
            self.finished = self._ended()
            if draft is None or draft.token != true_id or self.finished:
                break
        self.controller.observe(
            [(draft.confidence, i < accepted) for i, draft in enumerate(judged) if not draft.copied]
        )
        if self.lookup:
            self.lookup.observe(judged, accepted)
            self.lookup.learn(self.tokens)
        self._stopped = False
        dropped, epoch = 0, self._epoch
        if accepted < len(judged) or self.finished:
            dropped = len(self.drafts)
            self._roll_back()
        elif not self.schedule.overlap:
            self._restarted = True
        committed = tuple(self.tokens[flight.start + 1 :])
        self.draft.learn(flight.start + len(committed) - 1, flight.last_hidden[len(committed) - 1])
        return Round(epoch, flight.start + 1, len(flight.true_ids), committed, tuple(judged), accepted, dropped)

    def _roll_back(self) -> None:
        """Only the rows before the last committed token are good; a new epoch begins."""
        good = len(self.tokens) - 1
        self.draft.rollback(good)
        self.verify.rollback(good)
        self.drafts.clear()
        self._flights.clear()
        self._launched = good
        self._stage_free_at = self.tick
        self._restarted = True
        self._epoch += 1

    def cancel(self) -> None:
        """End here; the stages keep the rows of the committed text."""
        self.finished = True
        self._roll_back()

    def _ended(self) -> bool:
        return self.tokens[-1] in self.limits.stop_ids or len(self.tokens) >= self.limits.end

    def _span(self, name: str, track: int, rows: int) -> AbstractContextManager[None]:
        return self.timeline.span(name, track, rows) if self.timeline else nullcontext()

    def _known(self) -> list[int]:
        return self.tokens + [draft.token for draft in self.drafts]
