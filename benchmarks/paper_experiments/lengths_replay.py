"""Who decides the draft length, without a machine's noise: stop rules on a recorded or made-up text, with given costs.

A text says of each position whether a draft for it is right and what confidence its head has. Every rule decodes the
same text: it drafts until it stops, the pass commits the drafts up to the first wrong one and a token more, and a clock
adds what the costs say. The rules are those of ppsd_rt/pipeline/stop_rules.py, and a bandit over lengths.

What it leaves out: after a wrong draft a head would draft from a wrong text; here it has the right text's confidence.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ppsd_rt._native import StageCosts
from ppsd_rt.pipeline.schedule import MAX_CHUNK
from ppsd_rt.pipeline.stop_rules import Controller, parse_stop_rule
from ppsd_rt.sampling.noise import Stream


@dataclass(frozen=True)
class Text:
    """Of each position: is a draft for it right, and the head's confidence in it."""

    right: tuple[bool, ...]
    confidence: tuple[float, ...]

    @property
    def acceptance(self) -> float:
        return sum(self.right) / len(self.right)


def made_up(
    length: int, acceptance: float, spread: float, shift: float = 0.0, turn: bool = False, seed: int = 0
) -> Text:
    """Drafts of different difficulty. spread: of the log-odds that a draft is right, half of it from token to token and
    half of it in stretches of about ten tokens; 0: all are alike. shift: what the head adds to the log-odds that it
    tells, above 0: it is too sure. turn: after half of the text the log-odds fall by 2.

    acceptance: the mean, of the first half with `turn`.
    """
    draws = random.Random(seed)
    stretch, odds = draws.gauss(0, 1), []
    for _ in range(length):
        stretch = 0.9 * stretch + math.sqrt(1 - 0.81) * draws.gauss(0, 1)
        odds.append(spread * math.sqrt(0.5) * (stretch + draws.gauss(0, 1)))
    low, high = -20.0, 20.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        mean = sum(_chance(middle + each) for each in odds) / length
        low, high = (middle, high) if mean < acceptance else (low, middle)
    places = [low + each - (2.0 if turn and at >= length // 2 else 0.0) for at, each in enumerate(odds)]
    right = tuple(draws.random() < _chance(place) for place in places)
    return Text(right, tuple(_chance(place + shift) for place in places))


def _chance(odds: float) -> float:
    return 1 / (1 + math.exp(-odds))


class Drafting(Protocol):
    """Decides in one answer how far each round drafts."""

    def begin(self) -> int:
        """The most drafts of the round that begins."""

    def stop(self, confidence: float) -> bool:
        """After a draft."""

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        """(confidence, right) of the drafts that the verdict judged, of so many."""


class Rule:
    """A stop rule of the runtime."""

    def __init__(self, rule: str, seed: int, most: int = MAX_CHUNK) -> None:
        self._controller: Controller = parse_stop_rule(rule).start(seed)
        self._most = most

    def begin(self) -> int:
        return self._most

    def stop(self, confidence: float) -> bool:
        return self._controller.stop(confidence)

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        self._controller.observe(verdict)


class LengthBandit:
    """Beta-TS that knows the costs: takes the length that is fastest at an acceptance drawn from the posterior."""

    def __init__(self, costs: StageCosts, seed: int, discount: float = 0.98) -> None:
        self._rounds = [costs.round(drafts) for drafts in range(1, MAX_CHUNK + 1)]
        self._stream, self._discount, self._yes, self._no = Stream(seed), discount, 0.0, 0.0

    def begin(self) -> int:
        chance = self._stream.beta(1 + self._yes, 1 + self._no)
        speeds, tokens, power = [], 1.0, 1.0
        for seconds in self._rounds:
            power *= chance
            tokens += power
            speeds.append(tokens / seconds)
        return 1 + speeds.index(max(speeds))

    def stop(self, confidence: float) -> bool:
        return False

    def ended(self, verdict: list[tuple[float, bool]], drafts: int) -> None:
        self._yes *= self._discount
        self._no *= self._discount
        for _, right in verdict:
            self._yes, self._no = self._yes + right, self._no + (not right)


@dataclass(frozen=True)
class Replay:
    """seconds: of the text, in those of the costs; at: (tokens, seconds) now and then."""

    tokens: int
    seconds: float
    rounds: int
    drafts: int
    at: tuple[tuple[int, float], ...]

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def replay(text: Text, costs: StageCosts, drafting: Drafting, marks: int = 20) -> Replay:
    """Decode the text by rounds of at least one draft."""
    seconds_of = [costs.round(drafts) for drafts in range(1, MAX_CHUNK + 1)]
    length, position, seconds, rounds, drafted = len(text.right), 0, 0.0, 0, 0
    step = max(length // marks, 1)
    at, mark = [], step
    while position < length:
        most, drafts = drafting.begin(), 0
        while drafts < most and position + drafts < length:
            drafts += 1
            if drafting.stop(text.confidence[position + drafts - 1]):
                break
        verdict = []
        for place in range(position, position + drafts):
            verdict.append((text.confidence[place], text.right[place]))
            if not text.right[place]:
                break
        drafting.ended(verdict, drafts)
        position += 1 + sum(right for _, right in verdict)
        seconds, rounds, drafted = seconds + seconds_of[drafts - 1], rounds + 1, drafted + drafts
        while mark <= position:
            at.append((mark, seconds))
            mark += step
    return Replay(position, seconds, rounds, drafted, tuple(at))


def foreseeing(text: Text, costs: StageCosts) -> float:
    """Tokens per second of one that knows which drafts are right: never drafts a wrong one but the first of a round."""
    length, position, seconds = len(text.right), 0, 0.0
    while position < length:
        drafts = 0
        while drafts < MAX_CHUNK and position + drafts < length and text.right[position + drafts]:
            drafts += 1
        seconds += costs.round(max(drafts, 1))
        position += drafts + 1
    return position / seconds


def paying(costs: StageCosts) -> str:
    """The rule that knows what a draft and its row cost."""
    return f"paying={(costs.round(4) - costs.round(3)) / costs.plain_step:.3f}"


RULES: dict[str, Callable[[StageCosts, int], Drafting]] = {
    "confidence .4": lambda costs, seed: Rule("confidence=0.4", seed),
    "Beta-TS, 6 at most": lambda costs, seed: Rule("beta", seed, 6),  # EESD, reconstructed
    "Beta-TS": lambda costs, seed: Rule("beta", seed),
    "calibrated TS": lambda costs, seed: Rule("calibrated", seed),
    "length bandit": lambda costs, seed: LengthBandit(costs, seed),
    "survival .3": lambda costs, seed: Rule("survival=0.3", seed),
    "paying": lambda costs, seed: Rule(paying(costs), seed),
    "paying, cost .2": lambda costs, seed: Rule("paying=0.2", seed),
}
