"""gloo, used as links.py relies on it: two threads with a process group each, in one process."""

import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from serve_support import HANG

from ppsd_rt.ranks.control import Control, Kind
from ppsd_rt.ranks.links import LinkLost, Receiver, Sender
from ppsd_rt.ranks.stage import _explain
from ppsd_rt.ranks.world import World


@pytest.fixture
def groups():
    """Groups of ranks 0 and 1."""
    store = dist.HashStore()
    made = {}

    def make(rank):
        made[rank] = dist.ProcessGroupGloo(dist.PrefixStore("links", store), rank, 2)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def test_messages_shorter_than_their_buffers_arrive_in_order(groups):
    got, done = [], threading.Event()

    def handle(message):
        got.append(message[: message[0]].copy())
        if len(got) == 100:
            done.set()

    Receiver(groups[1], 0, 7, 64, 4, handle, lambda *_: done.set()).start()
    sender = Sender(groups[0], 1, 7, 64, count=3)
    sent = []
    for number in range(50):
        for count in (1 + number % 64, 64 - number % 60):
            message = sender.buffer()
            message[:count] = np.arange(count) + number
            message[0] = count
            sent.append(message[:count].copy())
            sender.send(count)
    done.wait()
    assert all(np.array_equal(a, b) for a, b in zip(got, sent, strict=True))


def test_texts_of_any_length_arrive_whole_and_in_order(groups):
    """Of the control links: a grammar may be long."""
    got = queue.SimpleQueue()
    texts = ["é" * length for length in (1, 100, 113, 50_000, 7, 400_000, 1)]
    worlds = [World(rank, 2, rank, 2) for rank in range(2)]
    ends = [Control(groups[world.rank], world, 60.0) for world in worlds]
    ends[1].on(Kind.GRAMMAR, got.put)
    for receiver in ends[1]._receivers:
        receiver.start()
    for text in texts:
        ends[0].tell(1, Kind.GRAMMAR, text)
    assert [got.get(timeout=HANG) for _ in texts] == texts


def test_a_handler_that_refuses_ends_the_receiver(groups):
    lost, done = [], threading.Event()

    def handle(message):
        raise ValueError("not that")

    def ended(peer, error):
        lost.append((peer, str(error)))
        done.set()

    Receiver(groups[1], 0, 8, 8, 2, handle, ended).start()
    sender = Sender(groups[0], 1, 8, 8)
    sender.buffer()[:] = 1
    sender.send(8)
    done.wait()
    assert lost == [(0, "not that")]


def test_what_gloo_cannot_send_is_a_lost_link():
    class Group:
        def send(self, *_):
            raise RuntimeError("whatever it says")

    sender = Sender(Group(), 1, 7, 8)
    with pytest.raises(LinkLost):
        sender.send(8)


@pytest.mark.parametrize(
    ("error", "lost"), [(LinkLost("whatever it says"), True), (RuntimeError("no Connection, says gloo"), False)]
)
def test_a_rank_tells_a_lost_link_from_its_own_failure(error, lost):
    told = []
    control = SimpleNamespace(
        world=SimpleNamespace(rank=1),
        fail=lambda line: told.append("own"),
        lost=lambda rank, error: told.append("lost"),
    )
    _explain(control, 2, error)
    assert told == ["lost" if lost else "own"]
