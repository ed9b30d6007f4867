"""Repeated measurements: cases take turns, and every figure is a median with its range."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

Case = TypeVar("Case")


@dataclass(frozen=True)
class Spread:
    """The repeats of one figure, in the order of measurement; at least one."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def least(self) -> float:
        return min(self.samples)

    @property
    def most(self) -> float:
        return max(self.samples)

    @property
    def range(self) -> float:
        """Most less least, as a share of the median: 0.1 says that the repeats lie within 10 %."""
        return (self.most - self.least) / self.median if self.median else 0.0

    def map(self, change: Callable[[float], float]) -> "Spread":
        return Spread(tuple(map(change, self.samples)))

    def over(self, other: "Spread") -> "Spread":
        """The ratio to `other`, repeat by repeat: what slows the machine down for a while slows both."""
        pairs = zip(self.samples, other.samples, strict=False)  # an interrupted run has an unfinished last repeat
        return Spread(tuple(mine / theirs for mine, theirs in pairs))

    def as_dict(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "least": self.least,
            "most": self.most,
            "range": self.range,
            "samples": list(self.samples),
        }


def take_turns(
    cases: Sequence[Case],
    repeats: int,
    measure: Callable[[Case], None],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> bool:
    """`measure` every case once, then every case once more, ...; False if Ctrl-C ended it early."""
    try:
        for repeat in range(repeats):
            for place, case in enumerate(cases):
                measure(case)
                advance(repeat * len(cases) + place + 1, repeats * len(cases))
    except KeyboardInterrupt:
        return False
    return True
