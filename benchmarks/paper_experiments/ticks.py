"""PPSD as SPD's authors reran it: one constant of time a tick, fitted at 4 stages, must explain 8 and 16.

The cells are from BENCHMARK_RESULTS.md of github.com/yuyijiong/speculative_pipeline_decoding (186f366): Qwen3.5-4B and
9B of 32 layers, a draft head of one layer, 80 prompts each of MT-Bench, GSM8K and HumanEval. Plain decoding there is
on one GPU, PPSD on n + 1. Their theoretical speed-up knows acceptance and head, and no cost of a tick.
"""

from typing import Any

from ppsd_rt.lab.bench.plot import Chart, Line, Panel
from ppsd_rt.lab.simulate import pipeline_costs, simulate, table
from ppsd_rt.pipeline.schedule import parse_schedule

from .experiment import Claim, Experiment, Found, Parts, markdown

LAYERS = 32
PLAIN_MS = {"4B": 1000 / 35.26, "9B": 1000 / 34.18}
# (model, temperature) -> stages -> (theoretical, wall clock), over all three sets
CELLS = {
    ("4B", 0): {4: (1.54, 1.28), 8: (1.68, 1.25), 16: (1.40, 0.89)},
    ("9B", 0): {4: (1.90, 1.53), 8: (1.96, 1.44), 16: (1.56, 0.98)},
    ("4B", 1): {4: (1.39, 1.06), 8: (1.44, 0.95), 16: (1.20, 0.65)},
    ("9B", 1): {4: (1.71, 1.27), 8: (1.68, 1.10), 16: (1.32, 0.72)},
}


def acceptance(theoretical: float, stages: int) -> float:
    """From n / (a + (1 - a) n) / (1 + n / layers): a tick is longer by the head's layer."""
    ticks = stages / (theoretical * (1 + stages / LAYERS))  # a committed token
    return (stages - ticks) / (stages - 1)


def predicted(model: str, stages: int, chance: float, constant_ms: float, tokens: int) -> float:
    """Times plain decoding on one GPU, by the simulator: equal stages, no links; a tick has the constant in it."""
    tick = PLAIN_MS[model] / stages * (1 + stages / LAYERS) + constant_ms
    costs = pipeline_costs(table(tick), 0.0, (table(tick),) * (stages - 1))
    return simulate(parse_schedule("ppsd"), costs, chance, tokens).tokens_per_second * PLAIN_MS[model]


def fitted(temperature: int, tokens: int, at: tuple[int, ...]) -> float:
    """Milliseconds a tick: the least squares of the relative errors at so many stages, of both models."""

    def error(constant: float) -> float:
        total = 0.0
        for (model, warm), cells in CELLS.items():
            for stages in at if warm == temperature else ():
                theoretical, wall = cells[stages]
                ours = predicted(model, stages, acceptance(theoretical, stages), constant, tokens)
                total += (ours / wall - 1) ** 2
        return total

    return min((step * 0.05 for step in range(101)), key=error)


def parts(quick: bool) -> Parts:
    return {f"T = {warm}": lambda warm=warm: measured(warm, 500 if quick else 5_000) for warm in (0, 1)}


def measured(temperature: int, tokens: int) -> dict[str, Any]:
    constant, rows, best = fitted(temperature, tokens, (4,)), [], {}
    overall = fitted(temperature, tokens, (4, 8, 16))
    for (model, warm), cells in CELLS.items():
        if warm != temperature:
            continue
        for stages, (theoretical, wall) in cells.items():
            chance = acceptance(theoretical, stages)
            ours = predicted(model, stages, chance, constant, tokens)
            rows.append({"model": model, "stages": stages, "acceptance": chance, "theoretical": theoretical})
            rows[-1] |= {"wall": wall, "predicted": ours}
            rows[-1]["by_all"] = predicted(model, stages, chance, overall, tokens)
        chance = acceptance(cells[4][0], 4)
        best[model] = [(n, predicted(model, n, chance, constant, tokens)) for n in range(2, 17)]
    return {"constant_ms": constant, "of_all_ms": overall, "cells": rows, "by_stages": best}


def table_of(found: Found) -> str:
    rows = [
        (
            name,
            cell["model"],
            str(cell["stages"]),
            f"{cell['acceptance']:.2f}",
            f"{case['constant_ms']:.2f}",
            f"{cell['theoretical']:.2f}",
            f"{cell['wall']:.2f}",
            f"{cell['predicted']:.2f}",
            f"{cell['predicted'] / cell['wall'] - 1:+.1%}" + (" (fitted)" if cell["stages"] == 4 else ""),
            f"{case['of_all_ms']:.2f}",
            f"{cell['by_all'] / cell['wall'] - 1:+.1%}",
            "{}: {:.2f}".format(*max(case["by_stages"][cell["model"]], key=lambda each: each[1])),
        )
        for name, case in found.items()
        for cell in case["cells"]
    ]
    head = ("sampling", "model", "stages", "acceptance", "constant, ms a tick", "their theory", "their clock")
    return markdown(
        (*head, "predicted", "error", "of all cells, ms a tick", "its error", "best number of stages, predicted"),
        rows,
        left=2,
    )


def charts(found: Found) -> dict[str, Chart]:
    panels = []
    for name, case in found.items():
        lines = [Line(f"{model}, predicted", points, dashed=True) for model, points in case["by_stages"].items()]
        for model in case["by_stages"]:
            points = [(cell["stages"], cell["wall"]) for cell in case["cells"] if cell["model"] == model]
            lines.append(Line(f"{model}, SPD's clock", points))
        panels.append(Panel(name, lines))
    return {
        "ticks": Chart("A constant cost a tick", "stages", "speed-up (times one GPU)", panels, 2, dashed="predicted")
    }


TICKS = Experiment(
    "ticks",
    (Claim("SPD", "BENCHMARK_RESULTS.md", "PPSD comes to 1.28x and 1.53x at 4 stages, 0.89x and 0.98x at 16"),),
    parts,
    table_of,
    charts,
)
