"""The threads of rank 0's backend, without ranks."""

import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest

from ppsd_rt.errors import PpsdError
from ppsd_rt.ranks.backend import RanksBackend, _Alone


class End(BaseException):
    """Of the thread that drafts, which otherwise goes on with the process."""


class Control:
    def __init__(self):
        self.said = []

    def fail(self, line):
        self.said.append(line)

    def lost(self, rank, error):
        self.said.append(f"rank {rank} has died")


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (PpsdError("the GPU is out of memory"), "rank 0: the GPU is out of memory"),
        (RuntimeError("Connection closed by peer"), "rank 1 has died"),
    ],
    ids=["its own stage", "a connection"],
)
def test_what_ends_drafting_is_said(error, first):
    def work(out):
        raise error

    backend = object.__new__(RanksBackend)
    backend._control, done = Control(), threading.Event()
    backend._drafter = SimpleNamespace(pin=lambda: None)
    backend._sender = SimpleNamespace(buffers=lambda: None)
    items = [(SimpleNamespace(work=work), done)]

    def get():
        if not items:
            raise End
        return items.pop()

    backend._answers_to_draft = SimpleNamespace(get=get)

    def draft():
        with suppress(End):
            backend._draft()

    thread = threading.Thread(target=draft)
    thread.start()
    thread.join()
    assert done.is_set(), "whoever waits for the answer's end waits for ever"
    assert backend._control.said[0] == first


def test_the_thread_that_drafts_does_not_wait_for_itself():
    """Garbage collection may find an answer in any thread, this one among them."""
    backend, cancelled = object.__new__(RanksBackend), []
    backend._drafting, backend._ending = threading.current_thread(), threading.RLock()
    backend._active = SimpleNamespace(cancel=lambda: cancelled.append(True)), threading.Event()
    backend._wait = lambda *_, **__: pytest.fail("waits for its own end")
    backend._end()
    assert cancelled == [True]
    assert backend._active is not None  # whoever begins the next answer waits


def test_what_an_answer_took_alone_is_known_once_it_has_stopped():
    """The loop goes on counting from there."""
    backend = SimpleNamespace(_end=lambda active: None)
    alone = _Alone(backend, (SimpleNamespace(tokens=[]), threading.Event()), [1, 2], SimpleNamespace(asked=False), 0)
    assert alone.seconds == 0.0
    assert alone.text == [1, 2], "nothing is committed yet"
    alone.stop()
    seconds = alone.seconds
    assert seconds > 0.0
    alone.close()
    assert alone.seconds == seconds
