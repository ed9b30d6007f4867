"""What the stages and links of a running pipeline cost, measured on the ranks themselves."""

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import TypeVar

import numpy as np

from .._native import Costs, StageCosts

Table = tuple[float, ...]  # seconds by rows
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)  # those between are interpolated
CONTEXT = StageCosts.CONTEXT  # rows before those that are timed
SECONDS = 0.3  # for each rank
_LEAST = 3  # repeats
_CACHE = 64 << 20  # bytes that displace what a cache holds, or most of it

T = TypeVar("T")


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


def _medians(kinds: Mapping[T, Callable[[], float]], seconds: float, displace: Callable[[], object]) -> dict[T, float]:
    """The kinds take turns, so that a slow moment of the machine hits all of them."""
    times: dict[T, list[float]] = {kind: [] for kind in kinds}
    end, repeats = perf_counter() + seconds, 0
    while repeats < _LEAST or perf_counter() < end:
        for kind, once in kinds.items():
            displace()
            times[kind].append(once())
        repeats += 1
    return {kind: median(measured) for kind, measured in times.items()}


def time_passes(
    time_pass: Callable[[int, int], float],
    seconds: float = SECONDS,
    one_row: bool = False,
    displace: Callable[[], object] = lambda: None,
) -> Table:
    """one_row: of passes over one row alone, for all rows: what decoding does most, and what reads the most memory at
    once, where other ranks work beside this one."""
    time_pass(1, CONTEXT)  # makes the context
    kinds = {rows: partial(time_pass, rows, CONTEXT) for rows in ((1,) if one_row else ROWS)}
    return StageCosts.between(_medians(kinds, seconds, displace))


def time_drafts(
    time_step: Callable[[bool, int], float], seconds: float = SECONDS, displace: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """(a row, a row and a draft)"""
    time_step(True, CONTEXT)
    found = _medians({draw: partial(time_step, draw, CONTEXT) for draw in (False, True)}, seconds, displace)
    return found[False], found[True]
