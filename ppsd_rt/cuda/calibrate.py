"""What draft steps and passes cost on this GPU, for the planner of `auto` (csrc/pipeline/planner.h).

They are measured at work: launched graph by graph as the carrier does, on a text that goes on meanwhile, between
events that the GPU itself stamps. First one after the other, then side by side on two streams. On one GPU both stages
read the same memory: where that is what they wait for, side by side each takes as long as both would in turns, the
table says so, and the planner does not overlap them.
"""

from statistics import median
from time import perf_counter

from ..planner import Costs, StageCosts
from ..sampling import SamplingParams
from ..schedule import MAX_ROWS
from .devices import synchronise
from .graphs import StageGraphs
from .stages import DeviceStages

CONTEXT = 64  # rows behind which is measured
MEASURED_ROWS = (1, 2, 4, 8, 16)
REPEATS = 5
_PAIRED = 24  # draft steps beside which passes are timed


def most_positions() -> int:
    """That a calibration needs."""
    return CONTEXT + (REPEATS + 1) * sum(MEASURED_ROWS) + 4 * (_PAIRED + MAX_ROWS)


def calibrate(stages: DeviceStages, graphs: StageGraphs | None) -> Costs:
    """Overwrites the answer in progress. Without graphs: eager launches, which do not overlap."""
    prompt = [i % stages.weights.config.vocab_size for i in range(1, CONTEXT + 1)]
    stages.begin(prompt, SamplingParams(), most=MAX_ROWS - 1, lookahead=10**6)
    if graphs is None:
        return _eager(stages)
    synchronise(stages.devices)
    rows, drafts = [], []
    passes: dict[int, list[float]] = {n: [] for n in MEASURED_ROWS}
    if graphs.apart:
        return _apart(graphs)
    for repeat in range(REPEATS + 1):
        for count in MEASURED_ROWS:
            # The first draft step finds its row done and has only the exit head left: it is not counted.
            spans = graphs.lanes.timeline([(0, graphs.row), *[(0, graphs.draft)] * count, *_a_pass(graphs)])
            if repeat:  # the first time warms up
                took = [end - begin for begin, end in spans]
                rows.append(took[0])
                drafts += took[2 : 1 + count]
                passes[count].append(sum(took[1 + count :]))
    turns = StageCosts(median(rows), median(drafts), _table({n: median(times) for n, times in passes.items()}))
    return Costs(turns, _side_by_side(graphs, turns))


def _apart(graphs: StageGraphs) -> Costs:
    """On several devices: a pass's legs are timed one by one, the copies between them are not.

    What overlaps on one device is drafting with the stage that shares it, if there is one; the rest of a pass runs
    elsewhere, beside drafts at full speed. Passes that follow each other through the stages are not foreseen.
    """
    rows, drafts = [], []
    passes: dict[int, list[float]] = {n: [] for n in MEASURED_ROWS}
    shared: list[float] = []  # seconds of a pass on the device that drafts
    for repeat in range(REPEATS + 1):
        for count in MEASURED_ROWS:
            spans = graphs.lanes.timeline([(-1, graphs.row), *[(-1, graphs.draft)] * count])
            legs = graphs.pass_apart(None)
            if repeat:
                took = [end - begin for begin, end in spans]
                rows.append(took[0])
                drafts += took[2:]
                passes[count].append(sum(legs))
                shared.append(legs[0])
    turns = StageCosts(median(rows), median(drafts), _table({n: median(times) for n, times in passes.items()}))
    if not graphs.drafts_beside_a_stage:
        return Costs(turns, turns)
    slower_drafts, slower_leg, alone = [], [], median(shared)
    for repeat in range(4):
        graphs.lanes.timeline([(-1, graphs.draft)] * 4)
        beside = min(_PAIRED, int(2 * alone / turns.draft_step) + 2)
        spans = graphs.lanes.timeline([*[(-1, graphs.draft)] * beside, (0, graphs.verify[0])])
        graphs.pass_apart(None, first=1)
        begin, end = spans[-1]
        together = [stop - start for start, stop in spans[:-1] if start < end and stop > begin]
        if repeat and together:
            slower_drafts.append(median(together) / turns.draft_step)
            slower_leg.append((end - begin) / alone)
    if not slower_drafts:
        return Costs(turns, None)
    share = min(1.0, alone / turns.verify[3])
    drafting, verifying = (1 + share * (max(1.0, median(times)) - 1) for times in (slower_drafts, slower_leg))
    table = tuple(seconds * verifying for seconds in turns.verify)
    return Costs(turns, StageCosts(turns.row_step * drafting, turns.draft_step * drafting, table))


def _a_pass(graphs: StageGraphs) -> list[tuple[int, int]]:
    return [(0, exec) for exec in graphs.verify]


def _side_by_side(graphs: StageGraphs, turns: StageCosts) -> StageCosts | None:
    """How much longer draft steps and passes take beside each other."""
    slower_drafts, slower_passes = [], []
    beside = min(_PAIRED, int(2 * turns.verify[3] / turns.draft_step) + 2)
    for repeat in range(4):
        graphs.lanes.timeline([(0, graphs.draft)] * 4)  # rows for the pass
        spans = graphs.lanes.timeline([*[(-1, graphs.draft)] * beside, *_a_pass(graphs)])
        drafts, verified = spans[:beside], spans[beside:]
        begin, end = verified[0][0], verified[-1][1]
        shared = [stop - start for start, stop in drafts if start < end and stop > begin]
        if repeat and shared:
            slower_drafts.append(median(shared) / turns.draft_step)
            slower_passes.append((end - begin) / turns.verify[3])
    if not slower_drafts:
        return None
    drafting, verifying = max(1.0, median(slower_drafts)), max(1.0, median(slower_passes))
    table = tuple(seconds * verifying for seconds in turns.verify)
    return StageCosts(turns.row_step * drafting, turns.draft_step * drafting, table)


def _eager(stages: DeviceStages) -> Costs:
    device = stages.home

    def seconds(*steps: str) -> float:
        begun = perf_counter()
        for step in steps:
            getattr(stages, step)()
        synchronise(stages.devices)
        return perf_counter() - begun

    rows, drafts = [], []
    passes: dict[int, list[float]] = {1: [], 4: []}
    for repeat in range(3 if device.type == "cuda" else 1):  # the interpreter's times mean nothing
        for count, times in passes.items():
            row = seconds("early_step")
            seconds("draft_step")
            drafted = seconds(*["draft_step"] * max(1, count - 1)) / max(1, count - 1)
            verified = seconds("verification")
            if repeat or device.type != "cuda":
                rows.append(row)
                drafts.append(drafted)
                times.append(verified)
    return Costs(StageCosts(median(rows), median(drafts), _table({n: median(t) for n, t in passes.items()})), None)


def _table(known: dict[int, float]) -> tuple[float, ...]:
    """Seconds of a pass over 1 to 16 rows: straight lines between those that were measured, never falling."""
    counts = sorted(known)
    table: list[float] = []
    for rows in range(1, MAX_ROWS + 1):
        low = max((n for n in counts if n <= rows), default=counts[0])
        high = min((n for n in counts if n >= rows), default=counts[-1])
        share = (rows - low) / (high - low) if high > low else 0.0
        table.append(max([known[low] + share * (known[high] - known[low]), *table[-1:]]))
    return tuple(table)
