"""Stalls, wasted work and what travels, of each schedule: from the spans of simulated answers."""

from typing import Any

from made_up_costs import equal_costs

from ppsd_rt.lab.bench.plot import Chart, Line, Panel
from ppsd_rt.lab.simulate import simulate
from ppsd_rt.lab.utilisation import utilisation
from ppsd_rt.pipeline.schedule import parse_schedule

from .experiment import Experiment, Found, Parts, markdown

STAGES = (2, 4, 8, 16)
ACCEPTANCE, SHOWN = (0.6, 0.8, 0.9), 0.8
SCHEDULES = ("plain", "eesd", "ppsd", "elastic")
ROW_KB = 4096 * 4 / 1024  # a hidden state of a 7B model in float32, as the wire has it


def parts(quick: bool) -> Parts:
    tokens = 1000 if quick else 10_000
    return {str(stages): lambda stages=stages: answers(stages, tokens) for stages in STAGES}


def answers(stages: int, tokens: int) -> list[dict[str, Any]]:
    """Shares of the time and of the work; rows that reach verification, and kilobytes between stages, for a token."""
    costs, rows = equal_costs(stages, 160.0, 0.5, 0.02, 1.0), []
    for acceptance in ACCEPTANCE:
        for name in SCHEDULES:
            made = simulate(parse_schedule(name), costs, acceptance, tokens, trace=True)
            use = utilisation(made.spans, stages, tokens, made.seconds)
            sent = sum(stage.rows for stage in use.stages[1:]) / tokens
            rows.append(
                {"schedule": name, "acceptance": acceptance, "speedup": made.tokens_per_second * costs.plain_step}
                | {"stall": use.stall, "wasted_drafting": use.wasted_drafting}
                | {"wasted_verification": use.wasted_verification, "kilobytes": sent * ROW_KB}
            )
    return rows


def formula(stages: int) -> float:
    """PPSD's speed over plain decoding, as reconstructed: equal stages, no links, a head that costs nothing."""
    return stages / (SHOWN + (1 - SHOWN) * stages)


def table(found: Found) -> str:
    rows = [
        (
            stages,
            row["schedule"],
            f"{row['speedup']:.2f}",
            f"{formula(int(stages)):.2f}" if row["schedule"] == "ppsd" else "-",
            *(f"{row[key]:.0%}" for key in ("stall", "wasted_drafting", "wasted_verification")),
            f"{row['kilobytes']:.0f}",
        )
        for stages, answers in found.items()
        for row in answers
        if row["acceptance"] == SHOWN
    ]
    head = (
        "stages",
        "schedule",
        "x plain",
        "formula",
        "stages wait",
        "drafts wasted",
        "verification wasted",
        "KB sent for a token",
    )
    return markdown(head, rows, left=2)


def charts(found: Found) -> dict[str, Chart]:
    panels = [
        Panel(
            title,
            [
                Line(name, [(float(n), row[key]) for n, rows in found.items() for row in rows if is_of(row, name)])
                for name in SCHEDULES
            ],
        )
        for key, title in (
            ("stall", "verification stages wait"),
            ("wasted_drafting", "drafting wasted"),
            ("wasted_verification", "verification wasted"),
        )
    ]
    return {"waste": Chart("Acceptance 0.8, links of 1 ms, simulated", "stages", "share", panels, 3)}


def is_of(row: dict[str, Any], name: str) -> bool:
    return row["schedule"] == name and row["acceptance"] == SHOWN


WASTE = Experiment("waste", parts, table, charts)
