"""The control links' limits, by a clock that the tests set; ranks are in one process, and nothing is sent anywhere."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from rank_support import Clock

from ppsd_rt.ranks import control
from ppsd_rt.ranks.control import Control, Kind
from ppsd_rt.ranks.world import World

SILENCE = 4.0


class Group:
    """What is sent is kept; nothing comes."""

    def __init__(self):
        self.sent = []

    def send(self, tensors, peer, tag):
        self.sent.append((peer, tensors[0].numpy().copy()))
        return SimpleNamespace(wait=lambda *_: None)

    def recv(self, tensors, peer, tag):
        return SimpleNamespace(wait=threading.Event().wait)


@pytest.fixture
def rank():
    """rank(number, size): its control link and its group; its clock is control._clock."""

    def rank(number=0, size=3):
        group = Group()
        return Control(group, World(number, size, number, size), SILENCE, 0.0, Clock()), group

    return rank


def hear(control, peer, kind, value=0):
    message = np.zeros(control_words, np.int32)
    message[:2] = control_magic, kind
    message[2:4].view(np.int64)[0] = value
    control._take(peer)(message)


control_words, control_magic = control.WORDS, control._MAGIC


def test_numbers_arrive(rank):
    here, group = rank()
    here.tell(1, Kind.PING, payload=(0.5, 2.0))
    assert [(peer, control.numbers_of(message)) for peer, message in group.sent] == [(1, [0.5, 2.0])]


def test_a_silent_rank_is_named_to_all(rank):
    here, group = rank()
    here._clock.then = lambda: hear(here, 2, Kind.BEAT)
    here._watch()
    assert here.failure == f"rank 1 has been silent for {SILENCE:g} s: it hangs, or its host is gone"
    assert here._clock.time == pytest.approx(SILENCE, abs=0.5)
    told = {peer: control.text_of(message) for peer, message in group.sent if message[1] == Kind.FAIL}
    assert told == {1: here.failure, 2: here.failure}


def test_a_rank_that_reads_no_more_is_named_although_its_link_is_full(rank, monkeypatch):
    """What is sent to it never leaves, so whoever sends waits: but not who watches."""
    monkeypatch.setattr(control, "_LAST_WORDS", 0.01)
    here, group = rank()
    send, stuck = group.send, threading.Event()

    def full(tensors, peer, tag):
        if peer == 1:
            stuck.set()
            threading.Event().wait()
        return send(tensors, peer, tag)

    group.send = full
    threading.Thread(target=here.tell, args=(1, Kind.PING), daemon=True).start()
    assert stuck.wait(60)  # a guard
    here._clock.then = lambda: hear(here, 2, Kind.BEAT)
    here._watch()
    assert here.failure == f"rank 1 has been silent for {SILENCE:g} s: it hangs, or its host is gone"
    assert [peer for peer, message in group.sent if message[1] == Kind.FAIL] == [2]


def test_signs_of_life_keep_all_going(rank):
    here, group = rank()

    def live():
        for peer in (1, 2):
            hear(here, peer, Kind.BEAT)
        if here._clock.time > 100 * SILENCE:
            here.stopping.set()

    here._clock.then = live
    here._watch()
    assert here.failure is None
    for peer in (1, 2):
        here._clock.time = 0.0
        here.stopping.clear()
        here._live(peer)
    beats = [peer for peer, message in group.sent if message[1] == Kind.BEAT]
    assert beats.count(1) == beats.count(2) > 100 * SILENCE


def test_a_process_that_was_held_up_accuses_nobody(rank):
    here, _ = rank()
    jumps = iter([0.0, 1000.0])

    def jump():
        if (seconds := next(jumps, None)) is None:
            here.stopping.set()
        else:
            here._clock.time += seconds

    here._clock.then = jump
    here._watch()
    assert here.failure is None


def test_work_without_end_is_named(rank):
    here, _ = rank()
    hear(here, 1, Kind.BEAT, 599_000)
    assert here.failure is None
    hear(here, 1, Kind.BEAT, 601_000)
    assert here.failure == "rank 1 hangs: it has worked on one pass for 601 s"


def test_a_closed_connection_ends_all_at_once(rank):
    here, _ = rank()
    here.lost(2, RuntimeError("Connection closed by peer"))
    assert here.failure == "rank 2 has died: its connection closed"


def test_a_neighbour_s_closed_connection_leaves_rank_0_the_word(rank, monkeypatch):
    waited = []
    monkeypatch.setattr(
        control, "Timer", lambda seconds, *_: waited.append(seconds) or SimpleNamespace(start=lambda: None)
    )
    here, _ = rank(2)
    here.lost(1, RuntimeError("Connection closed by peer"))
    assert (here.failure, waited) == (None, [control.GRACE])


def test_the_end_waits_for_all_to_hear_or_to_be_gone(rank):
    here, group = rank()
    ending = threading.Thread(target=here.stop)
    ending.start()
    here.stopping.wait()
    hear(here, 1, Kind.BYE)
    assert ending.is_alive()
    here.lost(2, RuntimeError("Connection closed by peer"))
    ending.join()
    assert here.failure is None
    assert [peer for peer, message in group.sent if message[1] == Kind.STOP] == [1, 2]
