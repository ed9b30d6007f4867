"""What each tuned constant of the planner is worth: at half and at double of it, in simulated time.

    python benchmarks/planner_constants.py            # the table of docs/design/planner.md

Answers are decoded by the planner alone (tests/planner_support.py): rounds take what the costs say, with noise and with
a bias of each kind, and drafts are right by chance. Where stages overlap, the real scheduler decodes. For each constant
and value, the figures are

    usual    answers of 256 tokens by new planners: tokens per second over the best fixed schedule's
    worst    the slowest of answers of at least 16 tokens, over plain decoding's, where rounds take what was foreseen
    short    answers of 24 tokens, one after the other, over the best fixed schedule's
    changed  answers after which the head turned good or bad; and costs that were measured wrong
    copies   copies that keep what they promise, or a third of it, without a head, over plain decoding's
    overlap  where overlapping seems to pay, and does or does not, on one machine and over ranks; over the best schedule

in per cent, as the difference to the constant's own value, with the same seeds. A dash: less than 0.1, or
than twice the standard error of the difference.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev

from ppsd_rt import _native
from ppsd_rt._native import Costs, StageCosts, Tuning
from ppsd_rt.lab.simulate import pipeline_costs, simulate, table
from ppsd_rt.pipeline.schedule import named

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # which holds a folder ppsd_rt too

from planner_support import World, best_fixed, costs

CALIBRATION = ("seconds", "short_handed", "doubts", "moments", "crowded", "patience")  # of moments, not of rounds
HEADS = (0.0, 0.2, 0.5, 0.75, 0.9)
DRAFTS = (0.1e-3, 0.5e-3)
Figures = dict[str, list[float]]


def planner(c: Costs, tuning: Tuning, prior: float = 0.4) -> _native.Planner:
    return _native.Planner(c, prior, tuning=tuning)


def usual(tuning: Tuning, seed: int) -> Iterable[float]:
    """Answers of 256 tokens, from files that say too much or too little of their heads."""
    for draft in DRAFTS:
        c = costs(draft)
        for acceptance in HEADS:
            for prior in (0.0, 0.9):
                world = World(planner(c, tuning, prior), c, acceptance, seed, (0.96, 1.04))
                yield world.decode(256) / best_fixed(c, acceptance)


def worst(tuning: Tuning, seed: int) -> Iterable[float]:
    slowest = 9.0
    for draft in DRAFTS:
        c = costs(draft)
        for acceptance in HEADS[:3]:
            world = World(planner(c, tuning, 0.9), c, acceptance, seed, (1.0, 1.0))
            for tokens in range(16, 200):
                if tokens > world.tokens:
                    world.decode(tokens - world.tokens)
                slowest = min(slowest, world.tokens / world.seconds * c.plain_seconds)
    yield slowest


def changed(tuning: Tuning, seed: int) -> Iterable[float]:
    """Heads that change, and costs that were measured wrong."""
    c = costs()
    for before, after in ((0.0, 0.9), (0.9, 0.0), (0.3, 0.7)):
        world = World(planner(c, tuning), c, before, seed, (0.96, 1.04))
        world.decode(300)
        world.plan.begin(128)
        world.acceptance = after
        yield world.decode(200) / best_fixed(c, after)
    for wrong in (0.6, 2.0):
        believed = c.replace(turns=c.turns.replace(draft_step=c.turns.draft_step * wrong))
        world = World(planner(believed, tuning), c, 0.5, seed, (0.9, 1.3))
        yield world.decode(600) / best_fixed(c, 0.5)


def short(tuning: Tuning, seed: int) -> Iterable[float]:
    c = costs()
    for acceptance in (0.0, 0.3, 0.6, 0.85):
        world = World(planner(c, tuning), c, acceptance, seed, (0.96, 1.04))
        for _ in range(20):
            world.plan.begin(128)
            world.decode(24)
        yield world.tokens / world.seconds / best_fixed(c, acceptance)


def copies(tuning: Tuning, seed: int) -> Iterable[float]:
    """Before one round in four the text repeats itself, and goes on alike with a chance that is known."""
    c, turns = costs(), costs().turns
    plan, rng = _native.Planner(c, 0.0, 3, tuning=tuning), random.Random(seed)
    seconds, tokens = 0.0, 0
    while tokens < 1200:
        schedule = plan.schedule()
        most, drafts = schedule.max_chunk, schedule.lookahead
        prices = schedule.stop_rule.copy_thresholds
        chance, copied = rng.uniform(0.1, 0.95), 0
        if not drafts and rng.random() < 0.25:
            while copied < most and chance ** (copied + 1) >= prices[copied]:
                copied += 1
        accepted = 0
        while accepted < copied and rng.random() < chance:
            accepted += 1
        judged = min(copied + drafts, accepted + 1)
        took = turns.round(drafts) if drafts else turns.plain_step + turns.verify[copied] - turns.verify[0]
        seconds, tokens = seconds + took, tokens + accepted + 1
        plan.after(accepted + 1, judged, accepted, took, min(copied, judged), dropped=copied + drafts - judged)
    yield tokens / seconds * c.plain_seconds


def overlapped(tuning: Tuning, seed: int) -> Iterable[float]:
    """One machine where it pays, or does not, or seems to; four ranks, as measured and hindering each other more."""

    def share(believed: Costs, real: StageCosts) -> float:
        fixed = (named(name) for name in ("ppsd", "elastic"))
        best = max(best_fixed(Costs(real), 0.6), *(simulate(s, real, 0.6, 2000).tokens_per_second for s in fixed))
        return simulate(planner(believed, tuning), real, 0.6, 800, seed).tokens_per_second / best

    def hindering(turns: StageCosts, slow: float) -> StageCosts:
        return turns.replace(draft_interference=slow, verify_interference=slow)

    for slow in (1.0, 1.8):
        machine = costs(overlapped=True, slow=slow)
        yield share(machine, hindering(machine.turns, slow))
    yield share(machine.replace(turns=costs(overlapped=True).overlapped), hindering(machine.turns, slow))
    ranks = pipeline_costs(table(1.0), 0.1, (table(1.0),) * 3, 0.05)
    for slow in (1.0, 2.0):
        yield share(Costs(ranks, ranks), hindering(ranks, slow))


SCENES: dict[str, Callable[[Tuning, int], Iterable[float]]] = {
    "usual": usual,
    "worst": worst,
    "short": short,
    "changed": changed,
    "copies": copies,
    "overlap": overlapped,
}


def figures(tuning: Tuning, seeds: int) -> Figures:
    """Of each scene, by seed, in per cent."""
    return {name: [100 * mean(scene(tuning, seed)) for seed in range(seeds)] for name, scene in SCENES.items()}


def half_and_double(name: str, value: float) -> tuple[float, float]:
    """Shares stay shares: double the distance from 1 where a factor or a share is near it."""
    if name in ("worth_switching", "held_up", "drift"):
        return 1 + (value - 1) / 2, 1 + 2 * (value - 1)
    return (value // 2, 2 * value) if isinstance(value, int) else (value / 2, 2 * value)


def difference(there: list[float], own: list[float]) -> float:
    """Of the means; 0 where that may be chance, or is less than anybody would notice."""
    each = [a - b for a, b in zip(there, own, strict=True)]
    return mean(each) if abs(mean(each)) >= max(0.1, 2 * stdev(each) / len(each) ** 0.5) else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--only", type=lambda text: text.split(","), help="these constants")
    args = parser.parse_args()
    default = Tuning().to_dict()
    own = figures(Tuning(), args.seeds)
    means = {name: mean(values) for name, values in own.items()}
    print("as they are: " + ", ".join(f"{name} {value:.1f}" for name, value in means.items()))
    head = ["constant", "value", "changed to", *SCENES]
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join("---" for _ in head) + " |")
    rows = []
    for name in args.only or [name for name in default if name not in CALIBRATION]:
        for value in half_and_double(name, default[name]):
            there = figures(Tuning(**{**default, name: value}), args.seeds)
            changes = {scene: difference(there[scene], own[scene]) for scene in SCENES}
            rows.append({"name": name, "value": default[name], "changed_to": value, **changes})
            shown = [f"{change:+.1f}" if change else "-" for change in changes.values()]
            print(f"| `{name}` | {default[name]:g} | {value:g} | " + " | ".join(shown) + " |", flush=True)
    print(json.dumps({"as_they_are": means, "seeds": args.seeds, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
