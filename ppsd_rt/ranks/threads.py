"""Threads of ranks: started where the system may start no more of them, and by which clock they wait."""

import time
from threading import Thread

from ..errors import PpsdError


def start(thread: Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread"
        raise PpsdError(
            f"the system starts no more threads ({error}): lower --threads, or raise its limits (ulimit -u, ulimit -v)"
        ) from None


class Clock:
    """Seconds of a clock that never goes back, and waiting for some of them; tests have one that they set."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


CLOCK = Clock()
