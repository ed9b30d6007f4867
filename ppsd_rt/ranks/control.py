"""The control links: between rank 0 and every other rank, beside the pipeline.

They carry what must not wait for passes: signs of life, facts, grammars, timelines, and the end. A message is an int32
word, how many bytes follow, and these: JSON, [kind, value].

Any rank's end ends all: rank 0 hears of it by its connection (at once), by its own words, or by its silence, tells the
others, and every rank raises the same line. Should rank 0 itself be lost, each of the others notices by itself.
gloo's own time-outs are of no use here: one that has run out ends every connection of the process.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread, Timer
from typing import Any, TypeVar

import numpy as np

from ..errors import PpsdError
from ..printable import printable
from .links import CONTROL, ProtocolError, Receiver, Sender, Words
from .threads import CLOCK, Clock, start
from .world import World

_LONGEST = 1 << 20  # words of a message: with a grammar, or the spans of a long answer
MOST_BYTES = 4 * (_LONGEST - 1)
_BEAT = 0.25  # seconds between signs of life
# Limits for what nothing else would end: none is reached by ranks that have a tenth of a core each.
_STUCK = 600.0  # seconds that one piece of work may take
_LAST_WORDS = 3.0  # seconds for a message to leave, where a rank may not be reading any more
GRACE = 10.0  # seconds for the better-informed line of rank 0 to come
_TOLD = 1.0  # the same, where a rank was told to end
_BYES = 30.0  # seconds for another rank to hear that all is well


class Kind(IntEnum):
    BEAT = 1
    FACTS = 2  # of a rank; from rank 0 the layers of each rank: see launch.py
    READY = 3  # the slice is loaded; value: blocks of KV caches that there is memory for
    SPANS = 4  # rank 0 asks what the answer's passes took, and when; the answer is a list of spans
    GRAMMAR = 5  # of an answer to come, and what the last rank says of it: see stage.py
    FORGET = 6  # a grammar, by its number
    STOP = 7  # the end, all being well
    BYE = 8  # heard
    FAIL = 9  # value: the line that every rank ends with


T = TypeVar("T")
Handler = Callable[[Any], object]  # of a message's value


class Control:
    """busy: gives the seconds that the work at hand has taken by now: a rank that hangs gives no sign of life."""

    def __init__(self, group: Any, world: World, silence: float, clock: Clock = CLOCK) -> None:
        """silence: seconds without a sign of life after which a rank is lost."""
        self.world, self.silence, self._clock = world, silence, clock
        self.busy: Callable[[], float] = lambda: 0.0
        self._line: str | None = None  # of the first failure; public once the others have been told
        self.failure: str | None = None
        self.failed, self.stopping = Event(), Event()
        self._lock = Lock()
        self._handlers: dict[Kind, Handler] = {Kind.BEAT: lambda value: None}
        peers = range(1, world.size) if world.drafts else (0,)
        self._said: dict[tuple[int, Kind], SimpleQueue[Any]] = {
            (rank, kind): SimpleQueue() for rank in peers for kind in Kind
        }
        unread = 64 + 2 * int(silence / _BEAT)  # more than a silent rank leaves unread before it is given up
        self._heard = dict.fromkeys(peers, clock.now())
        self._senders = {peer: Sender(group, peer, CONTROL, 1, unread) for peer in peers}
        self._receivers = [Receiver(group, peer, CONTROL, _LONGEST, 4, self._take(peer), self.lost) for peer in peers]

    def on(self, kind: Kind, handler: Handler) -> None:
        """handler: called where such a message comes, instead of what `next` gives."""
        self._handlers[kind] = handler

    def start(self) -> None:
        for receiver in self._receivers:
            start(receiver)
        start(Thread(target=self._watch, name="watch", daemon=True))
        for rank in self._senders:  # a thread each: a link may be full whose rank reads no more
            start(Thread(target=self._live, args=(rank,), name=f"alive-{rank}", daemon=True))

    # -- saying and hearing --------------------------------------------------------------------------------------------

    def tell(self, rank: int, kind: Kind, value: Any = None) -> None:
        """PpsdError for a value that is too long."""
        raw = json.dumps([kind, value]).encode()
        if len(raw) > MOST_BYTES:
            raise PpsdError(f"over ranks a {kind.name.lower()} has at most {MOST_BYTES:,} characters")
        message = np.zeros(1 - len(raw) // -4, np.int32)
        message[0] = len(raw)
        message[1:].view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
        sender = self._senders[rank]
        with sender.lock:
            sender.buffer()  # what left from this place before is gone
            sender.send_long(message)

    def next(self, rank: int, kind: Kind) -> Any:
        """The value of the next message of this kind from that rank. PpsdError, if the ranks end meanwhile."""
        return self.wait(self._said[rank, kind])

    def wait(self, queue: SimpleQueue[T]) -> T:
        while True:
            with suppress(Empty):
                return queue.get(timeout=0.1)
            self.check()

    def ask(self, rank: int, kind: Kind, value: Any = None) -> Any:
        self.tell(rank, kind, value)
        return self.next(rank, kind)

    # -- failing -------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        if self.failure is not None:
            raise PpsdError(self.failure)

    def fail(self, line: str, share: bool = True) -> None:
        """The first line counts. share: the other ranks are to end with it too, and are told before this one ends."""
        with self._lock:
            if self._line is not None or self.stopping.is_set():
                return
            self._line = line
        if share:
            telling = [
                Thread(target=self._last_words, args=(rank, Kind.FAIL, line), daemon=True) for rank in self._senders
            ]
            for thread in telling:
                start(thread)
            for thread in telling:  # one that reads no more may have filled its link: then nothing leaves
                thread.join(_LAST_WORDS)
        self.failure = line
        self.failed.set()

    def _last_words(self, rank: int, kind: Kind, line: str | None = None) -> None:
        """Waits until they have left this process."""
        with suppress(RuntimeError):  # its connection is gone: nobody is left there to be told
            self.tell(rank, kind, line)
            with self._senders[rank].lock:
                self._senders[rank].flush(_LAST_WORDS)

    def fail_later(self, line: str, seconds: float = GRACE) -> None:
        """Fails with this line, if nothing better is known by then."""
        timer = Timer(seconds, self.fail, (line,))
        timer.daemon = True
        timer.start()

    def told_to_end(self) -> None:
        """SIGTERM has come, as torchrun's agent tells those that are left."""
        self.fail_later(f"rank {self.world.rank} was told to end (SIGTERM)", _TOLD)

    def lost(self, rank: int, error: Exception) -> None:
        """A link from `rank` has ended."""
        if self.stopping.is_set():
            self._said[rank, Kind.BYE].put(None)
        elif isinstance(error, ProtocolError):
            self.fail(f"rank {self.world.rank} got what it did not expect from rank {rank}: {error}")
        elif self.world.drafts or rank == 0:
            self.fail(f"rank {rank} has died: its connection closed")
        else:  # a neighbour's: it may have been told to end, and rank 0 knows
            self.fail_later(f"rank {rank} has died: its connection closed")

    def stop(self) -> None:
        """Rank 0: all is well, and all may go. Returns when they have heard it, or have gone, or after `_BYES`."""
        if self.failure is None:
            self.stopping.set()
            for rank in self._senders:
                try:
                    self.tell(rank, Kind.STOP)
                except RuntimeError as error:  # its connection
                    self.lost(rank, error)
            for rank in self._senders:
                with suppress(Empty):
                    self._said[rank, Kind.BYE].get(timeout=_BYES)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _take(self, peer: int) -> Callable[[Words], None]:
        def take(message: Words) -> None:
            self._heard[peer] = self._clock.now()
            count = int(message[0])
            try:
                number, value = json.loads(message[1 : 1 - count // -4].tobytes()[:count])
                kind = Kind(number)
            except (ValueError, TypeError, RecursionError):
                raise ValueError("no message of this version") from None
            if kind is Kind.FAIL:
                line = printable(str(value)) if value else f"rank {peer} has failed and does not say why"
                self.fail(line, share=self.world.drafts)
            elif kind is Kind.STOP:
                self.stopping.set()
                self._last_words(peer, Kind.BYE)
                self.failed.set()
            else:
                self._handlers.get(kind, self._said[peer, kind].put)(value)

        return take

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
                if self.busy() < _STUCK:
                    self.tell(rank, Kind.BEAT)
            except RuntimeError as error:  # its connection
                self.lost(rank, error)
