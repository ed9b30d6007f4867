"""What the stages and links of a running pipeline cost, measured on the ranks themselves."""

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from .._native import Costs, StageCosts

Table = tuple[float, ...]  # seconds by rows
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)  # those between are interpolated
CONTEXT = StageCosts.CONTEXT  # rows before those that are timed
SECONDS = 0.3  # for each rank
_LEAST = 3  # repeats
_CACHE = 64 << 20  # bytes that displace what a cache holds, or most of it


def side_by_side(alone: StageCosts, beside: StageCosts) -> Costs:
    """For the planner, of row steps, draft steps and passes of each rank, and of messages with the threads that they
    wake. alone: each rank while the others wait; beside: while all were at work at once."""
    drafting = max(1.0, beside.draft_step / alone.draft_step)
    passes = zip(alone.stages, beside.stages, strict=True)
    verifying = max(1.0, *(together[0] / by_itself[0] for by_itself, together in passes))
    return Costs(alone, alone.replace(draft_interference=drafting, verify_interference=verifying))


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
    return StageCosts.between({rows: median(measured) for rows, measured in times.items()})


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
