"""What draft steps and passes cost on this GPU, for the lab.

They are measured at work: rounds launched graph by graph as the carrier does, on a text that goes on meanwhile,
between events that the GPU itself stamps. First one after the other, then side by side on two streams. On one GPU both
stages read the same memory and take each other's multiprocessors: where that is what they wait for, side by side each
takes as long as both would in turns. Only where more was done each time does the table say what overlapping costs, and
without that nothing is said of it.

A pass takes all rows that wait, so one over a single row follows no drafts.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import NamedTuple

from .._native import Costs, StageCosts
from ..pipeline.schedule import MAX_ROWS
from ..sampling.params import SamplingParams
from .devices import synchronise
from .graphs import StageGraphs
from .stages import DeviceStages

_WORTH_TELLING = 1.03  # how much more is done side by side, for the table to say what overlapping costs
CONTEXT = StageCosts.CONTEXT  # rows of text after which rounds are measured
DEEP = 1024  # the same, to learn what a longer text costs
MEASURED_ROWS = (1, 2, 4, 8, 16)
DEEP_ROWS = (1, 4, 16)
REPEATS = 5
_PLAIN = 3  # plain steps, one after the other
_PAIRED = 24  # draft steps beside which passes are timed
_ROOM = sum(MEASURED_ROWS) + 2 * _PLAIN + 4 * (_PAIRED + MAX_ROWS)  # positions that the text goes on by at most


def _deep(longest: int) -> int:
    """Rows of the longer text, of a model that takes texts of `longest` tokens; 0: too few to tell."""
    deep = min(DEEP, longest - _ROOM)
    return deep if deep >= 2 * CONTEXT else 0


def most_positions(longest: int) -> int:
    """That a calibration needs, of a model that takes texts of `longest` tokens."""
    return max(CONTEXT, _deep(longest)) + _ROOM


class Round(NamedTuple):
    """Seconds of what a round launches: draft steps, the last draft's row, the legs of the pass."""

    drafts: list[float]
    row: float
    legs: list[float]


def calibrate(stages: DeviceStages, graphs: StageGraphs | None) -> Costs:
    """Overwrites the answer in progress. Without graphs: eager launches, which do not overlap."""
    if graphs is None:
        return Costs(_in_turns(stages, partial(eager_round, stages), 3 if stages.home.type == "cuda" else 1))
    plain = None if graphs.apart else partial(_whole_plain_step, graphs)
    turns = _in_turns(stages, partial(_apart_round if graphs.apart else captured_round, graphs), REPEATS, plain)
    _begin(stages, CONTEXT)
    return Costs(turns, _beside_a_stage(graphs, turns) if graphs.apart else _side_by_side(graphs, turns))


def _begin(stages: DeviceStages, context: int) -> None:
    """A made-up text of `context` tokens; rows that it shares with the one before are not computed again."""
    prompt = [i % stages.weights.config.vocab_size for i in range(1, context + 1)]
    stages.begin(prompt, SamplingParams(), keep=context - 1, most=MAX_ROWS - 1, lookahead=10**6)
    synchronise(stages.devices)


def _in_turns(
    stages: DeviceStages, play: Callable[[int], Round], repeats: int, plain: Callable[[], float] | None = None
) -> StageCosts:
    """Rounds as they are decoded: what a step finds in the cache depends on those before it. The first repeat warms up.

    play: a round whose pass takes so many rows. plain: a plain step as it is decoded, where that is no such round.
    """
    steps: dict[str, list[float]] = {"row": [], "draft": [], "first": [], "plain": []}
    passes: dict[int, list[float]] = {rows: [] for rows in MEASURED_ROWS}
    for repeat in range(repeats + 1):
        _begin(stages, CONTEXT)
        for rows in MEASURED_ROWS[1:]:
            drafts, row, legs = play(rows)
            if repeat or repeats == 1:
                steps["first"].append(drafts[0])
                steps["draft"] += drafts[1:]
                steps["row"].append(row)
                passes[rows].append(sum(legs))
        for place in range(_PLAIN):
            _, row, legs = play(1)
            if place and (repeat or repeats == 1):  # the first one still finds what drafting has left
                steps["plain"].append(row + sum(legs) if plain is None else plain())
                passes[1].append(sum(legs))
    slopes = _slopes(stages, play, repeats)
    late = stages.weights.config.num_hidden_layers - stages.weights.exit_layer
    return StageCosts(
        row_step=median(steps["row"]),
        draft_step=median(steps["draft"]),
        verify=StageCosts.between({rows: median(times) for rows, times in passes.items()}),
        first_draft=median(steps["first"]),
        plain=median(steps["plain"]),
        step_deeper=slopes[0] * stages.weights.exit_layer / late,
        verify_deeper=slopes,
    )


def _slopes(stages: DeviceStages, play: Callable[[int], Round], repeats: int) -> tuple[float, ...]:
    """What each further row of the text adds to a pass, by its number of rows."""
    deep = _deep(stages.weights.config.max_position_embeddings)
    if not deep or stages.home.type != "cuda":  # the interpreter's times mean nothing
        return (0.0,) * MAX_ROWS
    seconds: dict[tuple[int, int], list[float]] = {}
    for context in (CONTEXT, deep):
        for repeat in range(repeats + 1):
            _begin(stages, context)
            for rows in DEEP_ROWS:
                took = sum(play(rows).legs)
                if repeat:
                    seconds.setdefault((context, rows), []).append(took)
    more = {rows: median(seconds[deep, rows]) - median(seconds[CONTEXT, rows]) for rows in DEEP_ROWS}
    return StageCosts.between({0: 0.0, **{rows: max(m, 0.0) / (deep - CONTEXT) for rows, m in more.items()}})


def captured_round(graphs: StageGraphs, rows: int) -> Round:
    launches = [(0, exec) for exec in (*[graphs.draft] * (rows - 1), graphs.row, *graphs.verify)]
    took = [end - begin for begin, end in graphs.lanes.timeline(launches)]
    return Round(took[: rows - 1], took[rows - 1], took[rows:])


def _whole_plain_step(graphs: StageGraphs) -> float:
    """In one launch."""
    ((begin, end),) = graphs.lanes.timeline([(0, graphs.rounds[0])])
    return end - begin


def _apart_round(graphs: StageGraphs, rows: int) -> Round:
    """On several devices: a pass's legs are timed one by one, the copies between them are not."""
    spans = graphs.lanes.timeline([*[(-1, graphs.draft)] * (rows - 1), (-1, graphs.row)])
    took = [end - begin for begin, end in spans]
    return Round(took[:-1], took[-1], graphs.pass_apart(None))


def eager_round(stages: DeviceStages, rows: int) -> Round:
    def seconds(step: Callable[[], None]) -> float:
        begun = perf_counter()
        step()
        synchronise(stages.devices)
        return perf_counter() - begun

    drafts = [seconds(stages.draft_step) for _ in range(rows - 1)]
    legs = [partial(stages.verification, leg) for leg in range(len(stages.legs))]
    return Round(drafts, seconds(stages.early_step), [seconds(leg) for leg in legs])


def _beside(turns: StageCosts, drafting: float, verifying: float) -> StageCosts:
    """The same stages, where steps and passes take so many times as long beside each other."""
    return turns.replace(
        row_step=turns.row_step * drafting,
        draft_step=turns.draft_step * drafting,
        verify=tuple(seconds * verifying for seconds in turns.verify),
        first_draft=0.0,
        plain=0.0,
        step_deeper=turns.step_deeper * drafting,
        verify_deeper=tuple(seconds * verifying for seconds in turns.verify_deeper),
    )


def _slower(graphs: StageGraphs, turns: StageCosts, legs: list[int], alone: float) -> tuple[float, float] | None:
    """How many times as long draft steps and these legs of a pass, which take `alone` seconds, take beside each other;
    None: they have not met."""
    beside = min(_PAIRED, int(2 * alone / turns.draft_step) + 2)
    spans = graphs.lanes.timeline([*[(-1, graphs.draft)] * beside, *((0, exec) for exec in legs)])
    begin, end = spans[beside][0], spans[-1][1]
    together = [stop - start for start, stop in spans[:beside] if start < end and stop > begin]
    return (median(together) / turns.draft_step, (end - begin) / alone) if together else None


def _beside_a_stage(graphs: StageGraphs, turns: StageCosts) -> StageCosts | None:
    """What overlaps on one of several devices is drafting with the stage that shares it, if there is one; the rest of a
    pass runs elsewhere, beside drafts at full speed. Passes that follow each other through the stages are not foreseen.
    """
    if not graphs.drafts_beside_a_stage:
        return turns
    slower, alone = [], 0.0
    for repeat in range(4):
        alone = _apart_round(graphs, 4).legs[0]
        graphs.lanes.timeline([(-1, graphs.draft)] * 4)
        found = _slower(graphs, turns, graphs.verify[:1], alone)
        graphs.pass_apart(None, first=1)
        if repeat and found:
            slower.append(found)
    if not slower:
        return None
    share = min(1.0, alone / turns.verify[3])
    drafts, leg = (1 + share * (max(1.0, median(times)) - 1) for times in zip(*slower, strict=True))
    return _beside(turns, drafts, leg)


def _side_by_side(graphs: StageGraphs, turns: StageCosts) -> StageCosts | None:
    """How much longer draft steps and passes take beside each other; None where that does not gain every time."""
    slower = []
    for repeat in range(4):
        graphs.lanes.timeline([(0, graphs.draft)] * 4)  # rows for the pass
        found = _slower(graphs, turns, graphs.verify, turns.verify[3])
        if repeat and found:
            slower.append(found)
    # In the time of a pass beside drafts, 1 / slower of a pass is done, and as much of drafts: 1 is what turns do.
    if not slower or min(1 / drafts + 1 / passes for drafts, passes in slower) < _WORTH_TELLING:
        return None
    drafts, passes = (max(1.0, median(times)) for times in zip(*slower, strict=True))
    return _beside(turns, drafts, passes)
