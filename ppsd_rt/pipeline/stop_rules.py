"""Stop rules: when to stop drafting and verify.

A rule sees what the drafting side knows: the confidence of each draft token it has just drawn, and, after each
verdict, which of them were accepted. It never sees anything of the tokens that it decides about, so no rule can change
the answer, only its speed.

What is from the papers and what is ours (the body of EESD, arXiv 2406.03853, was not available to us):
- From EESD: the decision "keep drafting or verify" is made token by token by a Thompson-sampling bandit that learns
  online from the verdicts; Beta-TS keeps a Beta posterior of the acceptance, Calibration-TS joins it with a
  model-based estimate that observed feedback calibrates.
- Reconstructed: the prior, that one draw is made per draft token and taken as the chance to go on, that a round adds
  one success per accepted token and one failure per rejection, and that the model-based estimate is the draft's own
  confidence, calibrated in bins.
- Ours: the discount, which forgets old verdicts so that the posterior follows a text whose difficulty changes; the
  survival rule, which stops where the next draft token stops paying, as the planner of `auto` computes it; and the
  paying rule, which computes that by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from ..errors import UsageError
from ..printable import quoted
from ..sampling.noise import Stream


class Controller(Protocol):
    """A stop rule at work in one answer."""

    def stop(self, confidence: float) -> bool:
        """After a draft token was drawn with this confidence (0..1): stop drafting and verify?"""

    def stop_copying(self, chance: float) -> bool:
        """The same after a copied draft token, which is right with this chance."""

    def may_copy(self, chance: float, stopped: bool) -> bool:
        """Is a copy with this chance worth its row? stopped: the exit head is not asked any more."""

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        """After a verdict: (confidence, accepted) of the head's tokens that it judged, in order."""


@dataclass(frozen=True)
class FixedLength:
    """Never stops by itself: the schedule's chunk and lookahead set the length."""

    kind: ClassVar[str] = "fixed"

    def start(self, seed: int) -> Controller:
        return _FixedLength()


class _FixedLength:
    def stop(self, confidence: float) -> bool:
        return False

    def stop_copying(self, chance: float) -> bool:
        return False

    def may_copy(self, chance: float, stopped: bool) -> bool:
        return not stopped

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        pass


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stops at the first draft token whose confidence is below `threshold` (Kangaroo, arXiv 2404.18911, uses 0.6)."""

    kind: ClassVar[str] = "confidence"
    threshold: float = 0.4

    def __post_init__(self) -> None:
        if not 0 < self.threshold < 1:
            raise UsageError(f"the confidence threshold must be between 0 and 1, not {self.threshold}")

    def start(self, seed: int) -> Controller:
        return _ConfidenceThreshold(self.threshold)


class _ConfidenceThreshold:
    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    def stop(self, confidence: float) -> bool:
        return confidence < self.threshold

    def stop_copying(self, chance: float) -> bool:
        return chance < self.threshold

    def may_copy(self, chance: float, stopped: bool) -> bool:
        return not stopped and chance >= self.threshold

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        pass


@dataclass(frozen=True)
class BetaThompson:
    """Beta-TS of EESD: draw theta ~ Beta(accepted, rejected) for each draft token, go on with probability theta."""

    kind: ClassVar[str] = "beta"
    discount: float = 0.98  # weight that older verdicts keep at each new one

    def __post_init__(self) -> None:
        _check_discount(self.discount)

    def start(self, seed: int) -> Controller:
        return _BetaThompson(self.discount, Stream(seed))


class _BetaThompson:
    def __init__(self, discount: float, stream: Stream) -> None:
        self.discount, self.stream = discount, stream
        self.posterior = _Posterior(1.0, 1.0)  # uniform: any acceptance is as likely as any other

    def stop(self, confidence: float) -> bool:
        return self.stream.uniform() >= self.posterior.draw(self.stream)

    def stop_copying(self, chance: float) -> bool:
        return self.stream.uniform() >= chance

    def may_copy(self, chance: float, stopped: bool) -> bool:
        return not stopped

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        self.posterior.forget(self.discount)
        for _, accepted in verdict:
            self.posterior.count(accepted)


@dataclass(frozen=True)
class CalibratedThompson:
    """Calibration-TS of EESD: a Beta posterior for each confidence bin, whose prior mean is the confidence itself.

    The prior counts as `weight` verdicts: a fresh bin trusts the draft's confidence, a seen one the verdicts.
    """

    kind: ClassVar[str] = "calibrated"
    bins: int = 10
    weight: float = 4.0
    discount: float = 0.98

    def __post_init__(self) -> None:
        _check_discount(self.discount)
        if self.bins < 1 or self.weight <= 0:
            raise UsageError(f"calibrated stop rule: bins {self.bins} must be >= 1 and weight {self.weight} above 0")

    def start(self, seed: int) -> Controller:
        return _CalibratedThompson(self.bins, self.weight, self.discount, Stream(seed))


class _CalibratedThompson:
    def __init__(self, bins: int, weight: float, discount: float, stream: Stream) -> None:
        self.discount, self.stream, self.bins = discount, stream, _Bins(bins, weight)

    def stop(self, confidence: float) -> bool:
        return self.stream.uniform() >= self.bins.at(confidence).draw(self.stream)

    def stop_copying(self, chance: float) -> bool:
        return self.stream.uniform() >= chance

    def may_copy(self, chance: float, stopped: bool) -> bool:
        return not stopped

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        self.bins.observe(verdict, self.discount)


@dataclass(frozen=True)
class Survival:
    """Stops when the chance that all drafts of the chunk are right has fallen below `threshold`.

    A draft's chance is the mean of the posterior of its confidence bin (as in `CalibratedThompson`). A chunk that lives
    with chance s gains s times the acceptance by one draft more: it should stop where that is worth less than the draft
    costs, so the threshold is (seconds of a draft) * (tokens per second) / acceptance. A copied draft has a threshold
    of its own, (seconds of a row more in the pass) * (tokens per second), and may follow when the head is not asked
    any more. The first rows of a pass cost less than later ones: `thresholds` and `copy_thresholds` are those after 0,
    1, 2, ... drafts of the chunk, the last one for all further ones; without them they are always the same.
    """

    kind: ClassVar[str] = "survival"
    threshold: float = 0.3
    bins: int = 10
    weight: float = 4.0
    discount: float = 0.98
    copy_threshold: float = 0.1
    thresholds: tuple[float, ...] = ()
    copy_thresholds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_discount(self.discount)
        if not 0 < self.threshold < 1:
            raise UsageError(f"the survival threshold must be between 0 and 1, not {self.threshold}")
        if not 0 < self.copy_threshold < 1:
            raise UsageError(f"the survival threshold of copies must be between 0 and 1, not {self.copy_threshold}")
        if self.bins < 1 or self.weight <= 0:
            raise UsageError(f"survival stop rule: bins {self.bins} must be >= 1 and weight {self.weight} above 0")

    def start(self, seed: int) -> Controller:
        return SurvivalController(self)


class SurvivalController:
    """`rule` may be replaced by one with other thresholds: what has been learned stays."""

    def __init__(self, rule: Survival) -> None:
        self.rule, self.bins, self.alive, self.drafts = rule, _Bins(rule.bins, rule.weight), 1.0, 0

    def stop(self, confidence: float) -> bool:
        return self.stop_copying(self.bins.at(confidence).mean())

    def stop_copying(self, chance: float) -> bool:
        self.alive *= chance
        self.drafts += 1
        return self.alive < self._at_place(self.rule.thresholds, self.rule.threshold)

    def may_copy(self, chance: float, stopped: bool) -> bool:
        return self.alive * chance >= self._at_place(self.rule.copy_thresholds, self.rule.copy_threshold)

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        self.bins.observe(verdict, self.rule.discount)
        self.alive, self.drafts = 1.0, 0

    def _at_place(self, each: Sequence[float], otherwise: float) -> float:
        return each[min(self.drafts, len(each) - 1)] if each else otherwise


@dataclass(frozen=True)
class Paying:
    """Stops where one draft more is expected to bring less than its time would bring at the present speed.

    One draft more brings the chance that all drafts of the chunk are right (as in `Survival`), times the present
    acceptance. It takes `cost`: the time of a draft and of its row in the pass, in plain tokens. So the rule maximises
    tokens per time, as the best length of a renewal process does, and has no threshold to choose.
    """

    kind: ClassVar[str] = "paying"
    cost: float = 0.2
    bins: int = 10
    weight: float = 4.0
    discount: float = 0.98

    def __post_init__(self) -> None:
        _check_discount(self.discount)
        if not 0 < self.cost <= 10:
            raise UsageError(f"the cost of a draft token must be above 0 and at most 10 plain tokens, not {self.cost}")
        if self.bins < 1 or self.weight <= 0:
            raise UsageError(f"paying stop rule: bins {self.bins} must be >= 1 and weight {self.weight} above 0")

    def start(self, seed: int) -> Controller:
        return _Paying(self)


class _Paying:
    def __init__(self, rule: Paying) -> None:
        self.rule, self.bins, self.acceptance = rule, _Bins(rule.bins, rule.weight), _Posterior(1.0, 1.0)
        self.tokens, self.time = 1.0, 1.0  # sums in which older passes count less; at first: a plain token
        self.alive, self.spent = 1.0, 1.0  # in this chunk; a pass without drafts takes as long as a plain token

    def stop(self, confidence: float) -> bool:
        self.alive *= self.bins.at(confidence).mean()
        self.spent += self.rule.cost
        return self._stops()

    def stop_copying(self, chance: float) -> bool:
        self.alive *= chance
        return self._stops()

    def _stops(self) -> bool:
        return self.alive * self.acceptance.mean() < self.tokens / self.time * self.rule.cost

    def may_copy(self, chance: float, stopped: bool) -> bool:
        return not stopped

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        self.bins.observe(verdict, self.rule.discount)
        self.acceptance.forget(self.rule.discount)
        self.tokens *= self.rule.discount
        self.time *= self.rule.discount
        self.tokens += 1.0
        self.time += self.spent
        for _, accepted in verdict:
            self.acceptance.count(accepted)
            self.tokens += accepted
        self.alive, self.spent = 1.0, 1.0


class _Bins:
    """A posterior for each bin of confidence."""

    def __init__(self, bins: int, weight: float) -> None:
        centres = [(bin + 0.5) / bins for bin in range(bins)]
        self.posteriors = [_Posterior(weight * centre, weight * (1.0 - centre)) for centre in centres]

    def at(self, confidence: float) -> "_Posterior":
        return self.posteriors[min(int(confidence * len(self.posteriors)), len(self.posteriors) - 1)]

    def observe(self, verdict: Sequence[tuple[float, bool]], discount: float) -> None:
        for posterior in self.posteriors:
            posterior.forget(discount)
        for confidence, accepted in verdict:
            self.at(confidence).count(accepted)


class _Posterior:
    """Beta(prior + accepted, prior + rejected); only what was observed fades, the prior stays."""

    def __init__(self, prior_accepted: float, prior_rejected: float) -> None:
        self.prior_accepted, self.prior_rejected = prior_accepted, prior_rejected
        self.accepted = self.rejected = 0.0

    def draw(self, stream: Stream) -> float:
        return stream.beta(self.prior_accepted + self.accepted, self.prior_rejected + self.rejected)

    def mean(self) -> float:
        yes, no = self.prior_accepted + self.accepted, self.prior_rejected + self.rejected
        return yes / (yes + no)

    def count(self, accepted: bool) -> None:
        if accepted:
            self.accepted += 1.0
        else:
            self.rejected += 1.0

    def forget(self, discount: float) -> None:
        self.accepted *= discount
        self.rejected *= discount


StopRule = FixedLength | ConfidenceThreshold | BetaThompson | CalibratedThompson | Survival | Paying

_BY_NAME: dict[str, type[StopRule]] = {
    rule.kind: rule for rule in (FixedLength, ConfidenceThreshold, BetaThompson, CalibratedThompson, Survival, Paying)
}
STOP_RULES = tuple(_BY_NAME)
_NUMBERS = {ConfidenceThreshold: "threshold", Survival: "threshold", Paying: "cost"}  # that follow a name


def parse_stop_rule(text: str) -> StopRule:
    """`fixed`, `beta`, `calibrated`, `confidence=0.6`, `survival=0.3`, `paying=0.2`: a name and, for some, a number."""
    name, _, value = text.partition("=")
    kind = _BY_NAME.get(name)
    if kind is None or (value and kind not in _NUMBERS):
        raise UsageError(
            f"stop rule {quoted(text)} is unknown; rules are {', '.join(_BY_NAME)}, confidence=THRESHOLD, "
            "survival=THRESHOLD and paying=COST"
        )
    try:
        return kind(**{_NUMBERS[kind]: float(value)}) if value else kind()  # type: ignore[arg-type]
    except ValueError:
        raise UsageError(f"stop rule {quoted(text)}: {quoted(value)} is not a number") from None


def describe_stop_rule(rule: StopRule) -> str:
    """The text that `parse_stop_rule` understands."""
    number = _NUMBERS.get(type(rule))
    return f"{rule.kind}={getattr(rule, number)}" if number else rule.kind


def _check_discount(discount: float) -> None:
    if not 0 < discount <= 1:
        raise UsageError(f"the discount of a Thompson stop rule must be above 0 and at most 1, not {discount}")
