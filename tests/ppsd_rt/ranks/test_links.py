"""gloo, used as links.py relies on it: two threads with a process group each, in one process."""

import threading

import numpy as np
import pytest
import torch.distributed as dist

from ppsd_rt.ranks.links import Receiver, Sender


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
    sender = Sender(groups[0], 1, 7, 64, messages=2, groups=3)
    sent = []
    for number in range(50):
        out = sender.buffers()
        counts = [1 + number % 64, 64 - number % 60]
        for message, count in zip(out, counts, strict=True):
            message[:count] = np.arange(count) + number
            message[0] = count
            sent.append(message[:count].copy())
        sender.send(counts)
    done.wait()
    assert all(np.array_equal(a, b) for a, b in zip(got, sent, strict=True))


def test_a_handler_that_refuses_ends_the_receiver(groups):
    lost, done = [], threading.Event()

    def handle(message):
        raise ValueError("not that")

    def ended(peer, error):
        lost.append((peer, str(error)))
        done.set()

    Receiver(groups[1], 0, 8, 8, 2, handle, ended).start()
    sender = Sender(groups[0], 1, 8, 8)
    sender.buffers()[0][:] = 1
    sender.send([8])
    done.wait()
    assert lost == [(0, "not that")]
