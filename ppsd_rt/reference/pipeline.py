"""The verify-while-draft loop, written once, for every schedule: the readable twin of the fast pipelines.

Concurrency is simulated in lock-step: time advances in ticks, in each of which the draft stage makes at most one step,
and a chunk occupies the verification stages for a given number of ticks. The work itself is done in program order, so
a run gives the same rounds every time.

Positions count tokens from 0, the prompt included. A *row* is a token on its way through the layers; row p yields the
token for position p + 1. At any moment

    tokens                 committed, never taken back; the last one's row is not verified yet
    drafts                 what the exit head proposes to follow; some have a sibling, its second choice
    draft stage length     rows that have passed layers [0, E)
    launched               rows that have been handed to verification

and launched <= draft stage length <= len(tokens) + len(drafts). The row of a sibling runs beside that of its draft, at
the same position, and no other row sees it: a tree of depth one (as of SpecInfer, arXiv 2305.09781, and Medusa, arXiv
2401.10774, which verify whole trees). A rejection makes void what is under way; but where the rejected draft's sibling
is right and is among it, its verdict is waited for.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..pipeline.rounds import Draft, Drafted, Limits, Logprob, Round
from ..pipeline.schedule import MAX_ROWS, SIBLING_DRAFTS, Schedule
from ..pipeline.stop_rules import Survival, SurvivalController
from .copies import BYTES_OF_TOKEN, Copies
from .ngrams import Ngrams
from .sampler import Sampler, confidence
from .timeline import DRAFT, VERIFY, Timeline

Event = TypeVar("Event", Round, Drafted)


class Drafting(Protocol):
    """What the loop asks of the draft stage (`stage.DraftStage`, or a toy in the tests)."""

    length: int

    @property
    def draft_ids(self) -> Tensor | None: ...
    def follow(self, text: Sequence[int]) -> None: ...
    def run_tokens(self, ids: Sequence[int]) -> None: ...
    def exit_hidden(self, start: int, count: int) -> Tensor: ...
    def draft_logits(self) -> Tensor: ...
    def run_sibling(self, position: int, token: int) -> None: ...
    def sibling_hidden(self, position: int) -> Tensor: ...
    def adopt(self, position: int) -> None: ...
    def learn(self, position: int, last_hidden: Tensor) -> None: ...
    def rollback(self, length: int) -> None: ...


class Verifying(Protocol):
    """What the loop asks of the verification stages."""

    length: int

    def logits(self, exit_hidden: Tensor, last: int) -> Tensor: ...
    def sibling_logits(self, exit_hidden: Tensor, position: int) -> Tensor: ...
    def adopt(self, position: int) -> None: ...
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
    last_hidden: list[Tensor]  # [hidden] of each row
    siblings: list["_SiblingRow"]
    lands: int
    logprobs: list[Logprob | None]
    epoch: int

    @property
    def rows(self) -> int:
        return len(self.true_ids) + len(self.siblings)

    def of_the_sibling(self) -> "_Flight":
        """Where the first row turned out to be wrong: what its sibling's row gave, as a verdict on that row alone."""
        row = self.siblings[0]
        return _Flight(self.start, [row.true_id], [row.last_hidden], [], self.lands, [row.logprob], self.epoch)


@dataclass
class _SiblingRow:
    position: int
    token: int
    true_id: int  # after it
    last_hidden: Tensor  # [hidden]
    logprob: Logprob | None


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
        ngrams: Ngrams | None = None,
        owner: int = 0,
    ) -> None:
        """ngrams: what is copied from, and whose text this is; None: from this text alone."""
        self.draft, self.verify = draft, verify
        self.schedule, self.sampler, self.limits, self.ticks = schedule, sampler, limits, ticks
        self.timeline = timeline
        self.controller = schedule.stop_rule.start(sampler.params.seed or 0)
        self.tokens: list[int] = []
        self.drafts: list[Draft] = []
        self.copies: Copies | None = None
        self._ngrams, self._owner = ngrams, owner
        self._seen = 0  # tokens of the text that an earlier answer has counted
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
                yield self._land(self._flights.popleft())
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
            reported = [self.sampler.logprob(logits[0], self.tokens[-1])]
        self.draft.learn(len(prompt) - 1, self.verify.last_hidden()[-1])
        self._seen = start + (start > 0)
        self._look_up()
        self._launched = len(prompt)
        self.finished = self._ended()
        logprobs = _asked_for(reported)
        return self._marked(Round(self._epoch, len(prompt), rows, (self.tokens[-1],), prompt=True, logprobs=logprobs))

    def set_schedule(self, schedule: Schedule) -> None:
        """Between two rounds; drafts that stand stay, and what the survival rule has learned."""
        rule = schedule.stop_rule
        if isinstance(self.controller, SurvivalController) and isinstance(rule, Survival):
            self.controller.rule = rule
        elif rule != self.schedule.stop_rule:
            self.controller = rule.start(self.sampler.params.seed or 0)
        self.schedule = schedule
        self._look_up()

    def _look_up(self) -> None:
        if not self.schedule.copies:
            return
        if self.copies is None:
            ngrams = self._ngrams or Ngrams(self.limits.end * BYTES_OF_TOKEN)
            self.copies = Copies(ngrams, self._owner, self._seen)
        self.copies.learn(self.tokens)

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
        if self.copies is None or not self.schedule.copies or not room or self._drafted_end():
            return None
        copy = self.copies.propose(self.schedule, self._known())
        if copy is None or not self.controller.may_copy(copy.confidence, self._stopped):
            return None
        asks_head = self.schedule.drafts and not self._stopped
        head_is_better = asks_head and not self.copies.beats_head(copy.confidence)
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
                start = self.draft.length
                self.draft.run_tokens(known[start:])
                for position, token in self._siblings(start, len(known)):
                    self.draft.run_sibling(position, token)
            if self._may_draft():
                drafted = self._draw(known)
        if drafted:
            yield drafted

    def _draw(self, known: Sequence[int]) -> Drafted:
        self.draft.follow(self.tokens)
        ids = self.draft.draft_ids
        logits = self.sampler.edited(self.draft.draft_logits(), known, ids)
        token = self.sampler.pick(logits, len(known), known, ids)
        sure = confidence(logits, token, ids)
        draft = Draft(token, sure, sibling=self._second(logits, token, sure, known))
        return self._add(draft, self.controller.stop(draft.confidence))

    def _second(self, logits: Tensor, token: int, sure: float, known: Sequence[int]) -> int:
        """The exit head's second choice, if the chance that it is needed and right is worth a row; else -1."""
        least, ids = self.schedule.siblings, self.draft.draft_ids
        if len(self.drafts) >= SIBLING_DRAFTS:
            return -1
        alive = prod(draft.confidence for draft in self.drafts)  # the chance that it comes to this position
        if not least or len(logits) < 2 or 1.0 - sure < least / max(alive, 1e-9):
            return -1
        others = logits.clone()
        others[token if ids is None else int((ids == token).nonzero())] = -torch.inf
        second = self.sampler.pick(others, len(known), known, ids)
        worth_it = alive * confidence(logits, second, ids) >= least
        return second if worth_it and second not in self.limits.stop_ids else -1  # (after a stop there is nothing)

    def _siblings(self, start: int, end: int) -> list[tuple[int, int]]:
        """(position, token) of those beside the rows [start, end)."""
        drafts = self.drafts[max(start - len(self.tokens), 0) : max(end - len(self.tokens), 0)]
        first = max(start, len(self.tokens))
        return [(position, draft.sibling) for position, draft in enumerate(drafts, first) if draft.sibling >= 0]

    def _add(self, draft: Draft, stops: bool) -> Drafted:
        self.drafts.append(draft)
        self._stopped = self._stopped or stops
        return self._marked(Drafted(len(self.tokens) + len(self.drafts) - 1, draft.token))

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
        lands = self.tick + self.ticks.stages * self.ticks.per_stage
        siblings = self._siblings(start, start + count)
        for position, _ in siblings[MAX_ROWS - count :]:  # there is no room for them
            place = position - len(self.tokens)
            self.drafts[place] = replace(self.drafts[place], sibling=-1)
        siblings = siblings[: MAX_ROWS - count]
        with self._span("verify", VERIFY, count + len(siblings)):
            logits = self.verify.logits(self.draft.exit_hidden(start, count), last=count)
            # Choosing an id waits for the device, so that the span is the work and not its being asked for.
            true_ids = [self.sampler.choose(row, start + i, known[: start + i]) for i, row in enumerate(logits, 1)]
            reported = [self.sampler.logprob(row, id) for row, id in zip(logits, true_ids, strict=True)]
            flight = _Flight(start, true_ids, list(self.verify.last_hidden()), [], lands, reported, self._epoch)
            for position, token in siblings:
                logits = self.verify.sibling_logits(self.draft.sibling_hidden(position), position)
                true_id = self.sampler.choose(logits[0], position + 1, [*known[:position], token])
                logprob = self.sampler.logprob(logits[0], true_id)
                flight.siblings.append(_SiblingRow(position, token, true_id, self.verify.last_hidden()[-1], logprob))
        self._flights.append(flight)
        self._stage_free_at = self.tick + self.ticks.per_stage
        self._launched = start + count
        self._restarted = False

    def _committed_row_waits(self) -> bool:
        return self._launched == len(self.tokens) - 1

    # -- commit, roll back ---------------------------------------------------------------------------------------------

    def _land(self, flight: _Flight) -> Round:
        """The verdict on rows of this epoch, or on the sibling that the last rejection spared."""
        if flight.epoch == self._epoch:
            return self._marked(self._commit(flight))
        round = self._commit(flight.of_the_sibling())
        return self._marked(replace(round, rows=flight.rows, siblings=len(flight.siblings)))

    def _commit(self, flight: _Flight) -> Round:
        """True ids are committed up to and including the first that no draft token foresaw; if its sibling did, also
        the one after the sibling, where that is known already."""
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
        rejected = accepted < len(judged)
        sibling = self._right_sibling(flight) if rejected and not self.finished else None
        spares = rejected and not self.finished and sibling is None and self._on_its_way(judged[-1])
        if sibling is not None or spares:
            self.draft.adopt(len(self.tokens) - 1)
            self.verify.adopt(len(self.tokens) - 1)
        if sibling is not None:
            self.tokens.append(sibling.true_id)
            self.finished = self._ended()
        self.controller.observe(
            [(draft.confidence, i < accepted) for i, draft in enumerate(judged) if not draft.copied]
        )
        if self.copies:
            self.copies.observe(self.schedule, judged, accepted, self.tokens, flight.start + 1)
        self._look_up()
        self._stopped = False
        dropped, epoch = 0, self._epoch
        if rejected or self.finished:
            dropped = len(self.drafts)
            self._roll_back(spares)
        elif not self.schedule.overlap:
            self._restarted = True
        committed = tuple(self.tokens[flight.start + 1 :])
        reported = [*flight.logprobs, None][: len(committed)]
        if sibling is not None:
            reported[-1] = sibling.logprob
        newest = flight.last_hidden[len(committed) - 1] if sibling is None else sibling.last_hidden
        self.draft.learn(flight.start + len(committed) - 1, newest)
        return Round(
            epoch,
            flight.start + 1,
            flight.rows,
            committed,
            tuple(judged),
            accepted,
            dropped,
            siblings=len(flight.siblings),
            rescued=sibling is not None or spares,
            logprobs=_asked_for(reported),
        )

    def _right_sibling(self, flight: _Flight) -> _SiblingRow | None:
        """The one that is the token committed last."""
        last = (len(self.tokens) - 1, self.tokens[-1])
        return next((row for row in flight.siblings if (row.position, row.token) == last), None)

    def _on_its_way(self, rejected: Draft) -> bool:
        """Is the token committed last the sibling of a draft whose rows are under way?"""
        return rejected.sibling == self.tokens[-1] and self._launched >= len(self.tokens)

    def _roll_back(self, spares: bool = False) -> None:
        """Only the rows before the last committed token are good, and that one's too if it is spared: it goes on as a
        sibling. A new epoch begins."""
        good = len(self.tokens) - 1 + spares
        self.draft.rollback(good)
        self.verify.rollback(good)
        self.drafts.clear()
        spared = [flight for flight in self._flights if spares and flight.start == good - 1]
        self._flights = deque(spared)
        self._launched = good
        self._stage_free_at = self.tick
        self._restarted = not spares
        self._epoch += 1

    def cancel(self) -> None:
        """End here; the stages keep the rows of the committed text."""
        self.finished = True
        if self.tokens:  # it has begun
            self._roll_back()

    def _ended(self) -> bool:
        return self.tokens[-1] in self.limits.stop_ids or len(self.tokens) >= self.limits.end

    def _span(self, name: str, track: int, rows: int) -> AbstractContextManager[None]:
        return self.timeline.span(name, track, rows) if self.timeline else nullcontext()

    def _marked(self, event: Event) -> Event:
        """The event, of which the timeline now has the moment."""
        if self.timeline:
            self.timeline.mark(event)
        return event

    def _known(self) -> list[int]:
        return self.tokens + [draft.token for draft in self.drafts]


def _asked_for(reported: Sequence[Logprob | None]) -> tuple[Logprob, ...]:
    return tuple(logprob for logprob in reported if logprob is not None)
