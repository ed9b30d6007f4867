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
- Ours: the discount, which forgets old verdicts so that the posterior follows a text whose difficulty changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .errors import UsageError
from .noise import Stream


class Controller(Protocol):
    """A stop rule at work in one answer."""

    def stop(self, confidence: float) -> bool:
        """After a draft token was drawn with this confidence (0..1): stop drafting and verify?"""

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        """After a verdict: (confidence, accepted) of the draft tokens it judged, in order, up to the first rejected."""


@dataclass(frozen=True)
class FixedLength:
    """Never stops by itself: the schedule's chunk and lookahead set the length."""

    def start(self, seed: int) -> Controller:
        return _FixedLength()


class _FixedLength:
    def stop(self, confidence: float) -> bool:
        return False

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        pass


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stops at the first draft token whose confidence is below `threshold` (Kangaroo, arXiv 2404.18911, uses 0.6)."""

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

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        pass


@dataclass(frozen=True)
class BetaThompson:
    """Beta-TS of EESD: draw theta ~ Beta(accepted, rejected) for each draft token, go on with probability theta."""

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

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        self.posterior.forget(self.discount)
        for _, accepted in verdict:
            self.posterior.count(accepted)


@dataclass(frozen=True)
class CalibratedThompson:
    """Calibration-TS of EESD: a Beta posterior for each confidence bin, whose prior mean is the confidence itself.

    The prior counts as `weight` verdicts: a fresh bin trusts the draft's confidence, a seen one the verdicts.
    """

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
        self.discount, self.stream = discount, stream
        centres = [(bin + 0.5) / bins for bin in range(bins)]
        self.posteriors = [_Posterior(weight * centre, weight * (1.0 - centre)) for centre in centres]

    def stop(self, confidence: float) -> bool:
        return self.stream.uniform() >= self._bin(confidence).draw(self.stream)

    def observe(self, verdict: Sequence[tuple[float, bool]]) -> None:
        for posterior in self.posteriors:
            posterior.forget(self.discount)
        for confidence, accepted in verdict:
            self._bin(confidence).count(accepted)

    def _bin(self, confidence: float) -> "_Posterior":
        return self.posteriors[min(int(confidence * len(self.posteriors)), len(self.posteriors) - 1)]


class _Posterior:
    """Beta(prior + accepted, prior + rejected); only what was observed fades, the prior stays."""

    def __init__(self, prior_accepted: float, prior_rejected: float) -> None:
        self.prior_accepted, self.prior_rejected = prior_accepted, prior_rejected
        self.accepted = self.rejected = 0.0

    def draw(self, stream: Stream) -> float:
        return stream.beta(self.prior_accepted + self.accepted, self.prior_rejected + self.rejected)

    def count(self, accepted: bool) -> None:
        if accepted:
            self.accepted += 1.0
        else:
            self.rejected += 1.0

    def forget(self, discount: float) -> None:
        self.accepted *= discount
        self.rejected *= discount


StopRule = FixedLength | ConfidenceThreshold | BetaThompson | CalibratedThompson

_BY_NAME: dict[str, type[StopRule]] = {
    "fixed": FixedLength,
    "confidence": ConfidenceThreshold,
    "beta": BetaThompson,
    "calibrated": CalibratedThompson,
}
STOP_RULE_NAMES = tuple(_BY_NAME)


def parse_stop_rule(text: str) -> StopRule:
    """`fixed`, `confidence`, `confidence=0.6`, `beta`, `calibrated`: the name and, for `confidence`, its threshold."""
    name, _, value = text.partition("=")
    if name not in _BY_NAME or (value and name != "confidence"):
        raise UsageError(f"stop rule {text!r} is unknown; rules are {', '.join(_BY_NAME)} and confidence=THRESHOLD")
    try:
        return ConfidenceThreshold(float(value)) if value else _BY_NAME[name]()
    except ValueError:
        raise UsageError(f"stop rule {text!r}: {value!r} is not a number") from None


def describe_stop_rule(rule: StopRule) -> str:
    """The text that `parse_stop_rule` understands."""
    if isinstance(rule, ConfidenceThreshold):
        return f"confidence={rule.threshold:g}"
    return next(name for name, kind in _BY_NAME.items() if isinstance(rule, kind))


def _check_discount(discount: float) -> None:
    if not 0 < discount <= 1:
        raise UsageError(f"the discount of a Thompson stop rule must be above 0 and at most 1, not {discount}")
