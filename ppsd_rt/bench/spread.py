"""Repeated measurements: cases take turns, every figure is a median with its range, beside the memory's bandwidth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from .. import _native

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
    """`measure` every case once, then once more from the last to the first, ...; False if Ctrl-C ended it early.

    In the other order, because what comes after another case finds its caches, its clock and its threads."""
    try:
        for repeat in range(repeats):
            for place, case in enumerate(cases if repeat % 2 == 0 else cases[::-1]):
                measure(case)
                advance(repeat * len(cases) + place + 1, repeats * len(cases))
    except KeyboardInterrupt:
        return False
    return True


MEGABYTES = 256  # more than any cache that a laptop or a share of a server has


class Bandwidth:
    """GB/s of reading memory with each number of threads; measured once per repeat, like every other case."""

    def __init__(self, threads: Sequence[int]) -> None:
        """One thread is always measured too: it says what a second one brings."""
        self.threads = sorted({1, *threads})
        self._samples: dict[int, list[float]] = {count: [] for count in self.threads}

    def measure(self, threads: int) -> None:
        """The best of the passes over the memory that the extension makes."""
        self._samples[threads].append(_native.read_bandwidth(threads, MEGABYTES))

    def __getitem__(self, threads: int) -> Spread | None:
        """None where an interrupted run has not come to it."""
        samples = self._samples[threads]
        return Spread(tuple(samples)) if samples else None

    def as_dict(self) -> dict[str, object]:
        measured = {threads: self[threads] for threads in self.threads}
        return {str(threads): spread.as_dict() for threads, spread in measured.items() if spread}
