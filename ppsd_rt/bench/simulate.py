"""A pipeline in simulated time: what `plain`, `eesd`, `ppsd` and `elastic` would do on stages whose seconds are known.

    simulate(named("ppsd"), Pipeline((0.02 / 8,) * 8, link=0.001), acceptance=0.8).speedup

The rules are those of the scheduler (csrc/core/scheduler.cpp) with the stop rule `fixed`. What is assumed: every stage
is a worker of its own; a draft token is right with the given probability, independently of all others; work that a
verdict makes void ends in that instant; the prompt's pass is not part of the time.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..pipeline.schedule import Schedule
from ..pipeline.stop_rules import FixedLength
from .closed_forms import Pipeline

MOST_STAGES = 256


@dataclass(frozen=True)
class Simulation:
    """tokens, and the passes that committed them; seconds, and what plain decoding takes on the same stages."""

    tokens: int
    passes: int
    seconds: float
    plain_seconds: float

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.seconds


def simulate(
    schedule: Schedule, pipeline: Pipeline, acceptance: float | Sequence[float], tokens: int = 1000, seed: int = 0
) -> Simulation:
    """acceptance: P(a draft token is right | all before it are); a sequence gives it by the draft token's place: how
    many others wait for their verdict in front of it, and its last number goes for all further places. The same seed
    makes the same drafts right, whatever the schedule."""
    places = [acceptance] if isinstance(acceptance, (int, float)) else list(acceptance)
    if not 2 <= len(pipeline.stages) <= MOST_STAGES:
        most = f"{MOST_STAGES - 1} at most, not {len(pipeline.stages)} stages in all"
        raise UsageError(f"a pipeline has a draft stage and at least one verification stage, {most}")
    if min(pipeline.stages) <= 0:
        raise UsageError("a stage takes more than 0 seconds")
    if schedule.copies or not isinstance(schedule.stop_rule, FixedLength):
        raise UsageError("made-up text has nothing to copy, and its drafts no confidence: simulate stop_rule=fixed")
    run = _Run(schedule, pipeline, places, tokens, random.Random(seed))
    while run.size <= tokens:
        run.begin()
        run.end_next()
    return Simulation(tokens, run.passes, run.now, tokens * pipeline.plain_step)


class _Run:
    """Tokens are counted from the prompt's, which is there. Rows are those of tokens: row i gives token i + 1."""

    def __init__(
        self, schedule: Schedule, pipeline: Pipeline, places: list[float], tokens: int, noise: random.Random
    ) -> None:
        self.schedule, self.pipeline, self.places, self.tokens = schedule, pipeline, places, tokens
        self.coins = [noise.random() for _ in range(tokens + 1)]
        self.now, self.passes = 0.0, 0
        self.instant = 1e-9 * pipeline.plain_step  # sums of the same seconds in another order differ in their last bits
        self.size = 1  # tokens that are committed
        self.drafts: list[bool] = []  # that wait for their verdict: are they right?
        self.drafted = self.launched = 0  # rows that have passed the draft stage, and those that verification has got
        self.restarted = True
        self.step: tuple[float, int, bool] | None = None  # (its end, rows that have passed then, is a draft drawn?)
        self.verdicts: deque[tuple[float, int]] = deque()  # (when it lands, rows)
        self.free = [0.0] * len(pipeline.stages[1:])  # when each verification stage is done with what it has got

    # -- what may be done now ------------------------------------------------------------------------------------------

    @property
    def known(self) -> int:
        return self.size + len(self.drafts)

    def may_draft(self) -> bool:
        return self.known < self.tokens and len(self.drafts) < self.schedule.lookahead

    def may_step(self) -> bool:
        return self.drafted < min(self.known, self.tokens) or self.may_draft()

    def committed_row_waits(self) -> bool:
        return self.launched == self.size - 1

    def ready(self) -> bool:
        pending = self.drafted - self.launched
        enough = self.schedule.first_chunk if self.restarted else 0
        return pending > 0 and (pending - self.committed_row_waits() >= enough or not self.may_step())

    def leaves(self) -> float:
        """When a pass leaves, so that it arrives when its stage is free: what is drafted until then goes along."""
        return self.free[0] - self.pipeline.link

    # -- what is done --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        while self.ready() and self.leaves() <= self.now + self.instant:
            self.launch()
        in_flight = self.launched >= self.size
        if self.step is None and (self.schedule.overlap or not in_flight) and self.may_step():
            rows, draw = self.known - self.drafted, self.may_draft()
            seconds = (self.pipeline.stages[0] * self.pipeline.more(rows) if rows else 0.0) + draw * self.pipeline.head
            self.step = (self.now + seconds, self.known, draw)

    def launch(self) -> None:
        rows = min(self.drafted - self.launched, self.schedule.max_chunk + self.committed_row_waits())
        self.launched, self.restarted = self.launched + rows, False
        there = self.now
        for stage, seconds in enumerate(self.pipeline.stages[1:]):
            there = max(there + self.pipeline.link, self.free[stage]) + seconds * self.pipeline.more(rows)
            self.free[stage] = there
        self.verdicts.append((there + self.pipeline.link, rows))

    def end_next(self) -> None:
        """Time passes until something ends, or a pass may leave."""
        moments = [self.step[0]] if self.step else []
        moments += [self.verdicts[0][0]] if self.verdicts else []
        moments += [self.leaves()] if self.ready() else []
        self.now = max(self.now, min(moments))
        if self.step and self.step[0] <= self.now + self.instant:
            (_, self.drafted, draw), self.step = self.step, None
            if draw and self.drafted == self.known:
                place = min(len(self.drafts), len(self.places) - 1)
                self.drafts.append(self.coins[self.known] < self.places[place])
        while self.verdicts and self.verdicts[0][0] <= self.now + self.instant:
            self.land(self.verdicts.popleft()[1])

    def land(self, rows: int) -> None:
        self.passes += 1
        for _ in range(rows):
            self.size += 1
            rejected = bool(self.drafts) and not self.drafts[0]
            foreseen = bool(self.drafts) and self.drafts.pop(0)
            if rejected:
                self.roll_back()
            if not foreseen or self.size > self.tokens:
                break
        self.restarted = self.restarted or not self.schedule.overlap

    def roll_back(self) -> None:
        """What is under way is void, and ends now."""
        self.drafts, self.step, self.restarted = [], None, True
        self.verdicts.clear()
        self.drafted = self.launched = min(self.drafted, self.size - 1)
        self.free = [self.now] * len(self.free)
