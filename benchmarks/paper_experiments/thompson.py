"""EESD's Thompson sampling, reconstructed in every way that its abstract allows, on recorded rounds.

The paper's text gives no prior, no update rule, no stopping test, no discount and no cap that we have read. So all
combinations are tried. The text and the costs are those of `lengths`: nothing here is a machine's noise.
"""

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import product
from typing import Any

from ppsd_rt._native import StageCosts
from ppsd_rt.lab.bench.plot import Chart, Line, Panel
from ppsd_rt.pipeline.schedule import MAX_CHUNK
from ppsd_rt.sampling.noise import Stream

from .experiment import Claim, Experiment, Found, Parts, markdown
from .lengths_replay import Drafting, Replay, Rule, Text, paying, replay
from .recorded import calibrated_costs, recorded_answers

PRIORS = {"uniform": (1.0, 1.0), "Jeffreys": (0.5, 0.5), "hopeful": (4.0, 1.0), "doubtful": (1.0, 2.0)}
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Variant:
    """failures: what counts as one, the first wrong draft or every discarded one. draws: from the posterior, for each
    draft or for each round. test: go on with chance theta, or while what survives is at least a half. reset: does each
    answer begin at the prior."""

    prior: str
    failures: str
    draws: str
    test: str
    discount: float
    cap: int
    reset: bool


VARIANTS = [
    Variant(*choice)
    for choice in product(
        PRIORS,
        ("first", "all"),
        ("draft", "round"),
        ("chance", "half"),
        (1.0, 0.98, 0.9),
        (6, MAX_CHUNK),
        (True, False),
    )
]
OURS = Variant("uniform", "first", "draft", "chance", 0.98, 6, True)  # eesd:stop_rule=beta


class Thompson:
    """A variant at work."""

    def __init__(self, variant: Variant, seed: int) -> None:
        self._variant, self._stream = variant, Stream(seed)
        self._yes = self._no = 0.0
        self._theta = self._alive = 1.0

    def begin(self) -> int:
        self._theta, self._alive = self._draw(), 1.0
        return self._variant.cap

    def stop(self, confidence: float) -> bool:
        theta = self._draw() if self._variant.draws == "draft" else self._theta
        if self._variant.test == "chance":
            return self._stream.uniform() >= theta
        self._alive *= theta
        return self._alive < 0.5

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        accepted = sum(right for _, right in verdict)
        wrong = len(verdict) - accepted
        self._yes = self._yes * self._variant.discount + accepted
        self._no = self._no * self._variant.discount + (
            wrong if self._variant.failures == "first" else drafts - accepted
        )

    def _draw(self) -> float:
        yes, no = PRIORS[self._variant.prior]
        return self._stream.beta(yes + self._yes, no + self._no)


def replays(answers: list[Text], costs: StageCosts, make: Any, reset: bool = True) -> list[Replay]:
    """make(number): the Drafting of an answer; without reset one goes through all."""
    one: Drafting | None = None if reset else make(0)
    return [replay(text, costs, one or make(number)) for number, text in enumerate(answers)]


def speed(runs: Sequence[Replay], costs: StageCosts) -> float:
    """Times plain decoding, over all of them."""
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs) * costs.plain_step


def best_fixed(answers: list[Text], costs: StageCosts) -> tuple[int, float]:
    """(length, speed) in hindsight."""
    lengths = range(1, MAX_CHUNK + 1)
    speeds = [speed(replays(answers, costs, lambda seed, k=k: Rule("fixed", seed, k)), costs) for k in lengths]
    return 1 + speeds.index(max(speeds)), max(speeds)


def parts(quick: bool) -> Parts:
    prompts, seeds = (6, 1) if quick else (34, 3)
    return {
        f"T = {warm:g}": lambda warm=warm: measured(recorded_answers(warm, prompts), seeds) for warm in TEMPERATURES
    }


def measured(answers: list[Text], seeds: int) -> dict[str, Any]:
    costs = calibrated_costs()
    length, best = best_fixed(answers, costs)
    speeds = {}
    for variant in VARIANTS:
        runs = [
            speed(replays(answers, costs, lambda n, s=s, v=variant: Thompson(v, 1000 * s + n), variant.reset), costs)
            for s in range(seeds)
        ]
        speeds[" ".join(map(str, astuple(variant)))] = statistics.mean(runs)
    ours = speed(replays(answers, costs, lambda seed: Rule(paying(costs), seed)), costs)
    tokens = sum(len(text.right) for text in answers)
    return {"answers": len(answers), "tokens": tokens, "best_length": length, "best_fixed": best, "speeds": speeds} | {
        "paying": ours
    }


def named(variant: str) -> str:
    """In words, of the text in the file."""
    prior, failures, draws, test, discount, cap, reset = variant.split()
    counted = "first wrong draft" if failures == "first" else "all discarded"
    how = "chance θ" if test == "chance" else "survival ≥ ½"
    kept = "each answer anew" if reset == "True" else "never reset"
    return f"{prior} prior, {counted}, a draw a {draws}, {how}, discount {discount}, cap {cap}, {kept}"


def table(found: Found) -> str:
    rows = []
    for name, case in found.items():
        speeds = sorted(case["speeds"].items(), key=lambda each: -each[1])
        ours = " ".join(map(str, astuple(OURS)))
        middle = statistics.median(speed for _, speed in speeds)
        chosen = [
            (f"best of {len(speeds)}: {named(speeds[0][0])}", speeds[0][1]),
            ("median of them", middle),
            (f"worst: {named(speeds[-1][0])}", speeds[-1][1]),
            (f"`stop_rule=beta`: {named(ours)}", case["speeds"][ours]),
            (f"best fixed length in hindsight: {case['best_length']}", case["best_fixed"]),
            ("`paying`", case["paying"]),
        ]
        rows += [(name, what, f"{speed:.2f}", f"{speed / case['best_fixed']:.2f}") for what, speed in chosen]
    return markdown(("text", "rule", "x plain", "by the best fixed length"), rows, left=2)


def charts(found: Found) -> dict[str, Chart]:
    panels = []
    for name, case in found.items():
        ordered = sorted(case["speeds"].values())
        count = len(ordered)
        lines = [
            Line("reconstructions, from the worst", [(at / (count - 1), speed) for at, speed in enumerate(ordered)])
        ]
        for what, speed in (("paying", case["paying"]), ("best fixed length", case["best_fixed"])):
            lines.append(Line(what, [(0.0, speed), (1.0, speed)], dashed=True))
        panels.append(Panel(name, lines))
    return {
        "thompson": Chart("Reconstructions of Thompson sampling", "share of them", "speed (times plain)", panels, 2)
    }


THOMPSON = Experiment(
    "thompson",
    (Claim("EESD", "abstract", "Thompson sampling finds the number of drafts"),),
    parts,
    table,
    charts,
)
