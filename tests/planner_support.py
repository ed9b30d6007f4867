"""Made-up stage costs, and rounds as they would come, for tests of the planner: no clock and no model."""

import random
from collections.abc import Sequence

from ppsd_rt import _native
from ppsd_rt._native import Costs, StageCosts, testing

ROW, DRAFT, ONE, MORE = 0.15e-3, 0.3e-3, 2.7e-3, 0.1e-3  # seconds, as on a laptop


def costs(draft: float = DRAFT, overlapped: bool = False, slow: float = 2.0) -> Costs:
    """Stages that cost a pass over n rows ONE + MORE * (n - 1); side by side each is `slow` times slower."""
    verify = [ONE + MORE * n for n in range(16)]
    turns = StageCosts(ROW, draft, tuple(verify))
    beside = StageCosts(slow * ROW, slow * draft, tuple(slow * v for v in verify))
    return Costs(turns, beside if overlapped else None)


def table(fixed: float, row: float = 0.0) -> tuple[float, ...]:
    """Seconds of a pass over 1 to 16 rows that costs `fixed + row * rows`: on a memory-bound device `row` is small."""
    return tuple(fixed + row * rows for rows in range(1, 17))


def stage_costs(
    step: Sequence[float],
    head: float,
    verify: Sequence[Sequence[float]],
    links: float = 0.0,
    link_row: float = 0.0,
    interference: float = 1.0,
) -> StageCosts:
    """step, verify: by rows, as `table` gives them; head: the exit head, each time a draft token is drawn."""
    slower = {"draft_interference": interference, "verify_interference": interference}
    return StageCosts(step, step[0] + head, verify, links=links, link_row=link_row, **slower)


def equal_stages(stages: int, links: float = 0.0) -> StageCosts:
    """Devices, the draft stage among them, that each take an equal part of a plain token's second."""
    return stage_costs(table(1 / stages), 0.0, (table(1 / stages),) * (stages - 1), links)


def planner(costs: Costs, prior: float = 0.4) -> _native.Planner:
    return _native.Planner(costs, prior)


class World:
    """Rounds as they would come: every draft is right with chance `acceptance`, and time passes as the costs say.

    dearer: how many times longer a round takes after one of the other kind, plain ones and those with drafts.
    """

    def __init__(
        self,
        plan: _native.Planner,
        costs: Costs,
        acceptance: float,
        seed: int = 0,
        noise: tuple[float, float] = (0.97, 1.05),
        dearer: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.dearer, self.drafted = dearer, False
        self.plan, self.costs, self.acceptance, self.noise = plan, costs, acceptance, noise
        self.random, self.speeds = random.Random(seed), dict[float, float]()
        self.seconds, self.tokens, self.pace, self.plain_rounds, self.overlapped = 0.0, 0, 1.0, 0, 0.0

    def decode(self, tokens: int) -> float:
        """Tokens per second."""
        begun, end = self.seconds, self.tokens + tokens
        while self.tokens < end:
            schedule = testing.schedule(self.plan)
            if schedule.overlap:
                self.overlap()
                continue
            drafts, alive = 0, 1.0
            while drafts < schedule.max_chunk and alive >= schedule.stop_rule.threshold:
                drafts, alive = drafts + 1, alive * self.acceptance
            accepted = 0
            while accepted < drafts and self.random.random() < self.acceptance:
                accepted += 1
            c = self.costs.turns
            seconds = self.pace * (c.round(drafts) if drafts else c.plain_step)
            seconds *= self.random.uniform(*self.noise)
            if self.drafted != (drafts > 0):
                seconds *= self.dearer[drafts > 0]
            self.drafted = drafts > 0
            self.plain_rounds += drafts == 0
            self.seconds += seconds
            self.tokens += accepted + 1
            judged = min(drafts, accepted + 1)
            testing.after(self.plan, accepted + 1, judged, accepted, seconds, dropped=drafts - judged)
        return tokens / (self.seconds - begun)

    def overlap(self) -> None:
        accepted = 0
        while accepted < 8 and self.random.random() < self.acceptance:
            accepted += 1
        speed = self.overlapped_speed()
        seconds = self.pace * (accepted + 1) / speed * self.random.uniform(*self.noise)
        self.seconds += seconds
        self.overlapped += seconds
        self.tokens += accepted + 1
        testing.after(self.plan, accepted + 1, accepted + 1, accepted, seconds)

    def overlapped_speed(self) -> float:
        """Tokens per second, if what is foreseen is right."""
        if self.acceptance not in self.speeds:
            self.speeds[self.acceptance] = testing.predict(planner(self.costs), "overlap", 0, self.acceptance)
        return self.speeds[self.acceptance]


def best_fixed(costs: Costs, acceptance: float) -> float:
    plan = planner(costs)
    return max(
        testing.predict(plan, "plain", 0, 0), *(testing.predict(plan, "turns", k, acceptance) for k in range(1, 16))
    )
