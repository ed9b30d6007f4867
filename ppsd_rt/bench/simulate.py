"""Schedules in simulated time: what a pipeline would do whose stage costs and link delays are known.

    costs = costs_of_stages([0.02 / 8] * 8, head=0.0, growth=growth(0.01))
    simulate(named("ppsd"), costs, acceptance=0.8).tokens_per_second * costs.plain_step  # the speed-up

The decisions are those of the real scheduler (csrc/core/simulated.h); only the work is replaced by waiting. What is
assumed:

- every stage is a worker of its own, with `interference` as the only thing that one does to another;
- a draft token is right with the given probability, independently of all others, and its confidence is that number;
- work that a verdict makes void ends in that instant; a message takes the delay of its link and `link_row` for each of
  its rows, which follow those of the message before; a verdict takes the delay alone;
- the prompt's pass is not part of the time: it begins when the prompt's token is committed.

Every row passes layers [0, E) in the draft stage before it is verified, drafts or not: a plain token costs
`step + verify(1)`, and a round of K drafts without overlap K * (step + head) for the drafts, `step` for the row of the
last of them, and `verify(K + 1)`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .. import _native
from .._native import Costs, StageCosts
from ..errors import UsageError
from ..pipeline.rounds import Round
from ..pipeline.schedule import MAX_ROWS, Schedule, describe
from ..planning.split import LayerCosts, Split, best_split
from ..statistics import Statistics
from ..trace import Span

Table = tuple[float, ...]


def growth(share: float) -> Table:
    """Every row after the first adds this share of the first."""
    return tuple(1 + share * (rows - 1) for rows in range(1, MAX_ROWS + 1))


def costs_of_stages(
    seconds: Sequence[float], head: float, growth: Table, links: float = 0.0, link_row: float = 0.0
) -> StageCosts:
    """seconds: of each stage for one row, the draft stage first, without the exit head; the last one's with the LM
    head. growth: of a pass over so many rows, in every stage alike: on a memory-bound device little more than 1, for
    the weights are read once. links: how long every message takes, and the verdict; link_row: more for each row of it.

    Raises UsageError for what costs cannot be.
    """
    if len(seconds) < 2:
        raise UsageError(f"a pipeline has a draft stage and at least one verification stage, not {len(seconds)} stages")
    step, *verify = (tuple(stage * factor for factor in growth) for stage in seconds)
    try:
        return StageCosts(step, step[0] + head, verify, links=links, link_row=link_row)
    except (ValueError, IndexError) as error:
        raise UsageError(str(error)) from None


@dataclass(frozen=True)
class ModelCosts:
    """Layers to be cut; exit_layer: where the draft stage ends, if an exit head has settled that."""

    layers: LayerCosts
    growth: Table
    exit_layer: int | None = None

    def cut(self, stages: int) -> Split:
        """Into so many stages as is best."""
        return best_split(self.layers, stages, self.exit_layer)

    def without_head(self, split: Split) -> tuple[float, ...]:
        """Seconds of each stage, the exit head left out."""
        first, *others = split.seconds
        return (first - self.layers.head, *others)


def measured(costs: Costs, exit_layer: int, layers: int) -> ModelCosts:
    """From a calibration of this machine: every stage is a machine like this one, with all its threads.

    A calibration times layers [0, E) for one row, and layers [E, L) with the LM head for 1 to 16 rows. A layer is taken
    to cost the same everywhere; the LM head is what is left of a pass. The growth with rows is that of such a pass.
    With exit layer 0 no layer was timed alone: each gets an equal share of a pass, the LM head included.
    """
    one, *_ = verify = costs.turns.verify[:MAX_ROWS]
    early = costs.turns.row_step / exit_layer if exit_layer else one
    late = min(early, one / (layers - exit_layer))
    per_layer = (early,) * exit_layer + (late,) * (layers - exit_layer)
    head = max(costs.turns.draft_step - costs.turns.row_step, 0.0)
    lm_head = max(one - late * (layers - exit_layer), 0.0)
    return ModelCosts(LayerCosts(per_layer, head, lm_head), tuple(seconds / one for seconds in verify), exit_layer)


@dataclass(frozen=True)
class TimedRound:
    seconds: float  # when its verdict arrived
    round: Round


@dataclass(frozen=True)
class Simulation:
    """tokens: ids of a made-up text, the same for every schedule; seconds: when the last of them was committed."""

    tokens: tuple[int, ...]
    seconds: float
    rounds: tuple[TimedRound, ...]
    statistics: Statistics
    spans: list[Span]

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def simulate(
    schedule: Schedule,
    costs: StageCosts,
    acceptance: float | Sequence[float],
    tokens: int = 1000,
    seed: int = 0,
    trace: bool = False,
) -> Simulation:
    """Decode `tokens` tokens.

    costs: what work takes.
    acceptance: P(a draft token is right | all before it are); a sequence gives it by the draft token's place: how many
    others wait for their verdict in front of it. The sequence's last number goes for all further places.
    """
    places = [acceptance] if isinstance(acceptance, (int, float)) else list(acceptance)
    if not places or not all(0 <= chance <= 1 for chance in places):
        raise UsageError(f"acceptance must be a number from 0 to 1, or several, not {acceptance}")
    if tokens < 1:
        raise UsageError(f"tokens must be at least 1, not {tokens}")
    events, text, spans = _native.simulate(
        schedule=schedule, tokens=tokens, acceptance=places, seed=seed, costs=costs, trace=trace
    )
    rounds = tuple(TimedRound(seconds, round) for seconds, round in events)
    statistics = _statistics(describe(schedule), rounds, len(costs.stages))
    return Simulation(tuple(text[-tokens:]), rounds[-1].seconds, rounds[1:], statistics, spans)


def _statistics(schedule: str, rounds: Sequence[TimedRound], stages: int) -> Statistics:
    statistics = Statistics(schedule, "simulated", threads=1 + stages, prompt_tokens=1)
    before = 0.0
    for timed in rounds:
        statistics.add(timed.round, timed.seconds - before)
        before = timed.seconds
    return statistics


def utilisation(spans: Iterable[Span], stages: int, tokens: int, seconds: float) -> dict[str, float]:
    """What stages did with their time, of an answer of `tokens` tokens after the prompt's, in `seconds`.

    stages: the draft stage among them. stall: share of the time that verification stages wait, all of them taken
    together. wasted_drafting, wasted_verification: share of the rows that no token came from, which needs one in every
    stage. dropped_draft_steps, dropped_passes: that a verdict made void while they were under way.
    """
    worked, rows, dropped = [0.0] * stages, [0] * stages, [0] * stages
    for name, track, count, begin, end in spans:
        worked[track] += (end - begin) / 1e6
        rows[track] += count
        dropped[track] += name.startswith("dropped")
    return {
        "stall": 1 - sum(worked[1:]) / ((stages - 1) * seconds),
        "wasted_drafting": 1 - tokens / rows[0],
        "wasted_verification": 1 - tokens * (stages - 1) / sum(rows[1:]),
        "dropped_draft_steps": dropped[0],
        "dropped_passes": sum(dropped[1:]),
    }
