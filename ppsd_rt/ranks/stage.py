"""A rank that verifies: waits for rows, works on them, sends what comes of it on. It ends when rank 0 says so."""

import signal
from collections import deque
from collections.abc import Callable
from typing import Any

from .. import _native
from ..errors import PpsdError
from ..sampling.grammar import Grammars
from .control import PAYLOAD_WORDS, Control, Kind, Words, words_of
from .costs import displacer, time_passes
from .grammars import ToldGrammars
from .links import CHOSEN, PASSES, ROWS, VERDICTS, LinkLost, Receiver, Sender
from .report import report_of
from .slices import RankStation
from .threads import start
from .timeline import pack_spans

DEPTH = 24  # receives posted in advance: more than a window of drafts
PASS_DEPTH = 2  # the same, of passes, which are longer and come one by one


def serve(
    groups: dict[int, Any],
    control: Control,
    station: RankStation,
    hidden: int,
    packed_bytes: int,
    grammars: Callable[[], Grammars] | None = None,
    blocks: int = 0,
) -> None:
    """grammars: makes those of the model, once they are needed; None: answers have none. blocks: of the loop's KV
    caches, that there is memory for; 0: no passes of the loop come.

    Raises PpsdError when the pipeline ends otherwise than by rank 0's word.
    """
    world, questions, traces = control.world, deque[tuple[int, int]](), deque[int]()
    rank, last = world.rank, world.rank == world.last
    words = _native.wire_words(hidden)
    to, tag = (0, VERDICTS) if last else (rank + 1, ROWS)
    sender = Sender(groups[tag], to, tag, words, _native.WIRE_MESSAGES)
    pass_words, pass_tag = _native.pass_words(hidden), CHOSEN if last else PASSES
    passes = Sender(groups[pass_tag], to, pass_tag, pass_words, groups=2)

    def measure() -> None:
        peer, beside = questions[0]
        if beside:
            costs = time_passes(station.time_pass, one_row=True)
        else:
            costs = time_passes(station.time_pass, displace=displacer(packed_bytes * (world.local_size - 1)))
        questions.popleft()  # before rank 0 knows, who may send rows at once
        control.tell(peer, Kind.COSTS, beside, costs)

    def announce(peer: int, epoch: int, message: Words) -> None:
        spared = words_of(message)
        station.announce(epoch, int(message[4:6].view("int64")[0]), int(spared[0]) if len(spared) else -1)

    def report(peer: int, value: int, message: Words) -> None:
        counts = station.counts()
        control.tell(peer, Kind.REPORT, 0, report_of(packed_bytes, counts.passes, counts.rows, counts.seconds))

    def tell_spans(peer: int) -> None:
        messages = pack_spans(station.spans(), PAYLOAD_WORDS)
        for place, message in enumerate(messages, 1):
            control.tell(peer, Kind.SPANS, len(messages) - place, words=message)

    control.on(Kind.TRACE, lambda peer, value, message: traces.append(peer))
    control.on(Kind.MEASURE, lambda peer, beside, message: questions.append((peer, beside)))
    control.on(Kind.EPOCH, announce)
    control.on(Kind.REPORT, report)
    told = ToldGrammars(control, grammars) if last and grammars else None
    if told:
        station.use_masks(told.mask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides whether an answer or the whole run is to end
    signal.signal(signal.SIGTERM, lambda *_: control.told_to_end())

    def post(message: Words) -> None:
        if questions:  # a measurement left rows that are nobody's text; rank 0 keeps none of them either
            raise ValueError("rows came during a measurement")
        station.post(message)

    receivers = [Receiver(groups[ROWS], rank - 1, ROWS, words, DEPTH, post, control.lost)]
    if blocks:
        take = station.post_pass
        receivers.append(Receiver(groups[PASSES], rank - 1, PASSES, pass_words, PASS_DEPTH, take, control.lost))
    _native.precise_waits()
    station.pin()
    for receiver in receivers:
        start(receiver)
    control.tell(0, Kind.READY, blocks)
    try:
        while not control.failed.is_set():
            out, pass_out = sender.buffers(), passes.buffers()
            try:
                written, words_of_pass = station.work_with_passes(out, pass_out, 50)
            except (RuntimeError, PpsdError) as error:
                if told is None or not told.gives_up(error):
                    raise
                continue
            if written > 0:
                sender.send(lengths(out, written, hidden))
            elif words_of_pass > 0:
                passes.send([words_of_pass])
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


def lengths(messages: Words, count: int, hidden: int) -> list[int]:
    """Words of each message that are in use: by its kind, its flags and its number of rows."""
    return [_native.WIRE_WORDS + _more(message, hidden) for message in messages[:count]]


def _more(message: Words, hidden: int) -> int:
    rows, flags = int(message[5]), int(message[7])
    carries = message[1] == _native.WIRE_ROWS or flags & _native.WIRE_FEEDBACK
    logprobs = _native.WIRE_LOGPROBS if flags & _native.WIRE_LOGPROB else 0
    return rows * (hidden if carries else 0) + rows * logprobs + int(message[12])


def _explain(control: Control, to: int, error: Exception) -> None:
    if isinstance(error, MemoryError):
        control.fail(f"rank {control.world.rank} has no memory for a KV cache so long; lower --max-tokens")
    elif isinstance(error, LinkLost):
        control.lost(to, error)
    else:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        control.fail(f"rank {control.world.rank}: {lines[0]}")
