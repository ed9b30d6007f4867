"""`auto` in eager torch: what a draft and a pass cost is timed once, and every answer's schedule chosen from it.

The C++ planner (csrc/pipeline/planner.h) decides after every round; here once an answer is enough for a reference. The
prediction is the closed form of draft-then-verify at the acceptance of the answers so far.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import ClassVar

from ..protocol import Round
from ..schedule import PLAIN, Schedule, copying
from ..seconds import check_seconds
from ..stop_rules import BetaThompson

LENGTHS = (1, 2, 3, 4, 6, 8)
PRIOR_WEIGHT = 6.0  # verdicts that the head's own figure counts as
WORTH = 1.05  # predicted gain from which on drafting is tried


@dataclass(frozen=True)
class Costs:
    """Seconds: one row through the draft stage without and with a draft, and a pass over 1 and over `MANY` rows.
    Raises ValueError for what cannot have been measured."""

    row_step: float
    draft_step: float
    verify_one: float
    verify_many: float
    MANY: ClassVar[int] = 8

    def __post_init__(self) -> None:
        for name, cost in asdict(self).items():
            check_seconds(name, cost)

    def verify(self, rows: int) -> float:
        """More rows never take less, whatever the moments in which both were timed."""
        return self.verify_one + max(self.verify_many - self.verify_one, 0.0) * (rows - 1) / (self.MANY - 1)


@dataclass
class Chooser:
    costs: Costs
    prior: float
    accepted: float = 0.0
    judged: float = 0.0

    @property
    def acceptance(self) -> float:
        return (PRIOR_WEIGHT * self.prior + self.accepted) / (PRIOR_WEIGHT + self.judged)

    def observe(self, round: Round) -> None:
        drawn = [place < round.accepted for place, draft in enumerate(round.judged) if not draft.copied]
        self.accepted += sum(drawn)
        self.judged += len(drawn)

    def gain(self, length: int) -> float:
        """Of `length` drafts a round, over plain decoding."""
        a, c = self.acceptance, self.costs
        tokens = sum(a**k for k in range(length + 1))
        return tokens * (c.row_step + c.verify_one) / (length * c.draft_step + c.row_step + c.verify(length + 1))

    def choose(self, lookup: int = 0) -> Schedule:
        """lookup: of the schedule; copies are not foreseen, they come on top."""
        best = max(LENGTHS, key=self.gain)
        if self.gain(best) < WORTH:
            return copying(PLAIN, lookup)
        return copying(Schedule(best, best, best, overlap=False, stop_rule=BetaThompson()), lookup)

    def explain(self) -> str:
        gains = ", ".join(f"{length}: {self.gain(length):.2f}x" for length in LENGTHS)
        return f"acceptance {self.acceptance:.2f}; predicted gain by drafts a round: {gains}; next: {self.choose()}"


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median of several runs, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        begun = perf_counter()
        work()
        times.append(perf_counter() - begun)
    return sorted(times)[repeats // 2]
