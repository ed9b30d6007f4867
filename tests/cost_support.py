"""Made-up stage costs."""

from collections.abc import Sequence

from ppsd_rt._native import StageCosts


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
