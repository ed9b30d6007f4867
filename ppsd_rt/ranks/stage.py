"""A rank that verifies: waits for passes, works on them, sends what comes of it on. It ends when rank 0 says so."""

import signal
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from .. import _native
from ..sampling.grammar import Grammars
from .control import Control, Kind
from .grammars import AnswerGrammars
from .links import PASSES, VERDICTS, LinkLost, Receiver, Sender
from .threads import start

MOST_SPANS = 40_000  # of a timeline, the newest
DEPTH = 24  # receives posted in advance: more than passes of a window of drafts


def serve(
    groups: dict[int, Any],
    control: Control,
    station: _native.Station,
    words: int,
    grammars: Callable[[], Grammars],
) -> None:
    """words: of the longest message. grammars: makes those of the model, once they are needed.

    Raises PpsdError when the pipeline ends otherwise than by rank 0's word.
    """
    rank, last = control.world.rank, control.world.rank == control.world.last
    to, tag = (0, VERDICTS) if last else (rank + 1, PASSES)
    sender = Sender(groups[tag], to, tag, words)
    traces = SimpleQueue[None]()
    control.on(Kind.SPANS, traces.put)
    if last:
        station.use_masks(AnswerGrammars(control, grammars).mask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides whether an answer or the whole run is to end
    signal.signal(signal.SIGTERM, lambda *_: control.told_to_end())
    receiver = Receiver(groups[PASSES], rank - 1, PASSES, words, DEPTH, station.post, control.lost)
    _native.precise_waits()
    station.pin()
    control.busy = station.busy_seconds
    start(receiver)
    control.tell(0, Kind.READY, station.blocks)
    try:
        while not control.failed.is_set():
            if written := station.work(sender.buffer(), 50):
                sender.send(written)
            elif not traces.empty():  # not while a pass goes on, which would be missing
                control.tell(0, Kind.SPANS, station.spans()[-MOST_SPANS:])
                traces.get()
    except (RuntimeError, MemoryError) as error:
        if not control.stopping.is_set():
            _explain(control, to, error)
    if not control.stopping.is_set():
        control.failed.wait()
        control.check()


def _explain(control: Control, to: int, error: Exception) -> None:
    if isinstance(error, MemoryError):
        remedy = "raise its --kv-memory, or lower --max-tokens"
        control.fail(f"rank {control.world.rank} has no memory for a KV cache so long: {remedy}")
    elif isinstance(error, LinkLost):
        control.lost(to, error)
    else:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        control.fail(f"rank {control.world.rank}: {lines[0]}")
