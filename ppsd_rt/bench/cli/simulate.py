"""`ppsd-run lab simulate`: schedules in simulated time, for pipelines that are not at hand."""

import argparse
from itertools import product
from typing import Any

from ...errors import UsageError
from ...files import OutputFile
from ...pipeline.schedule import Auto, Schedule, parse_schedule
from ..closed_forms import Pipeline, closed_form
from ..report import Report, columns
from ..simulate import simulate
from .bench import interrupted, print_report, run_facts
from .options import SCHEDULES

_COLUMNS = columns(
    stages="stages", link_ms="link ms|2", acceptance="acceptance|2", schedule="schedule", tokens_per_second="tok/s|1",
    speedup="x plain|2", closed_form="closed form|2", tokens_per_round="tok/pass|2"
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    file = OutputFile(args.save, "result", ()) if args.save else None
    schedules = {name: _schedule(name) for name in args.schedule or SCHEDULES}
    rows: list[dict[str, Any]] = []
    whole = True
    try:
        cases = product(_stages(args), args.link_ms, args.acceptance, schedules.items())
        for stages, link_ms, chance, (name, schedule) in cases:
            pipeline = Pipeline(tuple(ms / 1e3 for ms in stages), args.head_ms / 1e3, args.row_share, link_ms / 1e3)
            found = simulate(schedule, pipeline, chance, args.tokens, args.seed)
            case = {"stages": len(stages), "link_ms": link_ms, "acceptance": chance, "schedule": name}
            figures = {
                "tokens_per_second": found.tokens / found.seconds,
                "speedup": found.speedup,
                "closed_form": closed_form(schedule, pipeline, chance),
                "tokens_per_round": found.tokens / found.passes,
            }
            rows.append({**case, "stage_ms": stages, **figures})
    except KeyboardInterrupt:
        if not rows:
            raise
        whole = False
    cells: dict[Any, dict[str, Any]] = {}
    for row in rows:
        cell = (row["stages"], row["link_ms"], row["acceptance"])
        cells[cell] = max(cells.get(cell, row), row, key=lambda r: r["speedup"])
    keys = ("stages", "link_ms", "acceptance", "schedule", "speedup")
    summary = {"interrupted": not whole, "fastest": [{key: row[key] for key in keys} for row in cells.values()]}
    given = {name: getattr(args, name) for name in ("tokens", "seed", "head_ms", "row_share")}
    facts = run_facts("simulate", "none") | given
    print_report(Report("simulated", _COLUMNS, rows, facts, summary), args.output, file)
    return 0 if whole else interrupted()


def _schedule(name: str) -> Schedule:
    schedule = parse_schedule(name)
    if isinstance(schedule, Auto):
        raise UsageError("auto measures while it decodes: simulate the schedules that it would choose from")
    return schedule


def _stages(args: argparse.Namespace) -> list[list[float]]:
    """Milliseconds of each stage: equal ones, or each with its time."""
    if args.stage_ms is None:
        token = 20.0 if args.token_ms is None else args.token_ms
        return [[token / stages] * stages for stages in args.stages or [4]]
    if args.stages is not None or args.token_ms is not None:
        raise UsageError(f"--stage-ms and --{'stages' if args.stages is not None else 'token-ms'} do not go together")
    return [args.stage_ms]
