"""The control links: between rank 0 and every other rank, beside the pipeline.

They carry what must not wait for passes: signs of life, facts, questions about costs, grammars, and the end. A message
is int32 words: magic, kind, value (int64), sent (int64, nanoseconds of the sender's steady clock), count, 0, and so
many words of payload: float32 numbers, or a text.

Any rank's end ends all: rank 0 hears of it by its connection (at once), by its own words, or by its silence, tells the
others, and every rank raises the same line. Should rank 0 itself be lost, each of the others notices by itself.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from threading import Event, Lock, Thread, Timer
from typing import Any

import numpy as np

from .. import _native
from ..errors import PpsdError
from ..printable import printable
from .links import CONTROL, ProtocolError, Receiver, Sender, Words
from .threads import CLOCK, Clock, start
from .world import World

WORDS = 64  # of nearly all messages
LONGEST = 1 << 20  # words of one with a grammar, or the spans of a long answer
_MAGIC = 0x50534300 + _native.WIRE_VERSION
_PAYLOAD = 8
TEXT_BYTES = 4 * (LONGEST - _PAYLOAD)
_BEAT = 0.25  # seconds between signs of life
# Limits for what nothing else would end: none is reached by ranks that have a tenth of a core each.
_STUCK = 600.0  # seconds that one piece of work may take
_LAST_WORDS = 3.0  # seconds for a message to leave, where a rank may not be reading any more
GRACE = 10.0  # seconds for the better-informed line of rank 0 to come
_TOLD = 1.0  # the same, where a rank was told to end
_BYES = 30.0  # seconds for all others to hear that all is well


class Kind(IntEnum):
    BEAT = 1  # value: milliseconds that the work at hand has taken by now
    READY = 3  # the slice is loaded; value: blocks of KV caches that there is memory for
    PING = 4
    PONG = 5
    MEASURE = 6  # value: 1: one row, while all others do so too
    COSTS = 7  # payload: seconds of passes over 1, 2, ... rows
    REPORT = 8  # payload: see `report_of` in stage.py
    STOP = 9  # the end, all being well
    BYE = 10  # heard
    FAIL = 11  # text: the line that every rank ends with
    TRACE = 12  # what did the answer's passes take, and when?
    SPANS = 13  # text: JSON
    GRAMMAR = 14  # of an answer to come, and what the last rank says of it: see grammars.py
    FORGET = 15  # a grammar, by its number
    FACTS = 16  # text: see handshake.py
    SPLIT = 17  # text: the layers of each rank


Handler = Callable[[int, int, Words], None]  # (rank, value, message)


class Control:
    """busy: gives the seconds that the work at hand has taken by now, for the signs of life of this rank."""

    def __init__(self, group: Any, world: World, silence: float, delay: float, clock: Clock = CLOCK) -> None:
        self.world, self.silence, self.delay, self._clock = world, silence, delay, clock
        self.busy: Callable[[], float] = lambda: 0.0
        self._line: str | None = None  # of the first failure; public once the others have been told
        self.failure: str | None = None
        self.failed, self.stopping = Event(), Event()
        self._lock = Lock()
        self.ready: dict[int, int] = {}  # ranks that have said so, and their blocks
        self._handlers: dict[int, Handler] = {
            Kind.BEAT: self._beat,
            Kind.PING: self._pong,
            Kind.READY: lambda rank, value, message: self.ready.update({rank: value}),
            Kind.BYE: lambda rank, value, message: self._bye(rank),
        }
        self._byes: set[int] = set()
        self._gone = Event()
        peers = range(1, world.size) if world.drafts else (0,)
        unread = 64 + 2 * int(silence / _BEAT)  # more than a silent rank leaves unread before it is given up
        self._heard = dict.fromkeys(peers, clock.now())
        self._senders = {peer: Sender(group, peer, CONTROL, WORDS, unread) for peer in peers}
        self._receivers = [Receiver(group, peer, CONTROL, LONGEST, 4, self._take(peer), self.lost) for peer in peers]

    def on(self, kind: Kind, handler: Handler) -> None:
        self._handlers[kind] = handler

    def start(self) -> None:
        for receiver in self._receivers:
            start(receiver)
        start(Thread(target=self._watch, name="watch", daemon=True))
        for rank in self._senders:  # a thread each: a link may be full whose rank reads no more
            start(Thread(target=self._live, args=(rank,), name=f"alive-{rank}", daemon=True))

    # -- sending -------------------------------------------------------------------------------------------------------

    def tell(self, rank: int, kind: Kind, value: int = 0, payload: Sequence[float] | str = ()) -> None:
        """payload: numbers, or a text, of which as much is sent as there is room for."""
        if isinstance(payload, str):
            raw = payload.encode(errors="replace")[:TEXT_BYTES]
            words = np.frombuffer(raw.ljust(-(-len(raw) // 4) * 4, b"\0"), np.int32)
        else:
            words = np.array(payload, np.float32).view(np.int32)
        message = np.zeros(_PAYLOAD + len(words), np.int32)
        message[:2] = _MAGIC, kind
        message[2:6].view(np.int64)[:] = value, _native.wire_clock()
        message[6] = len(words)
        message[_PAYLOAD:] = words
        sender = self._senders[rank]
        with sender.lock:
            buffer = sender.buffer()
            if len(message) > WORDS:
                sender.send_long(message)
            else:
                buffer[: len(message)] = message
                sender.send(len(message))

    # -- failing -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.failure is not None:
            raise PpsdError(self.failure)

    def until(self, done: Callable[[], bool]) -> None:
        """PpsdError, if the ranks end meanwhile."""
        while not done():
            self.failed.wait(0.005)
            self.check()

    def fail(self, line: str, share: bool = True) -> None:
        """The first line counts. share: the other ranks are to end with it too, and are told before this one ends."""
        with self._lock:
            if self._line is not None or self.stopping.is_set():
                return
            self._line = line
        if share:
            telling = [Thread(target=self._tell_failure, args=(rank, line), daemon=True) for rank in self._senders]
            for thread in telling:
                start(thread)
            for thread in telling:  # one that reads no more may have filled its link: then nothing leaves
                thread.join(_LAST_WORDS)
        self.failure = line
        self.failed.set()

    def _tell_failure(self, rank: int, line: str) -> None:
        with suppress(RuntimeError):  # its connection is gone: nobody is left there to be told
            self.tell(rank, Kind.FAIL, 0, line)
            self._flush(rank)

    def _flush(self, rank: int) -> None:
        """The last words of this process leave it."""
        with self._senders[rank].lock:
            self._senders[rank].flush(_LAST_WORDS)

    def fail_later(self, line: str, seconds: float = GRACE) -> None:
        """If nothing better is known by then."""
        timer = Timer(seconds, self.fail, (line,))
        timer.daemon = True
        timer.start()

    def told_to_end(self) -> None:
        """By SIGTERM, as torchrun's agent tells those that are left."""
        self.fail_later(f"rank {self.world.rank} was told to end (SIGTERM)", _TOLD)

    def lost(self, rank: int, error: Exception) -> None:
        """A link from `rank` has ended."""
        if self.stopping.is_set():
            self._bye(rank)
            return
        if isinstance(error, ProtocolError):
            self.fail(f"rank {self.world.rank} got what it did not expect from rank {rank}: {error}")
        elif self.world.drafts or rank == 0:
            self.fail(f"rank {rank} has died: its connection closed")
        else:  # a neighbour's: it may have been told to end, and rank 0 knows
            self.fail_later(f"rank {rank} has died: its connection closed")

    # -- ending --------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Rank 0: all is well, and all may go. Returns when they have heard it, or have gone, or after `_BYES`."""
        if self.failure is None:
            self.stopping.set()
            for rank in self._senders:
                try:
                    self.tell(rank, Kind.STOP)
                except RuntimeError:  # its connection
                    self._bye(rank)
            self._gone.wait(_BYES)

    def _bye(self, rank: int) -> None:
        self._byes.add(rank)
        if len(self._byes) == len(self._senders):
            self._gone.set()

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _take(self, peer: int) -> Callable[[Words], None]:
        def take(message: Words) -> None:
            self._heard[peer] = self._clock.now()
            if message[0] != _MAGIC or message[1] not in Kind.__members__.values():
                raise ValueError("no message of this version")
            value, sent = message[2:6].view(np.int64)
            kind = Kind(message[1])
            if kind is Kind.FAIL:
                line = printable(text_of(message)) or f"rank {peer} has failed and does not say why"
                self.fail(line, share=self.world.drafts)
                return
            if kind is Kind.STOP:
                self.stopping.set()
                self.tell(peer, Kind.BYE)
                self._flush(peer)
                self.failed.set()
                return
            if self.delay and kind in (Kind.PING, Kind.PONG):
                _native.sleep_until(int(sent) + int(self.delay * 1e9))
            handler = self._handlers.get(kind)
            if handler is None:
                raise ValueError(f"nobody waits for {kind.name}")
            handler(peer, int(value), message)

        return take

    def _pong(self, rank: int, value: int, message: Words) -> None:
        self.tell(rank, Kind.PONG, value)

    def _beat(self, rank: int, value: int, message: Words) -> None:
        if value > _STUCK * 1000:
            self.fail(f"rank {rank} hangs: it has worked on one pass for {value / 1000:.0f} s")

    def _watch(self) -> None:
        before = self._clock.now()
        while not self.failed.is_set() and not self.stopping.is_set():
            self._clock.sleep(_BEAT)
            now = self._clock.now()
            if now - before > self.silence / 2:  # this process itself was held up
                self._heard = dict.fromkeys(self._heard, now)
            before = now
            for rank, heard in self._heard.items():
                if now - heard > self.silence:
                    self.fail(f"rank {rank} has been silent for {self.silence:g} s: it hangs, or its host is gone")

    def _live(self, rank: int) -> None:
        while not self.failed.is_set() and not self.stopping.is_set():
            self._clock.sleep(_BEAT)
            try:
                self.tell(rank, Kind.BEAT, int(self.busy() * 1000))
            except RuntimeError as error:  # its connection
                self.lost(rank, error)


def text_of(message: Words) -> str:
    return _payload(message).tobytes().rstrip(b"\0").decode(errors="replace")


def numbers_of(message: Words) -> list[float]:
    return [float(number) for number in _payload(message).view(np.float32)]


def _payload(message: Words) -> Words:
    count = int(message[6])
    if not 0 <= count <= len(message) - _PAYLOAD:
        raise ValueError("a message with too many numbers")
    return message[_PAYLOAD : _PAYLOAD + count]
