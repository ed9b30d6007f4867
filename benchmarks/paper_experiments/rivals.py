"""Published rules for the draft length, on the recorded rounds of `thompson`, by a clock that knows the costs.

Each is written from its paper's or its repository's description, with what a chain of drafts and the head's confidence
allow. AdaEDL (arXiv 2410.18351) needs the entropy of each draft's distribution, which is not recorded: left out.
"""

import math
from collections.abc import Callable
from typing import Any

from ppsd_rt._native import StageCosts
from ppsd_rt.pipeline.schedule import MAX_CHUNK
from ppsd_rt.sampling.noise import Stream

from .experiment import Claim, Experiment, Found, Parts, markdown
from .lengths_replay import Drafting, LengthBandit, Replay, Rule, Text, paying
from .recorded import calibrated_costs, recorded_answers
from .thompson import TEMPERATURES, best_fixed, replays, speed


class Fixed:
    """Drafts a number that `begin` settles."""

    def stop(self, confidence: float) -> bool:
        return False

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        pass


class Heuristic(Fixed):
    """transformers' `num_assistant_tokens_schedule="heuristic"`: from 5, 2 more if all were right, else 1 less."""

    def __init__(self) -> None:
        self._length = 5

    def begin(self) -> int:
        return min(self._length, MAX_CHUNK)

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        all_right = len(verdict) == drafts and verdict[-1][1]
        self._length = self._length + 2 if all_right else max(self._length - 1, 1)


class Goodput(Fixed):
    """TurboSpec (arXiv 2406.14066), asked for in vLLM: the best goodput at a moving average of acceptance."""

    def __init__(self, costs: StageCosts, weight: float = 0.1) -> None:
        self._rounds = [costs.round(drafts) for drafts in range(1, MAX_CHUNK + 1)]
        self._weight, self._acceptance = weight, 0.7

    def begin(self) -> int:
        return best_length([self._acceptance] * MAX_CHUNK, self._rounds)

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        for _, right in verdict:
            self._acceptance += self._weight * (right - self._acceptance)


class LengthsAsArms(Fixed):
    """BanditSpec (arXiv 2505.15141): UCB1 over lengths; the reward of a round is its tokens, by the most possible."""

    def __init__(self, arms: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> None:
        self._arms, self._counts, self._sums, self._arm = arms, [0] * len(arms), [0.0] * len(arms), 0

    def begin(self) -> int:
        self._arm = ucb(self._counts, self._sums)
        return self._arms[self._arm]

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        self._counts[self._arm] += 1
        self._sums[self._arm] += (1 + sum(right for _, right in verdict)) / (self._arms[-1] + 1)


class RulesAsArms:
    """TapOut (arXiv 2511.02017): UCB1 over untrained stop rules; the reward is half length, half acceptance."""

    def __init__(self) -> None:
        self._thresholds = (0.2, 0.4, 0.6, 0.8)
        self._counts, self._sums, self._arm = [0] * 4, [0.0] * 4, 0

    def begin(self) -> int:
        self._arm = ucb(self._counts, self._sums)
        return MAX_CHUNK

    def stop(self, confidence: float) -> bool:
        return confidence < self._thresholds[self._arm]

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        accepted = sum(right for _, right in verdict)
        self._counts[self._arm] += 1
        self._sums[self._arm] += 0.5 * accepted / MAX_CHUNK + 0.5 * accepted / drafts


class Calibrated:
    """Chances of being right by bins of confidence, from what verdicts have said; a bin begins at its own middle."""

    def __init__(self, bins: int = 10, weight: float = 4.0) -> None:
        self._right = [weight * (bin + 0.5) / bins for bin in range(bins)]
        self._all = [weight] * bins

    def chance(self, confidence: float) -> float:
        bin = min(int(confidence * len(self._all)), len(self._all) - 1)
        return self._right[bin] / self._all[bin]

    def learn(self, verdict: list[tuple[float, bool]]) -> None:
        for confidence, right in verdict:
            bin = min(int(confidence * len(self._all)), len(self._all) - 1)
            self._right[bin] += right
            self._all[bin] += 1


class AnyWrong:
    """SpecDec++ (arXiv 2405.19715): stops where the chance that any draft is wrong is above a threshold, 0.7 there.

    Its chances come from a trained predictor; these are calibrated as the answer goes on.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold, self._chances, self._alive = threshold, Calibrated(), 1.0

    def begin(self) -> int:
        self._alive = 1.0
        return MAX_CHUNK

    def stop(self, confidence: float) -> bool:
        self._alive *= self._chances.chance(confidence)
        return 1 - self._alive > self._threshold

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        self._chances.learn(verdict)


class SurvivalByThroughput:
    """DSpark (arXiv 2607.05147): calibrated chances of the prefix, by a table of what passes of each length cost.

    Verifies as far as tokens over time grow. It drafts in blocks; here it decides after each draft, so what follows is
    taken to be as likely as the draft before.
    """

    def __init__(self, costs: StageCosts) -> None:
        self._rounds = [costs.round(drafts) for drafts in range(1, MAX_CHUNK + 1)]
        self._chances = Calibrated()
        self._tokens, self._alive, self._drafts = 1.0, 1.0, 0

    def begin(self) -> int:
        self._tokens, self._alive, self._drafts = 1.0, 1.0, 0
        return MAX_CHUNK

    def stop(self, confidence: float) -> bool:
        chance = self._chances.chance(confidence)
        self._alive *= chance
        self._tokens += self._alive
        self._drafts += 1
        if self._drafts == MAX_CHUNK:
            return True
        now, then = self._rounds[self._drafts - 1], self._rounds[self._drafts]
        return (self._tokens + self._alive * chance) / then <= self._tokens / now

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        self._chances.learn(verdict)


def best_length(chances: list[float], rounds: list[float]) -> int:
    """Of the most tokens over time. chances: of each draft, if all before it are right."""
    speeds, tokens, alive = [], 1.0, 1.0
    for chance, seconds in zip(chances, rounds, strict=True):
        alive *= chance
        tokens += alive
        speeds.append(tokens / seconds)
    return 1 + speeds.index(max(speeds))


def ucb(counts: list[int], sums: list[float]) -> int:
    """UCB1: each arm once, then the highest mean and bound."""
    if 0 in counts:
        return counts.index(0)
    log = 2 * math.log(sum(counts))
    values = [total / count + math.sqrt(log / count) for count, total in zip(counts, sums, strict=True)]
    return values.index(max(values))


RIVALS: dict[str, Callable[[StageCosts, int], Drafting]] = {
    "`paying`": lambda costs, seed: Rule(paying(costs), seed),
    "`survival=0.3`": lambda costs, seed: Rule("survival=0.3", seed),
    "Kangaroo: confidence 0.6": lambda costs, seed: Rule("confidence=0.6", seed),
    "SpecDec++, threshold 0.7": lambda costs, seed: AnyWrong(0.7),
    "SpecDec++, threshold 0.5": lambda costs, seed: AnyWrong(0.5),
    "DSpark: survival by throughput": lambda costs, seed: SurvivalByThroughput(costs),
    "TurboSpec: goodput": lambda costs, seed: Goodput(costs),
    "Beta-TS over lengths, knows costs": lambda costs, seed: LengthBandit(costs, seed),
    "BanditSpec: lengths as arms": lambda costs, seed: LengthsAsArms(),
    "TapOut: rules as arms": lambda costs, seed: RulesAsArms(),
    "transformers: +2, -1": lambda costs, seed: Heuristic(),
    "EESD's Beta-TS, reconstructed": lambda costs, seed: Rule("beta", seed, 6),
}
ONE_FOR_ALL = ("BanditSpec: lengths as arms", "TapOut: rules as arms")  # learn too slowly for one answer


def parts(quick: bool) -> Parts:
    prompts = 6 if quick else 34
    return {f"T = {warm:g}": lambda warm=warm: measured(recorded_answers(warm, prompts)) for warm in TEMPERATURES}


def measured(answers: list[Text]) -> dict[str, Any]:
    costs = calibrated_costs()
    length, best = best_fixed(answers, costs)
    rules = {}
    for name, make in RIVALS.items():
        runs = replays(answers, costs, lambda seed, make=make: make(costs, seed), reset=name not in ONE_FOR_ALL)
        rules[name] = {"speed": speed(runs, costs), "interval": interval(runs, costs)}
    tokens = sum(len(text.right) for text in answers)
    return {"answers": len(answers), "tokens": tokens, "best_length": length, "best_fixed": best, "rules": rules}


def interval(runs: list[Replay], costs: StageCosts, draws: int = 1000) -> tuple[float, float]:
    """95 % of the speeds of as many answers, drawn with replacement (bootstrap)."""
    stream, speeds = Stream(1), []
    for _ in range(draws):
        chosen = [runs[min(int(stream.uniform() * len(runs)), len(runs) - 1)] for _ in runs]
        speeds.append(speed(chosen, costs))
    speeds.sort()
    return speeds[round(0.025 * draws)], speeds[round(0.975 * draws) - 1]


def table(found: Found) -> str:
    rows = []
    for name in RIVALS:
        cells = []
        for case in found.values():
            rule = case["rules"][name]
            low, high = rule["interval"]
            cells += [
                f"{rule['speed']:.2f} ({low:.2f} to {high:.2f})",
                f"{1 - rule['speed'] / case['best_fixed']:+.0%}",
            ]
        rows.append((name, *cells))
    fixed = [cell for case in found.values() for cell in (f"{case['best_fixed']:.2f}", "0%")]
    lengths = ", ".join(str(case["best_length"]) for case in found.values())
    rows.append((f"best fixed length in hindsight: {lengths}", *fixed))
    head = [cell for name in found for cell in (f"{name}: x plain", "regret")]
    return markdown(("rule", *head), rows)


RIVAL_RULES = Experiment(
    "rivals",
    (Claim("SpecDec++, DSpark, TurboSpec, BanditSpec, TapOut", "abstracts", "each finds the draft length"),),
    parts,
    table,
)
