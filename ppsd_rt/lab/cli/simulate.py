"""`ppsd-run simulate`: schedules in simulated time, for pipelines that are not at hand."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

from ..._native import StageCosts
from ...cli.common import load_engine
from ...cli.notes import note
from ...errors import PpsdError, UsageError
from ...pipeline.schedule import Auto, Schedule, parse_schedule
from ...planning.closed_forms import closed_form
from ...planning.split import LayerCosts
from ...trace import TraceFile
from ..bench.plot import Chart, Line, Panel, PlotFile
from ..bench.report import Column, Report
from ..bench.timeline import LEGEND, column_seconds, draw
from ..simulate import Simulation, simulate
from ..stage_costs import ModelCosts, costs_of_stages, growth, measured
from ..utilisation import utilisation
from .bench import interrupted, print_report, result_file, run_facts
from .cluster import run_cluster
from .simulate_options import MOST_LAYERS, MOST_PASSES, MOST_STAGES, SCHEDULES

_COLUMNS = (
    Column("stages", "stages"),
    Column("link_ms", "link ms", 2),
    Column("acceptance", "acceptance", 2),
    Column("schedule", "schedule"),
    Column("tokens_per_second", "tok/s", 1),
    Column("speedup", "x plain", 2),
    Column("closed_form", "closed form", 2),
    Column("stall", "stages wait", 0, percent=True),
    Column("wasted_drafting", "drafting wasted", 0, percent=True),
    Column("wasted_verification", "verifying wasted", 0, percent=True),
    Column("tokens_per_round", "tok/pass", 2),
)
_AXES = {"acceptance": "acceptance", "stages": "stages", "link_ms": "link delay (ms)"}
_TITLES = {"acceptance": "acceptance {:g}", "stages": "{} stages", "link_ms": "{:g} ms a link"}


@dataclass(frozen=True)
class Pipeline:
    """costs(link seconds); split: layers in each stage, where there are layers."""

    stages: int
    costs: Callable[[float], StageCosts]
    split: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Case:
    pipeline: Pipeline
    link_ms: float
    acceptance: float
    name: str
    schedule: Schedule

    @property
    def costs(self) -> StageCosts:
        return self.pipeline.costs(self.link_ms / 1e3)

    @property
    def cell(self) -> tuple[int, float, float]:
        return self.pipeline.stages, self.link_ms, self.acceptance


def run(args: argparse.Namespace) -> int:
    if args.cluster:
        return run_cluster(args, _model(args))
    file = result_file(args)
    schedules = _schedules(args.schedule or SCHEDULES, args.second)
    if not 0 <= args.seed < 2**64:
        raise UsageError(f"--seed must be from 0 to 2**64 - 1, not {args.seed}")
    if not 0 <= args.columns <= 10_000:
        raise UsageError(f"--columns must be from 0 to 10000, not {args.columns}")
    model = _model(args)
    pipelines = _pipelines(args, model)
    _check_work(args.tokens, pipelines)
    cases = list(_cases(args, pipelines, schedules))
    inputs = (args.model, args.exit_head) if args.measured else ()
    panels = prod(sorted(map(len, (pipelines, args.link_ms, args.acceptance)))[:-1])  # the longest list is the x axis
    plot = PlotFile(args.plot, inputs, panels) if args.plot else None
    with TraceFile(args.trace, inputs) if args.trace else nullcontext() as trace:
        rows: list[dict[str, Any]] = []
        first: list[tuple[Case, Simulation]] = []
        whole = _simulate(args, cases, rows, first, trace)
    if not rows:
        raise KeyboardInterrupt
    if args.output == "table" and args.columns:
        _timelines(first, args.columns)
    print_report(_report(args, pipelines, model, rows, whole), args.output, file)
    if plot:
        plot.finish(chart(rows))
        note(f"plot: {args.plot}")
    return 0 if whole else interrupted()


def _simulate(
    args: argparse.Namespace,
    cases: Sequence[Case],
    rows: list[dict[str, Any]],
    first: list[tuple[Case, Simulation]],
    trace: TraceFile | None,
) -> bool:
    """Fill `rows`, and `first` with the first combination's answers; False if Ctrl-C ended it early."""
    try:
        for case in cases:
            simulation = simulate(
                case.schedule, case.costs, case.acceptance, args.tokens, args.seed, trace=True, second=args.second
            )
            row = _row(case, simulation)
            if case.cell == cases[0].cell:
                first.append((case, simulation))
                if trace:
                    trace.add(simulation.spans, case.name)
            rows.append(row)
    except KeyboardInterrupt:
        return False
    return True


# -- what to simulate --------------------------------------------------------------------------------------------------


def _schedules(names: Sequence[str], second: float) -> dict[str, Schedule]:
    schedules = {}
    for name in names:
        schedule = parse_schedule(name)
        if isinstance(schedule, Auto):
            raise UsageError("auto measures while it decodes: simulate the schedules that it would choose from")
        if schedule.copies:
            raise UsageError(
                f"schedule {name}: what can be copied depends on the text; simulated text never repeats itself"
            )
        if schedule.siblings and not second:
            raise UsageError(f"schedule {name}: how often are second choices right? say so with --second")
        schedules[name] = schedule
    return schedules


def _cases(args: argparse.Namespace, pipelines: Sequence[Pipeline], schedules: dict[str, Schedule]) -> Iterator[Case]:
    for pipeline in pipelines:
        for link_ms in args.link_ms:
            for acceptance in args.acceptance:
                for name, schedule in schedules.items():
                    yield Case(pipeline, link_ms, acceptance, name, schedule)


def _model(args: argparse.Namespace) -> ModelCosts | None:
    """Layers to be cut, measured or given; None: stages are given."""
    made_up = ("token_ms", "stage_ms", "layers", "layer_ms", "exit_layer", "lm_head_ms", "head_ms", "row_share")
    if args.measured:
        _exclude(args, "measured", made_up)
        return _calibrated(args)
    if args.layers is None and args.layer_ms is None:
        for option in ("split", "exit_layer", "lm_head_ms"):
            if getattr(args, option) is not None:
                raise UsageError(f"{_flag(option)} goes with --layers, --layer-ms or --measured")
        return None
    _exclude(args, "layers" if args.layers else "layer_ms", ("stage_ms",))
    lm_head = args.lm_head_ms or 0.0
    if args.layer_ms:
        _exclude(args, "layer_ms", ("layers", "token_ms"))
        if len(args.layer_ms) > MOST_LAYERS:
            raise UsageError(f"--layer-ms takes at most {MOST_LAYERS} layers, not {len(args.layer_ms)}")
        layers = args.layer_ms
    else:
        token = 20.0 if args.token_ms is None else args.token_ms
        if lm_head > token:
            raise UsageError(f"--lm-head-ms {lm_head:g} is more than the whole token's --token-ms {token:g}")
        layers = [(token - lm_head) / args.layers] * args.layers
    costs = LayerCosts(tuple(ms / 1e3 for ms in layers), (args.head_ms or 0.0) / 1e3, lm_head / 1e3)
    return ModelCosts(costs, growth(args.row_share or 0.0), args.exit_layer)


def _calibrated(args: argparse.Namespace) -> ModelCosts:
    args.backend, args.device, args.kv_dtype, args.kv_memory = "cpu", "auto", "auto", None  # as load_engine takes them
    args.stages, stages = 1, args.stages
    engine = load_engine(args)
    args.stages = stages
    if engine.head is None:
        raise PpsdError(f"{engine.name} has no exit head to measure: give --exit-head")
    if args.row_bytes is None:
        args.row_bytes = 4 * engine.config.hidden_size
    costs = engine.backend.costs()  # type: ignore[attr-defined]
    return measured(costs, engine.head.exit_layer, engine.config.num_hidden_layers)


def _pipelines(args: argparse.Namespace, model: ModelCosts | None) -> list[Pipeline]:
    link_row = _link_row(args)
    if model is None:
        return _plain_pipelines(args, link_row)
    if args.split:
        _exclude(args, "split", ("stages",))

    def pipeline(stages: int | list[int]) -> Pipeline:
        split = model.cut(stages)
        return Pipeline(len(split.sizes), lambda links: model.costs(split, links, link_row), split.sizes)

    return [pipeline(stages) for stages in ([args.split] if args.split else args.stages or [4])]


def _check_work(tokens: int, pipelines: Sequence[Pipeline]) -> None:
    stages = max(pipeline.stages for pipeline in pipelines)
    if stages > MOST_STAGES:
        raise UsageError(f"a pipeline of {stages} stages is more than the {MOST_STAGES} that can be simulated")
    if tokens * stages > MOST_PASSES:
        raise UsageError(
            f"{tokens} tokens through {stages} stages are too many: at most --tokens {MOST_PASSES // stages}"
        )


def _plain_pipelines(args: argparse.Namespace, link_row: float) -> list[Pipeline]:
    """Stages without layers: equal ones, or each with its time."""
    head, more = (args.head_ms or 0.0) / 1e3, growth(args.row_share or 0.0)

    def pipeline(milliseconds: Sequence[float]) -> Pipeline:
        seconds = [ms / 1e3 for ms in milliseconds]
        costs_of_stages(seconds, head, more, 0.0, link_row)  # refuses what makes no sense, before anything runs
        return Pipeline(len(seconds), lambda links: costs_of_stages(seconds, head, more, links, link_row))

    if args.stage_ms:
        _exclude(args, "stage_ms", ("stages", "token_ms"))
        return [pipeline(args.stage_ms)]
    token = 20.0 if args.token_ms is None else args.token_ms
    return [pipeline([token / stages] * stages) for stages in args.stages or [4]]


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
            raise UsageError(f"{_flag(option)} and {_flag(other)} do not go together")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


# -- what came of it ---------------------------------------------------------------------------------------------------


def _row(case: Case, simulation: Simulation) -> dict[str, Any]:
    costs, statistics = case.costs, simulation.statistics
    use = utilisation(simulation.spans, case.pipeline.stages, len(simulation.tokens), simulation.seconds)
    formula = closed_form(case.schedule, costs, case.acceptance)
    return {
        "stages": case.pipeline.stages,
        "link_ms": case.link_ms,
        "acceptance": case.acceptance,
        "schedule": case.name,
        "tokens_per_second": simulation.tokens_per_second,
        "speedup": simulation.tokens_per_second * costs.plain_step,
        "closed_form": formula,
        "stall": use.stall,
        "wasted_drafting": use.wasted_drafting,
        "wasted_verification": use.wasted_verification,
        "dropped_draft_steps": use.stages[0].dropped_passes,
        "dropped_passes": sum(stage.dropped_passes for stage in use.stages[1:]),
        "dropped_drafts": statistics.dropped,
        "tokens_per_round": statistics.tokens_per_round,
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
        "stages": pipeline.stages,
        "split": pipeline.split,
        "stage_ms": [1e3 * seconds for seconds in stages],
        "exit_head_ms": 1e3 * (costs.draft_step - costs.row_step),
        "link_ms_per_row": 1e3 * costs.link_row,
    }


def _timelines(first: Sequence[tuple[Case, Simulation]], columns: int) -> None:
    """The beginnings of the first combination's answers, all to one scale."""
    case, _ = first[0]
    column = min(column_seconds(simulation.spans) for _, simulation in first)
    costs = case.costs
    stages = "/".join(f"{1e3 * seconds:g}" for seconds in (costs.row_step, *(stage[0] for stage in costs.stages)))
    print(
        f"{case.pipeline.stages} stages of {stages} ms, links {case.link_ms:g} ms, acceptance {case.acceptance:g}; "
        f"a column is {1e3 * column:.3g} ms"
    )
    print(LEGEND)
    for case, simulation in first:
        verdicts = [(t.seconds, len(t.round.committed), t.round.corrected) for t in simulation.rounds]
        print(f"\n{case.name}: {simulation.tokens_per_second:.1f} tokens/s")
        print("\n".join(draw(simulation.spans, verdicts, column, columns, case.pipeline.stages)))
    print()


def chart(rows: Sequence[dict[str, Any]]) -> Chart:
    """Of the speed-ups in these rows. x: what has the most values; a panel for every combination of the other two."""
    values = {key: list(dict.fromkeys(row[key] for row in rows)) for key in _AXES}
    x = max(_AXES, key=lambda key: len(values[key]))
    down, across = [key for key in reversed(_AXES) if key != x]
    panels = []
    for row_value in values[down]:
        for column_value in values[across]:
            chosen = [row for row in rows if (row[down], row[across]) == (row_value, column_value)]
            if not chosen:  # interrupted before
                continue
            title = f"{_TITLES[across].format(column_value)}, {_TITLES[down].format(row_value)}"
            panels.append(Panel(title, _lines(chosen, x)))
    return Chart(
        "Speed-up over plain pipelined decoding",
        _AXES[x],
        "speed-up (times plain)",
        panels,
        len(values[across]),
        dashed="closed form",
    )


def _lines(rows: Sequence[dict[str, Any]], x: str) -> list[Line]:
    lines = []
    for name in dict.fromkeys(row["schedule"] for row in rows):
        mine = [row for row in rows if row["schedule"] == name]
        formula = [(row[x], row["closed_form"]) for row in mine if row["closed_form"] is not None]
        if formula:
            lines.append(Line(name, formula, dashed=True))
        lines.append(Line(name, [(row[x], row["speedup"]) for row in mine]))
    return lines
