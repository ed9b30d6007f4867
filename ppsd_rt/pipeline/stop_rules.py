"""Stop rules: when to stop drafting and verify. Here are their settings; csrc/core/stop_rules.cpp decides by them.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from ..errors import UsageError
from ..printable import quoted

_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "threshold": (lambda value: 0 < value < 1, "between 0 and 1"),
    "copy_threshold": (lambda value: 0 < value < 1, "between 0 and 1"),
    "cost": (lambda value: 0 < value <= 10, "above 0 and at most 10 plain tokens"),
    "discount": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "bins": (lambda value: value >= 1, "at least 1"),
    "weight": (lambda value: value > 0, "above 0"),
}


@dataclass(frozen=True)
class _Checked:
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        for name, (fits, wanted) in _RANGES.items():
            if hasattr(self, name) and not fits(value := getattr(self, name)):
                raise UsageError(f"stop rule {self.kind}: {name} must be {wanted}, not {value}")


@dataclass(frozen=True)
class FixedLength:
    """Never stops by itself: the schedule's chunk and lookahead set the length."""

    kind: ClassVar[str] = "fixed"


@dataclass(frozen=True)
class ConfidenceThreshold(_Checked):
    """Stops at the first draft token whose confidence is below `threshold` (Kangaroo, arXiv 2404.18911, uses 0.6)."""

    kind: ClassVar[str] = "confidence"
    threshold: float = 0.4


@dataclass(frozen=True)
class BetaThompson(_Checked):
    """Beta-TS of EESD: draw theta ~ Beta(accepted, rejected) for each draft token, go on with probability theta."""

    kind: ClassVar[str] = "beta"
    discount: float = 0.98  # weight that older verdicts keep at each new one


@dataclass(frozen=True)
class CalibratedThompson(_Checked):
    """Calibration-TS of EESD: a Beta posterior for each confidence bin, whose prior mean is the confidence itself.

    The prior counts as `weight` verdicts: a fresh bin trusts the draft's confidence, a seen one the verdicts.
    """

    kind: ClassVar[str] = "calibrated"
    bins: int = 10
    weight: float = 4.0
    discount: float = 0.98


@dataclass(frozen=True)
class Survival(_Checked):
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


@dataclass(frozen=True)
class Paying(_Checked):
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
