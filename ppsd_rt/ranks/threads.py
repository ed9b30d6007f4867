"""Python's threads, where the system may start no more of them."""

from threading import Thread

from ..errors import PpsdError


def start(thread: Thread) -> None:
    try:
        thread.start()
    except RuntimeError as error:  # "can't start new thread"
        raise PpsdError(
            f"the system starts no more threads ({error}): lower --threads, or raise its limits (ulimit -u, ulimit -v)"
        ) from None
