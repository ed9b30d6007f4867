"""Who decides the draft length: stop rules against the best fixed length in hindsight, without a machine's noise."""

from collections.abc import Sequence
from typing import Any

from made_up_costs import one_machine

from ppsd_rt._native import StageCosts
from ppsd_rt.lab.bench.plot import Chart, Line, Panel
from ppsd_rt.pipeline.schedule import MAX_CHUNK

from .experiment import Experiment, Found, Parts, markdown
from .lengths_replay import RULES, Replay, Rule, Text, foreseeing, made_up, replay
from .recorded import calibrated_costs, recorded

# Of the drafts' difficulty: how far it varies, whether the head is too sure, whether it changes for good.
TEXTS: dict[str, dict[str, Any]] = {
    "all alike": {"spread": 0.0},
    "varied": {"spread": 2.5},
    "varied, head too sure": {"spread": 2.5, "shift": 2.0},
    "varied, harder at half": {"spread": 2.5, "turn": True},
}
COSTS = ((0.05, 0.02), (0.1, 0.035), (0.25, 0.1))  # of a draft, and of a further row, in plain tokens
ACCEPTANCE = (0.5, 0.8)


def parts(quick: bool) -> Parts:
    length, seeds = (1000, 1) if quick else (5000, 4)
    made = {
        f"{name}, {acceptance:g}": lambda kind=kind, acceptance=acceptance: [
            compared([made_up(length, acceptance, seed=seed, **kind) for seed in range(seeds)], one_machine(*costs))
            | {"draft": costs[0], "row": costs[1]}
            for costs in COSTS
        ]
        for name, kind in TEXTS.items()
        for acceptance in ACCEPTANCE
    }
    real = {
        f"recorded, T = {temperature:g}": lambda temperature=temperature: [
            compared([recorded(temperature, 6 if quick else 34)], calibrated_costs())
        ]
        for temperature in (0.0, 0.8)
    }
    return made | real


def compared(texts: Sequence[Text], costs: StageCosts) -> dict[str, Any]:
    """Speeds, times plain decoding. so_far: of_best in the first text up to there."""

    def total(make: Any) -> list[Replay]:
        return [replay(text, costs, make(seed)) for seed, text in enumerate(texts)]

    def speed(runs: Sequence[Replay]) -> float:
        return sum(run.tokens for run in runs) / sum(run.seconds for run in runs) * costs.plain_step

    fixed = [total(lambda seed, most=most: Rule("fixed", seed, most)) for most in range(1, MAX_CHUNK + 1)]
    speeds = [speed(runs) for runs in fixed]
    best = speeds.index(max(speeds))
    rules = {}
    for name, make in RULES.items():
        runs = total(lambda seed, make=make: make(costs, seed))
        so_far = [
            (tokens, round(theirs / mine, 4))
            for (tokens, mine), (_, theirs) in zip(runs[0].at, fixed[best][0].at, strict=False)
        ]
        drafts = sum(run.drafts for run in runs) / sum(run.rounds for run in runs)
        rules[name] = {"speed": speed(runs), "of_best": speed(runs) / speeds[best], "drafts": drafts, "so_far": so_far}
    ceiling = sum(foreseeing(text, costs) for text in texts) / len(texts) * costs.plain_step
    cost = (costs.round(4) - costs.round(3)) / costs.plain_step
    return {
        "acceptance": sum(text.acceptance for text in texts) / len(texts),
        "tokens": sum(len(text.right) for text in texts),
        "cost": cost,
        "fixed": speeds,
        "best": best + 1,
        "foreseeing": ceiling,
        "rules": rules,
    }


def cases(found: Found) -> list[tuple[str, dict[str, Any]]]:
    return [(name, case) for name, cases in found.items() for case in cases]


def table(found: Found) -> str:
    """Of the best fixed length's speed; what is missing from 1 is the regret."""
    rows = [
        (
            name if "T =" in name else name.rpartition(", ")[0],
            f"{case['acceptance']:.2f}",
            f"{case['cost']:.2f}",
            f"{case['best']}: {case['fixed'][case['best'] - 1]:.2f}",
            *(f"{case['rules'][rule]['of_best']:.2f}" for rule in RULES),
            f"{case['foreseeing'] / case['fixed'][case['best'] - 1]:.2f}",
        )
        for name, case in cases(found)
        if "0.5" not in name
    ]
    head = ("text", "acceptance", "cost of a draft", "best fixed length: x plain", *RULES, "who foresees all")
    return markdown(head, rows)


def charts(found: Found) -> dict[str, Chart]:
    chosen = [
        (name, case) for name, case in cases(found) if "0.5" not in name and ("T =" in name or case["draft"] == 0.1)
    ]
    panels = [Panel(name, [Line(rule, case["rules"][rule]["so_far"]) for rule in RULES]) for name, case in chosen]
    lengths = [
        Panel(name, [Line("fixed length", [(k + 1, speed) for k, speed in enumerate(case["fixed"])])])
        for name, case in chosen
    ]
    title = "Speed up to there"
    return {
        "lengths": Chart("Fixed draft lengths", "draft length", "speed (times plain)", lengths, 3),
        "regret": Chart(title, "tokens", "speed (times the best fixed)", panels, 3),
    }


LENGTHS = Experiment("lengths", parts, table, charts)
