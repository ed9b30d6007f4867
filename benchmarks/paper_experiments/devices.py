"""What a device is worth: speed over one device's plain decoding, divided by the devices; busy and wasted time a token.

Simulated, on made-up arithmetic of equal stages, but for two kinds of rows: tensor parallelism is from `ranks`, where
it was measured on two cores, and SPD's cells are their clock, on n + 1 GPUs.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from made_up_costs import equal_costs, one_machine

from ppsd_rt._native import Costs, Planner, StageCosts
from ppsd_rt.lab.simulate import simulate
from ppsd_rt.lab.utilisation import utilisation
from ppsd_rt.pipeline.schedule import parse_schedule

from .experiment import Experiment, Found, Parts, markdown

STAGES = (1, 4, 8, 16)
SCHEDULES = ("plain", "eesd", "ppsd", "elastic", "auto")
TOKEN_MS, HEAD_MS, ROW_SHARE, LINK_MS, ACCEPTANCE = 160.0, 0.5, 0.02, 1.0, 0.8
EARLY = 0.1  # share of the layers that one device drafts with
# By SPD's clock at T = 0, times plain decoding on one GPU (BENCHMARK_RESULTS.md of its repository, 186f366).
SPD = {"4B": {4: 1.28, 8: 1.25, 16: 0.89}, "9B": {4: 1.53, 8: 1.44, 16: 0.98}}
REAL = Path(__file__).parents[1] / "results" / "papers" / "ranks.json"


def costs_of(stages: int) -> StageCosts:
    if stages > 1:
        return equal_costs(stages, TOKEN_MS, HEAD_MS, ROW_SHARE, LINK_MS)
    one, seconds = one_machine(EARLY + HEAD_MS / TOKEN_MS, ROW_SHARE), TOKEN_MS / 1000  # in plain tokens
    return StageCosts(one.row_step * seconds, one.draft_step * seconds, tuple(each * seconds for each in one.verify))


def parts(quick: bool) -> Parts:
    tokens = 1000 if quick else 10_000
    return {str(stages): partial(measured, stages, tokens) for stages in STAGES}


def measured(stages: int, tokens: int) -> list[dict[str, Any]]:
    costs = costs_of(stages)
    rows = []
    for name in SCHEDULES:
        if stages == 1 and name in ("ppsd", "elastic"):
            continue  # they need two
        schedule = Planner(Costs(costs, costs if stages > 1 else None), 0.5) if name == "auto" else parse_schedule(name)
        made = simulate(schedule, costs, ACCEPTANCE, tokens, trace=True)
        tracks = max(stages, 2)  # one device is a draft stage and a verification stage in turns
        use = utilisation(made.spans, tracks, tokens, made.seconds)
        busy = sum(stage.seconds for stage in use.stages)
        wasted = sum(stage.seconds * max(0.0, 1 - tokens / stage.rows) for stage in use.stages if stage.rows)
        rows.append(
            {"schedule": name, "speed": made.tokens_per_second * TOKEN_MS / 1000}
            | {"busy_ms": 1000 * busy / tokens, "wasted_ms": 1000 * wasted / tokens}
        )
    return rows


def tensor_parallel() -> list[tuple[int, float]]:
    """(processes, speed over one process) without a delay, as far as `ranks` has it."""
    if not REAL.exists():
        return []
    found = {name: part["found"] for name, part in json.loads(REAL.read_text(encoding="utf-8"))["parts"].items()}
    alone = next(r["tokens_per_second"] for r in found["one process, oracle, 0.8"]["rows"] if r["schedule"] == "plain")
    return [
        (case["processes"], case["rows"][0]["tokens_per_second"] / alone)
        for name, case in found.items()
        if name.startswith("tensor-parallel") and case["link_ms"] == 0
    ]


def table(found: Found) -> str:
    rows: list[tuple[str, ...]] = []
    for stages, each in found.items():
        for row in each:
            speed, busy, wasted = row["speed"], row["busy_ms"], row["wasted_ms"]
            figures = f"{speed:.2f}", f"{speed / int(stages):.2f}", f"{busy:.0f}", f"{wasted:.0f}"
            rows.append((row["schedule"], stages, "simulated", *figures))
    rows += [
        ("tensor-parallel, plain", str(n), "measured, one core each", f"{speed:.2f}", f"{speed / n:.2f}", "-", "-")
        for n, speed in tensor_parallel()
    ]
    rows += [
        (f"`ppsd` by SPD, {model}", str(n + 1), "quoted, T = 0", f"{wall:.2f}", f"{wall / (n + 1):.2f}", "-", "-")
        for model, cells in SPD.items()
        for n, wall in cells.items()
    ]
    head = ("what", "devices", "source", "speed", "speed / devices", "busy, stage-ms a token", "of it wasted")
    return markdown(head, rows, left=3)


DEVICES = Experiment("devices", parts, table)
