"""A rank that verifies: waits for passes, works on them, sends what comes of it on. It ends when rank 0 says so."""

import json
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import _native
from ..sampling.grammar import Grammars
from .control import Control, Kind, Words
from .costs import displacer, time_passes
from .grammars import ToldGrammars
from .links import PASSES, VERDICTS, LinkLost, Receiver, Sender
from .threads import start

MOST_SPANS = 40_000  # of a timeline, the newest
DEPTH = 24  # receives posted in advance: more than passes of a window of drafts


def serve(
    groups: dict[int, Any],
    control: Control,
    station: _native.Station,
    words: int,
    packed_bytes: int,
    grammars: Callable[[], Grammars],
) -> None:
    """words: of the longest message. grammars: makes those of the model, once they are needed.

    Raises PpsdError when the pipeline ends otherwise than by rank 0's word.
    """
    world, questions, traces = control.world, deque[tuple[int, int]](), deque[int]()
    rank, last = world.rank, world.rank == world.last
    to, tag = (0, VERDICTS) if last else (rank + 1, PASSES)
    sender = Sender(groups[tag], to, tag, words)

    def measure() -> None:
        peer, beside = questions[0]
        if beside:
            costs = time_passes(station.time_pass, one_row=True)
        else:
            costs = time_passes(station.time_pass, displace=displacer(packed_bytes * (world.local_size - 1)))
        questions.popleft()  # before rank 0 knows, who may send rows at once
        control.tell(peer, Kind.COSTS, beside, costs)

    def report(peer: int, value: int, message: Words) -> None:
        counts = station.counts()
        control.tell(peer, Kind.REPORT, 0, report_of(packed_bytes, counts.passes, counts.rows, counts.seconds))

    def tell_spans(peer: int) -> None:
        control.tell(peer, Kind.SPANS, 0, json.dumps(station.spans()[-MOST_SPANS:]))

    control.on(Kind.TRACE, lambda peer, value, message: traces.append(peer))
    control.on(Kind.MEASURE, lambda peer, beside, message: questions.append((peer, beside)))
    control.on(Kind.REPORT, report)
    if last:
        station.use_masks(ToldGrammars(control, grammars).mask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides whether an answer or the whole run is to end
    signal.signal(signal.SIGTERM, lambda *_: control.told_to_end())

    def post(message: Words) -> None:
        if questions:  # a measurement left rows that are nobody's text; rank 0 keeps none of them either
            raise ValueError("rows came during a measurement")
        station.post(message)

    receiver = Receiver(groups[PASSES], rank - 1, PASSES, words, DEPTH, post, control.lost)
    _native.precise_waits()
    station.pin()
    control.busy = station.busy_seconds
    start(receiver)
    control.tell(0, Kind.READY, station.blocks)
    try:
        while not control.failed.is_set():
            if written := station.work(sender.buffer(), 50):
                sender.send(written)
            elif questions:
                measure()
            elif traces:  # not while a pass goes on, which would be missing
                tell_spans(traces.popleft())
    except (RuntimeError, MemoryError) as error:
        if not control.stopping.is_set():
            _explain(control, to, error)
    if not control.stopping.is_set():
        control.failed.wait()
        control.check()


def report_of(packed_bytes: int, pieces: int, rows: int, seconds: float) -> list[float]:
    """[megabytes resident, of these pages of files, of packed weights; pieces of work done (passes, or draft steps of
    one row), their rows, their seconds]. Pages of files, such as torch's libraries, a host's ranks have together."""
    return [*resident(), packed_bytes / 2**20, float(pieces), float(rows), seconds]


def resident() -> tuple[float, float]:
    """Megabytes of this process, and how many of them are pages of files; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0.0, 0.0
    values = {
        line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmRSS", "RssFile"))
    }
    return values.get("VmRSS", 0.0), values.get("RssFile", 0.0)


def _explain(control: Control, to: int, error: Exception) -> None:
    if isinstance(error, MemoryError):
        remedy = "raise its --kv-memory, or lower --max-tokens"
        control.fail(f"rank {control.world.rank} has no memory for a KV cache so long: {remedy}")
    elif isinstance(error, LinkLost):
        control.lost(to, error)
    else:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        control.fail(f"rank {control.world.rank}: {lines[0]}")
