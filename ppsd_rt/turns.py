"""Whose turn it is on a backend that decodes one answer at a time: first come, first served."""

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

_local = threading.local()


def _this_thread() -> object:
    """The same in one thread alone: numbers of threads are given again when these have ended."""
    if not hasattr(_local, "thread"):
        _local.thread = object()
    return _local.thread


class Turn:
    """An answer's place in the queue.

    thread: that iterated last. ended: another answer of that thread has taken the place.
    """

    def __init__(self) -> None:
        self.thread: object = None
        self.ended = False
        self._woken: SimpleQueue[None] = SimpleQueue()  # its `put` may interrupt itself: signals, garbage collection

    def wake(self) -> None:
        self._woken.put(None)

    def wait(self) -> None:
        self._woken.get()

    def go_on(self) -> None:
        """Called by the thread that asks for the next event."""
        self.thread = _this_thread()


class Turns:
    """The queue. The answer at its head is decoded, the others wait, each in the thread that asks for its first event.

    A thread that leaves an answer half-iterated and begins another one would wait for itself: the first is ended.
    """

    def __init__(self, concurrency: int) -> None:
        """Of a backend that decodes several at once, which has a queue of its own, nobody waits here."""
        self._waits = concurrency == 1
        self._queue: deque[Turn] = deque()  # its methods are atomic, so there is no lock that a signal could find taken

    def take(self, turn: Turn, cancelled: Callable[[], bool]) -> None:
        """Returns when it is this one's turn, or when it has been woken after it was cancelled."""
        if not self._waits:
            return
        self._end_own(turn.thread)
        self._queue.append(turn)
        while self._queue[0] is not turn and not cancelled():
            turn.wait()

    def give(self, turn: Turn) -> None:
        """The turn, or the place in the queue, is free; harmless where there is none."""
        try:
            self._queue.remove(turn)
            self._queue[0].wake()
        except (ValueError, IndexError):
            pass

    def forked(self) -> None:
        """The answers that waited are those of another process."""
        self._queue = deque()

    def _end_own(self, thread: object) -> None:
        try:
            first = self._queue[0]
        except IndexError:
            return
        if first.thread is thread:
            first.ended = True
            self.give(first)
