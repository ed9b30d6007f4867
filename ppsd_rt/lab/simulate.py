"""Schedules in simulated time: what a pipeline would do whose stage costs and link delays are known.

    costs = equal_stages(8)
    simulate(named("ppsd"), costs, acceptance=0.8).tokens_per_second * costs.plain_step  # the speed-up

The decisions are those of the real scheduler (csrc/pipeline/simulated.h); only the work is replaced by waiting. What is
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

from collections.abc import Sequence
from dataclasses import dataclass

from .. import _native
from .._native import Planner, StageCosts
from ..errors import UsageError
from ..pipeline.rounds import Round
from ..pipeline.schedule import AUTO, MAX_ROWS, Schedule, describe
from ..statistics import Statistics

Table = tuple[float, ...]


def table(fixed: float, row: float = 0.0) -> Table:
    """Seconds of a pass over 1 to 16 rows that costs `fixed + row * rows`: on a memory-bound device `row` is small."""
    return tuple(fixed + row * rows for rows in range(1, MAX_ROWS + 1))


def pipeline_costs(
    step: Table,
    head: float,
    verify: Sequence[Table],
    links: float | Sequence[float] = 0.0,
    draft_interference: float = 1.0,
    verify_interference: float = 1.0,
    link_row: float = 0.0,
) -> StageCosts:
    """Of stages that are workers of their own. Seconds (or any other unit: only the result's unit changes).

    step:   the draft stage's pass over layers [0, E), by the number of rows, from 1 to 16.
    head:   the exit head, each time a draft token is drawn.
    verify: for each verification stage the same table as `step`; the last stage's includes the LM head.
    links:  how long a message takes from each stage to the next and, at the end, the verdict back to the draft stage;
            one number: every link takes as long.
    link_row: how much longer for each row of a message: the bytes of a hidden state over the link's bandwidth.
    draft_interference, verify_interference: how many times longer a draft step takes while verification works, and the
            other way round. 1: devices of their own.

    Raises UsageError for what costs cannot be: negative, not numbers, fewer for more rows.
    """
    if head < 0:
        raise UsageError("a cost is negative: the exit head's")
    try:
        return StageCosts(
            row_step=tuple(step),
            draft_step=step[0] + head,
            verify=tuple(verify),
            links=links,
            link_row=link_row,
            draft_interference=draft_interference,
            verify_interference=verify_interference,
        )
    except (ValueError, IndexError) as error:
        raise UsageError(str(error)) from None


def equal_stages(stages: int, head: float = 0.0, links: float = 0.0) -> StageCosts:
    """`stages` devices, the draft stage among them, that each take 1 / stages for any number of rows."""
    if stages < 2:
        raise UsageError(f"a pipeline has a draft stage and at least one verification stage, not {stages} stages")
    return pipeline_costs(table(1 / stages), head, (table(1 / stages),) * (stages - 1), links)


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
    spans: list[tuple[str, int, int, float, float]]  # as Backend.spans: (name, track, rows, begin, end), microseconds

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


def simulate(
    schedule: Schedule | Planner,
    costs: StageCosts,
    acceptance: float | Sequence[float],
    tokens: int = 1000,
    seed: int = 0,
    trace: bool = False,
    second: float = 0.0,
) -> Simulation:
    """Decode `tokens` tokens.

    schedule: or the planner of `auto`, which goes on from what it has learned before. costs: what work really takes.
    acceptance: P(a draft token is right | all before it are); a sequence gives it by the draft token's place: how many
    others wait for their verdict in front of it. The sequence's last number goes for all further places. second:
    P(its sibling is right | it is not), for schedules with siblings.
    """
    places = [acceptance] if isinstance(acceptance, (int, float)) else list(acceptance)
    if not places or not all(0 <= chance <= 1 for chance in places):
        raise UsageError(f"acceptance must be a number from 0 to 1, or several, not {acceptance}")
    if not 0 <= second <= 1:
        raise UsageError(f"second must be a number from 0 to 1, not {second}")
    if tokens < 1:
        raise UsageError(f"tokens must be at least 1, not {tokens}")
    events, text, spans = _native.simulate(
        schedule=schedule, tokens=tokens, acceptance=places, second=second, seed=seed, costs=costs, trace=trace
    )
    rounds = tuple(TimedRound(seconds, round) for seconds, round in events)
    name = describe(AUTO if isinstance(schedule, Planner) else schedule)
    statistics = _statistics(name, rounds, len(costs.stages))
    return Simulation(tuple(text[-tokens:]), rounds[-1].seconds, rounds[1:], statistics, spans)


def speedup(schedule: Schedule, costs: StageCosts, acceptance: float | Sequence[float], tokens: int = 1000) -> float:
    """How many times faster than plain decoding on the same stages."""
    return simulate(schedule, costs, acceptance, tokens).tokens_per_second * costs.plain_step


def _statistics(schedule: str, rounds: Sequence[TimedRound], stages: int) -> Statistics:
    statistics = Statistics(schedule, "simulated", threads=1 + stages, prompt_tokens=1)
    before = 0.0
    for timed in rounds:
        statistics.add(timed.round, timed.seconds - before)
        before = timed.seconds
    return statistics
