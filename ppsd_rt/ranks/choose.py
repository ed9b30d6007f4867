"""`auto` over ranks: every candidate is simulated with the measured costs, for a grid of acceptances; then, after every
round, the candidate that is best at the acceptance of late goes on.

Candidates are plain decoding, draft-then-verify of several lengths, PPSD as published, and elastic with several first
chunks. The scheduler takes a new schedule between two rounds; verification ranks need not know.
"""

from ..schedule import PLAIN, Schedule, describe, named, parse_schedule
from ..simulate import Costs, simulate

_GRID = 10  # acceptances 0, 1/10, ..., 1
_TOKENS = 150
_WORTH = 1.03  # predicted gain from which on the schedule is changed
_PRIOR = 6.0  # verdicts that the head's own figure counts as
_FADE = 0.985  # of what was observed, each verdict
_PROBE_AFTER, _PROBE_MOST = 24, 400  # plain tokens before a draft is tried again
_PROBE_ROUNDS = 2


def candidates() -> list[Schedule]:
    lengths = [parse_schedule(f"eesd:length={length},stop_rule=fixed") for length in (1, 2, 3, 4, 6, 8, 12)]
    firsts = [parse_schedule(f"elastic:first_chunk={first}") for first in (0, 1, 2, 4)]
    return [s for s in (PLAIN, *lengths, named("ppsd"), *firsts) if isinstance(s, Schedule)]


class RankChooser:
    def __init__(self, costs: Costs, prior: float) -> None:
        self._costs = costs
        self._accepted, self._rejected = _PRIOR * prior, _PRIOR * (1 - prior)
        self._speeds = {schedule: self._simulate(schedule) for schedule in candidates()}
        self._plain_rounds, self._probe_after, self._probing = 0, _PROBE_AFTER, 0
        self.schedule = self._best()

    def _simulate(self, schedule: Schedule) -> list[float]:
        places = range(_GRID + 1) if schedule.drafts else range(1)
        return [simulate(schedule, self._costs, at / _GRID, _TOKENS).tokens_per_second for at in places]

    @property
    def acceptance(self) -> float:
        return self._accepted / (self._accepted + self._rejected)

    def predicted(self, schedule: Schedule) -> float:
        """Tokens per second at the present acceptance."""
        speeds = self._speeds[schedule]
        if len(speeds) == 1:
            return speeds[0]
        at = self.acceptance * _GRID
        low = min(int(at), _GRID - 1)
        return speeds[low] + (speeds[low + 1] - speeds[low]) * (at - low)

    def _best(self, drafting: bool = False) -> Schedule:
        return max((s for s in self._speeds if s.drafts or not drafting), key=self.predicted)

    def after(self, judged: int, accepted: int) -> Schedule | None:
        """A round with so many verdicts: the schedule to go on with, if it is another one."""
        for place in range(judged):
            self._accepted *= _FADE
            self._rejected *= _FADE
            self._accepted += place < accepted
            self._rejected += place >= accepted
        before = self.schedule
        if not before.drafts:
            self._plain_rounds += 1
            if self._plain_rounds >= self._probe_after:
                self._plain_rounds, self._probing = 0, _PROBE_ROUNDS
                self._probe_after = min(2 * self._probe_after, _PROBE_MOST)
                self.schedule = self._best(drafting=True)
        elif self._probing > 1:
            self._probing -= judged > 0
        else:
            best = self._best()
            current = 0.0 if self._probing else self.predicted(before)
            self._probing = 0
            if self.predicted(best) > _WORTH * current:
                self.schedule = best
            if best.drafts:
                self._probe_after = _PROBE_AFTER
        return self.schedule if self.schedule != before else None

    def explain(self) -> str:
        costs = self._costs
        stages = "/".join(f"{1000 * seconds:.2f}" for seconds in (costs.step[0], *(v[0] for v in costs.verify)))
        speeds = ", ".join(
            f"{describe(s)} {self.predicted(s):.0f}" for s in sorted(self._speeds, key=self.predicted, reverse=True)[:6]
        )
        return (
            f"ranks take {stages} ms a row, the exit head {1000 * costs.head:.2f} ms, "
            f"a link {1000 * costs.delays[0]:.2f} ms\n"
            f"acceptance {self.acceptance:.2f}; predicted now, tokens/s: {speeds}; plain {self.predicted(PLAIN):.0f}"
        )
