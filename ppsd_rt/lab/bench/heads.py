"""Acceptance of an exit head in the real loop, and the speed that the measured costs of its drafts let expect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..._native import Costs
from ...cpu.backend import CpuBackend
from ...engine import Engine
from ...pipeline.schedule import MAX_ROWS
from ...planning.planner import TUNING, typical
from ...sampling.params import SamplingParams
from ...statistics import Statistics
from .plot import Chart, Line, Panel
from .report import columns
from .spread import take_turns

if TYPE_CHECKING:
    from ...cli.prompts import NamedPrompt

USUAL = 4  # drafts of a round
WARM = 0.8  # the temperature at which shared noise is looked at besides greedy drafting

COLUMNS = columns(
    name="head", kind="kind", exit_layer="exit", vocabulary="vocabulary", dtype="dtype", acceptance="acceptance|3",
    by_position="1st / 2nd / .. draft", warm=f"T = {WARM}|3", draft_cost="draft / plain|3", length="best length",
    per_pass="tokens a pass|2", speed="predicted x plain|2"
)  # fmt: skip


@dataclass
class HeadMeasure:
    """survival[i]: share of the verification passes in which the first i + 1 drafts were all accepted."""

    name: str
    kind: str
    exit_layer: int
    vocabulary: int
    dtype: str
    acceptance: float
    warm: float
    by_position: list[float]
    by_family: dict[str, float]
    survival: list[float]
    costs: Costs

    @property
    def draft_cost(self) -> float:
        """Of one draft step, as a share of a plain step; of a few after a pass, the first of which is dearer."""
        return self.costs.turns.draft_share(USUAL)

    @property
    def length(self) -> int:
        """The fixed draft length that is predicted to be fastest."""
        return max(range(1, len(self.survival) + 1), key=lambda n: self._speed(n))

    @property
    def per_pass(self) -> float:
        return 1 + sum(self.survival[: self.length])

    @property
    def speed(self) -> float:
        """Predicted, against plain decoding, drafting and verifying in turns."""
        return self._speed(self.length)

    def _speed(self, length: int) -> float:
        return (1 + sum(self.survival[:length])) * self.costs.plain_seconds / self.costs.turns.round(length)

    def as_row(self) -> dict[str, Any]:
        places = " / ".join(f"{share:.2f}" for share in self.by_position)
        return {**self.as_dict(), "by_position": places, "vocabulary": self.vocabulary or "all"}

    def as_dict(self) -> dict[str, Any]:
        figures = {"draft_cost": self.draft_cost, "length": self.length, "per_pass": self.per_pass, "speed": self.speed}
        names = ("name", "kind", "exit_layer", "vocabulary", "dtype", "acceptance", "warm", "by_position", "by_family")
        return {name: getattr(self, name) for name in names} | figures


@dataclass
class Drafted:
    """What became of a head's drafts: in greedy answers, in warm ones, and in the greedy ones of each family."""

    greedy: Statistics = field(default_factory=Statistics)
    warm: Statistics = field(default_factory=Statistics)
    families: dict[str, Statistics] = field(default_factory=dict)

    def survival(self, length: int) -> list[float]:
        """As of HeadMeasure, for so many drafts."""
        greedy = self.greedy
        return [greedy.accepted_by_position[place] / max(greedy.rounds, 1) for place in range(1, length + 1)]


def draft_on_prompts(
    engine: Engine,
    prompts: "Sequence[NamedPrompt]",
    max_tokens: int,
    length: int,
    progress: Callable[[int], None] = lambda prompt: None,
) -> tuple[Drafted, bool]:
    """Answer every prompt greedily and warm, in rounds of `length` drafts -> and whether Ctrl-C has let all through."""
    schedule = f"eesd:length={length},stop_rule=fixed"
    drafted = Drafted()

    def measure_prompt(number: int) -> None:
        prompt = prompts[number]
        progress(number)
        messages = [{"role": "user", "content": prompt.prompt}]
        asked = messages if engine.tokenizer.chat_template else prompt.prompt
        family = drafted.families.setdefault(prompt.family, Statistics())
        for params, totals in (
            (SamplingParams(max_tokens=max_tokens), (drafted.greedy, family)),
            (SamplingParams(max_tokens=max_tokens, temperature=WARM, seed=number), (drafted.warm,)),
        ):
            answer = engine.generate(asked, params, schedule).run().statistics
            for total in totals:
                total.rounds += answer.rounds
                total.accepted += answer.accepted
                total.judged += answer.judged
                total.accepted_by_position += answer.accepted_by_position
                total.judged_by_position += answer.judged_by_position

    whole = take_turns(range(len(prompts)), 1, measure_prompt)
    return drafted, whole


def measure_head(
    engine: Engine,
    name: str,
    prompts: "Sequence[NamedPrompt]",
    max_tokens: int,
    length: int,
    progress: Callable[[int], None],
) -> tuple[HeadMeasure | None, bool]:
    """Draft on the prompts; then measure the stages.

    The figures, and whether they are of all prompts: Ctrl-C ends the answers, and the stages are measured then, unless
    there is no answer yet.
    """
    head, backend = engine.head, engine.backend
    assert head is not None
    assert isinstance(backend, CpuBackend)
    drafted, whole = draft_on_prompts(engine, prompts, max_tokens, length, progress)
    if not whole and not drafted.greedy.rounds:
        return None, False
    measure = HeadMeasure(
        name=name,
        kind=head.kind,
        exit_layer=head.exit_layer,
        vocabulary=backend.draft_vocabulary,
        dtype=backend.dtype,
        acceptance=drafted.greedy.acceptance or 0.0,
        warm=drafted.warm.acceptance or 0.0,
        by_position=_given_all_before(drafted.greedy),
        by_family={family: totals.acceptance or 0.0 for family, totals in drafted.families.items()},
        survival=drafted.survival(length),
        costs=typical([backend.costs(again=True) for _ in range(TUNING.moments)]),
    )
    return measure, whole


def _given_all_before(totals: Statistics) -> list[float]:
    """P(the draft in this place is accepted | all before it in the chunk were)."""
    reached, shares = totals.rounds, []
    for _, accepted in sorted(totals.accepted_by_position.items()):
        shares.append(accepted / max(reached, 1))
        reached = accepted
    return shares


def speeds_chart(measures: Sequence[HeadMeasure], speeds: Sequence[float] = (1.2, 1.5, 2.0, 2.5)) -> Chart:
    """Acceptance against the cost of a draft, and for each speed the acceptance that reaches it at that cost."""
    plain = measures[0].costs
    dearest = max(0.2, *(measure.draft_cost for measure in measures)) * 1.1
    costs = [dearest * i / 24 for i in range(25)]
    lines = []
    for speed in speeds:
        needed = [(cost, _needed(plain, cost, speed)) for cost in costs]
        points = [(cost, acceptance) for cost, acceptance in needed if acceptance is not None]
        if points:
            lines.append(Line(f"{speed:g} times plain", points, dashed=True))
    lines += [Line(m.name, [(m.draft_cost, m.acceptance)]) for m in measures]
    panels = [Panel("greedy, drafting and verifying in turns", lines)]
    return Chart("Exit heads", "time of a draft / time of a plain step", "acceptance", panels)


def _needed(costs: Costs, draft_cost: float, speed: float) -> float | None:
    """The acceptance, alike in every place, from which drafts of this cost reach `speed` at their best length."""

    def reached(acceptance: float) -> float:
        best, draft = 0.0, draft_cost * costs.plain_seconds
        for length in range(1, MAX_ROWS):
            tokens = sum(acceptance**place for place in range(length + 1))
            seconds = length * draft + costs.turns.row_step + costs.turns.verify[length]
            best = max(best, tokens * costs.plain_seconds / seconds)
        return best

    low, high = 0.0, 1.0
    if reached(high) < speed:
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) >= speed else (middle, high)
    return high
