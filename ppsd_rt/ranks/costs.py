"""What the stages and links of a running pipeline cost, measured on the ranks themselves."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from time import perf_counter

import numpy as np

from ..schedule import MAX_ROWS
from ..seconds import check_seconds, check_table
from ..simulate import Costs, Table

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)  # those between are interpolated
CONTEXT = 128  # rows before those that are timed
SECONDS = 0.3  # for each rank
_LEAST = 3  # repeats
_CACHE = 64 << 20  # bytes that displace what a cache holds, or most of it


@dataclass(frozen=True)
class RankCosts:
    """Seconds on each rank. row: one row through the draft stage; draft: the same and the exit head; verify: of each
    other rank, passes over 1 to 16 rows; link: a message from one rank to the next, with the threads that it wakes.
    Raises ValueError for what cannot have been measured."""

    row: float
    draft: float
    verify: tuple[Table, ...]
    link: float

    def __post_init__(self) -> None:
        check_seconds("row", self.row)
        check_seconds("draft", self.draft)
        for table in self.verify:
            check_table("verify", table)
        check_seconds("link", self.link, least=0.0)

    def simulated(self, beside: "RankCosts | None" = None) -> Costs:
        """For the simulator. beside: the same, measured while all ranks were at work at once."""
        step = tuple(self.row * rows for rows in range(1, MAX_ROWS + 1))
        costs = Costs(step, max(self.draft - self.row, 0.0), self.verify, self.link)
        if beside is None:
            return costs
        drafting = max(1.0, beside.draft / self.draft)
        verifying = max(1.0, *(b[0] / a[0] for a, b in zip(self.verify, beside.verify, strict=True)))
        return replace(costs, draft_interference=drafting, verify_interference=verifying)


def interpolate(times: dict[int, list[float]]) -> Table:
    """Seconds of 1 to 16 rows, from those that were timed; fewer rows never cost more."""
    known = {rows: median(measured) for rows, measured in times.items()}
    for rows, more in reversed(list(pairwise(sorted(known)))):
        known[rows] = min(known[rows], known[more])
    table: list[float] = []
    for rows, more in pairwise(sorted(known)):
        table += [known[rows] + (known[more] - known[rows]) * i / (more - rows) for i in range(more - rows)]
    return (*table, known[max(known)])


def displacer(between: float) -> Callable[[], object]:
    """What goes through the cache between two passes of a rank in decoding: `between` bytes of weights, of the host's
    other ranks. A pass that is timed again and again would find more of its own there."""
    others = np.ones(int(min(between, _CACHE)) // 8, dtype=np.int64)
    return others.sum


def time_passes(
    time_pass: Callable[[int, int], float],
    seconds: float = SECONDS,
    one_row: bool = False,
    displace: Callable[[], object] = lambda: None,
) -> Table:
    """The kinds take turns, so that a slow moment of the machine hits all of them. one_row: that kind alone, for all
    rows: what decoding does most, and what reads the most memory at once, where other ranks work beside this one."""
    times: dict[int, list[float]] = {rows: [] for rows in ((1,) if one_row else ROWS)}
    time_pass(1, CONTEXT)  # makes the context
    end = perf_counter() + seconds
    while len(times[1]) < _LEAST or perf_counter() < end:
        for rows, measured in times.items():
            displace()
            measured.append(time_pass(rows, CONTEXT))
    return (median(times[1]),) * MAX_ROWS if one_row else interpolate(times)


def time_drafts(
    time_step: Callable[[bool, int], float], seconds: float = SECONDS, displace: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """(a row, a row and a draft)"""
    rows: list[float] = []
    drafts: list[float] = []
    time_step(True, CONTEXT)
    end = perf_counter() + seconds
    while len(rows) < _LEAST or perf_counter() < end:
        displace()
        rows.append(time_step(False, CONTEXT))
        displace()
        drafts.append(time_step(True, CONTEXT))
    return median(rows), median(drafts)
