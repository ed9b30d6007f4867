"""`ppsd-run lab simulate`: schedules in simulated time, for pipelines that are not at hand."""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..._native import StageCosts
from ...cli.common import engine_of
from ...errors import PpsdError, UsageError
from ...pipeline.schedule import Auto, Schedule, parse_schedule
from ...planning.closed_forms import closed_form
from ...trace import TraceFile
from ..report import Report, columns
from ..simulate import ModelCosts, Simulation, Table, costs_of_stages, growth, measured, simulate, utilisation
from .bench import interrupted, print_report, result_file, run_facts
from .options import MOST_PASSES, MOST_STAGES, SCHEDULES

_COLUMNS = columns(
    stages="stages", link_ms="link ms|2", acceptance="acceptance|2", schedule="schedule", tokens_per_second="tok/s|1",
    speedup="x plain|2", closed_form="closed form|2", stall="stages wait|0%", wasted_drafting="drafting wasted|0%",
    wasted_verification="verifying wasted|0%", tokens_per_round="tok/pass|2"
)  # fmt: skip


@dataclass(frozen=True)
class Pipeline:
    """seconds: of each stage for one row, the draft stage first, without the exit head; split: layers in each stage,
    where there are layers."""

    seconds: tuple[float, ...]
    head: float
    growth: Table
    link_row: float
    split: tuple[int, ...] | None = None

    def costs(self, links: float) -> StageCosts:
        return costs_of_stages(self.seconds, self.head, self.growth, links, self.link_row)


def run(args: argparse.Namespace) -> int:
    file = result_file(args)
    schedules = _schedules(args.schedule or SCHEDULES)
    if not 0 <= args.seed < 2**64:
        raise UsageError(f"--seed must be from 0 to 2**64 - 1, not {args.seed}")
    model = _model(args)
    pipelines = _pipelines(args, model)
    _check_work(args.tokens, pipelines)
    combinations = list(product(pipelines, args.link_ms, args.acceptance))
    inputs = (args.model, args.exit_head) if args.measured else ()
    rows: list[dict[str, Any]] = []
    whole = True
    with TraceFile(args.trace, inputs) if args.trace else nullcontext() as trace:
        try:
            for (pipeline, link_ms, chance), (name, schedule) in product(combinations, schedules.items()):
                costs = pipeline.costs(link_ms / 1e3)
                found = simulate(schedule, costs, chance, args.tokens, args.seed, trace=True)
                if trace and (pipeline, link_ms, chance) == combinations[0]:
                    trace.add(found.spans, name)
                case = {"stages": len(pipeline.seconds), "link_ms": link_ms, "acceptance": chance, "schedule": name}
                rows.append({**case, **_figures(found, costs, closed_form(schedule, costs, chance))})
        except KeyboardInterrupt:
            if not rows:
                raise
            whole = False
    print_report(_report(args, pipelines, model, rows, whole), args.output, file)
    return 0 if whole else interrupted()


# -- what to simulate --------------------------------------------------------------------------------------------------


def _schedules(names: Sequence[str]) -> dict[str, Schedule]:
    schedules = {}
    for name in names:
        schedule = parse_schedule(name)
        if isinstance(schedule, Auto):
            raise UsageError("auto measures while it decodes: simulate the schedules that it would choose from")
        if schedule.copies:
            raise UsageError(
                f"schedule {name}: what can be copied depends on the text; simulated text never repeats itself"
            )
        schedules[name] = schedule
    return schedules


def _model(args: argparse.Namespace) -> ModelCosts | None:
    """Layers to be cut, measured; None: stages are given."""
    if not args.measured:
        return None
    _exclude(args, "measured", ("token_ms", "stage_ms", "head_ms", "row_share"))
    engine = engine_of(args, backend="cpu", stages=1)
    if engine.head is None:
        raise PpsdError(f"{engine.name} has no exit head to measure: give --exit-head")
    if args.row_bytes is None:
        args.row_bytes = 4 * engine.config.hidden_size
    costs = engine.backend.costs()  # type: ignore[attr-defined]
    return measured(costs, engine.head.exit_layer, engine.config.num_hidden_layers)


def _pipelines(args: argparse.Namespace, model: ModelCosts | None) -> list[Pipeline]:
    """Cut from the model's layers; or stages without layers, equal ones or each with its time."""
    link_row, numbers = _link_row(args), args.stages or [4]
    if model is not None:
        splits = [model.cut(stages) for stages in numbers]
        return [
            Pipeline(model.without_head(split), model.layers.head, model.growth, link_row, split.sizes)
            for split in splits
        ]
    head, more = (args.head_ms or 0.0) / 1e3, growth(args.row_share or 0.0)
    token = 20.0 if args.token_ms is None else args.token_ms
    cases = [[token / stages] * stages for stages in numbers]
    if args.stage_ms:
        _exclude(args, "stage_ms", ("stages", "token_ms"))
        cases = [args.stage_ms]
    pipelines = [Pipeline(tuple(ms / 1e3 for ms in case), head, more, link_row) for case in cases]
    for pipeline in pipelines:
        pipeline.costs(0.0)  # refuses what makes no sense, before anything runs
    return pipelines


def _check_work(tokens: int, pipelines: Sequence[Pipeline]) -> None:
    stages = max(len(pipeline.seconds) for pipeline in pipelines)
    if stages > MOST_STAGES:
        raise UsageError(f"a pipeline of {stages} stages is more than the {MOST_STAGES} that can be simulated")
    if tokens * stages > MOST_PASSES:
        raise UsageError(
            f"{tokens} tokens through {stages} stages are too many: at most --tokens {MOST_PASSES // stages}"
        )


def _link_row(args: argparse.Namespace) -> float:
    """Seconds on a link for each row."""
    if args.bandwidth is None:
        return 0.0
    if args.bandwidth == 0:
        raise UsageError("--bandwidth must be more than 0")
    if args.row_bytes is None:
        raise UsageError("--bandwidth needs --row-bytes: the bytes of a hidden state")
    return 8 * args.row_bytes / (args.bandwidth * 1e9)


def _exclude(args: argparse.Namespace, option: str, others: Sequence[str]) -> None:
    for other in others:
        if getattr(args, other) is not None:
            raise UsageError(f"--{option} and --{other} do not go together".replace("_", "-"))


# -- what came of it ---------------------------------------------------------------------------------------------------


def _figures(found: Simulation, costs: StageCosts, formula: float | None) -> dict[str, Any]:
    return {
        "tokens_per_second": found.tokens_per_second,
        "speedup": found.tokens_per_second * costs.plain_step,
        "closed_form": formula,
        **utilisation(found.spans, 1 + len(costs.stages), len(found.tokens), found.seconds),
        "dropped_drafts": found.statistics.dropped,
        "tokens_per_round": found.statistics.tokens_per_round,
    }


def _report(
    args: argparse.Namespace,
    pipelines: Sequence[Pipeline],
    model: ModelCosts | None,
    rows: Sequence[dict[str, Any]],
    whole: bool,
) -> Report:
    facts = run_facts("simulate", args.model if args.measured else "none")
    facts |= {"tokens": args.tokens, "seed": args.seed, "pipelines": [_describe(pipeline) for pipeline in pipelines]}
    if model:
        layers = model.layers
        facts["model_ms"] = {
            "layers": [1e3 * seconds for seconds in layers.layers],
            "exit_head": 1e3 * layers.head,
            "lm_head": 1e3 * layers.lm_head,
            "growth_with_rows": model.growth,
            "measured": args.measured,
        }
    cells: dict[Any, dict[str, Any]] = {}
    for row in rows:
        cell = (row["stages"], row["link_ms"], row["acceptance"])
        cells[cell] = max(cells.get(cell, row), row, key=lambda r: r["tokens_per_second"])
    keys = ("stages", "link_ms", "acceptance", "schedule", "speedup")
    best = [{key: row[key] for key in keys} for row in cells.values()]
    return Report("simulated", _COLUMNS, rows, facts, {"interrupted": not whole, "fastest": best})


def _describe(pipeline: Pipeline) -> dict[str, Any]:
    costs = pipeline.costs(0.0)
    stages = [costs.row_step, *(stage[0] for stage in costs.stages)]
    return {
        "stages": len(pipeline.seconds),
        "split": pipeline.split,
        "stage_ms": [1e3 * seconds for seconds in stages],
        "exit_head_ms": 1e3 * (costs.draft_step - costs.row_step),
        "link_ms_per_row": 1e3 * costs.link_row,
    }
