"""Ctrl-C (SIGINT), SIGTERM and SIGHUP: all three end a command in the same way, keeping what it has by then.

The first one raises KeyboardInterrupt in the main thread; until the process is gone the others are ignored, so that
they cannot cut off what is being saved.
"""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A type of its own, for Python keeps in mind that a KeyboardInterrupt has left code that `exec` ran (a dataclass
    being made, say), and at its end kills the process with SIGINT, although it was caught."""


_received: signal.Signals | None = None


def listen() -> None:
    """Signals of this process mean this from now on. One that it was started with ignored (`nohup`) stays ignored."""
    global _received
    _received = None
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _handle)
    sys.unraisablehook = _not_raised


def close() -> None:
    """Signals raise nothing from here on. They are ignored rather than handled: Python's way out gives handled ones
    their default effect back, which is the death of a process that had ended well."""
    for number in _ENDING:
        if signal.getsignal(number) == _handle:
            signal.signal(number, signal.SIG_IGN)


def status(otherwise: int = 128 + signal.SIGINT) -> int:
    """The exit status of a command that was interrupted, as shells count; `otherwise` where no signal has come."""
    return otherwise if _received is None else 128 + _received


def said() -> str:
    """What a note says of it."""
    return "interrupted" if _received in (None, signal.SIGINT) else f"interrupted by {_received.name}"


def resume() -> bool:
    """After a KeyboardInterrupt: may the command go on to something else, as a conversation does after Ctrl-C?"""
    global _received
    if _received == signal.SIGINT:
        _received = None
    return _received is None


def _handle(number: int, frame: FrameType | None) -> None:
    global _received
    if _received is None:
        _received = signal.Signals(number)
        raise Interrupted


def _not_raised(lost: Any) -> None:
    """A signal that arrived in a destructor, where nothing can be raised, is sent once more."""
    global _received
    if _received is None or not issubclass(lost.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    number, _received = _received, None
    threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
