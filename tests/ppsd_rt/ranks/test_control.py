"""The control links' limits, by a clock that the tests set; ranks are in one process, and nothing is sent anywhere."""

import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from rank_support import Clock

from ppsd_rt import PpsdError
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
        return Control(group, World(number, size, number, size), SILENCE, Clock()), group

    return rank


def said(group):
    """(rank, kind, value) of every message that was sent."""
    texts = [(peer, message[1:].tobytes()[: message[0]]) for peer, message in group.sent]
    return [(peer, *json.loads(text)) for peer, text in texts]


def hear(control, peer, kind, value=None):
    text = json.dumps([kind, value]).encode()
    control._take(peer)(np.frombuffer(len(text).to_bytes(4, "little") + text + b" " * (-len(text) % 4), np.int32))


def test_values_arrive_with_those_who_wait(rank):
    here, group = rank()
    here.tell(1, Kind.READY, {"é": [0.5, None]})
    assert said(group) == [(1, Kind.READY, {"é": [0.5, None]})]
    for peer, value in ((2, 5), (1, [7]), (1, 8)):
        hear(here, peer, Kind.READY, value)
    assert [here.next(1, Kind.READY), here.next(1, Kind.READY), here.next(2, Kind.READY)] == [[7], 8, 5]
    heard = []
    here.on(Kind.READY, heard.append)
    hear(here, 1, Kind.READY, 9)
    assert heard == [9]
    with pytest.raises(PpsdError, match="over ranks a grammar has at most"):
        here.tell(1, Kind.GRAMMAR, "x" * control.MOST_BYTES)
    here.fail("all is lost")
    with pytest.raises(PpsdError, match="all is lost"):
        here.next(1, Kind.READY)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"[99, 0]", b"7", b"\xff", b"[" * 20_000])
def test_what_is_no_message_is_refused(rank, text):
    words = np.frombuffer(len(text).to_bytes(4, "little") + text.ljust(20_000), np.int32)
    with pytest.raises(ValueError, match="no message of this version"):
        rank()[0]._take(1)(words)


def test_a_silent_rank_is_named_to_all(rank):
    here, group = rank()
    here._clock.then = lambda: hear(here, 2, Kind.BEAT)
    here._watch()
    assert here.failure == f"rank 1 has been silent for {SILENCE:g} s: it hangs, or its host is gone"
    assert here._clock.time == pytest.approx(SILENCE, abs=0.5)
    assert sorted(said(group)) == [(1, Kind.FAIL, here.failure), (2, Kind.FAIL, here.failure)]


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
    threading.Thread(target=here.tell, args=(1, Kind.READY), daemon=True).start()
    assert stuck.wait(60)  # a guard
    here._clock.then = lambda: hear(here, 2, Kind.BEAT)
    here._watch()
    assert here.failure == f"rank 1 has been silent for {SILENCE:g} s: it hangs, or its host is gone"
    assert [peer for peer, kind, _ in said(group) if kind == Kind.FAIL] == [2]


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
    beats = [peer for peer, kind, _ in said(group) if kind == Kind.BEAT]
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


def test_work_without_end_is_no_sign_of_life(rank):
    here, group = rank()
    seconds = iter([599.0, 601.0])
    here.busy = lambda: next(seconds)
    here._clock.then = lambda: here.stopping.set() if here._clock.time > 0.3 else None
    here._live(1)
    assert said(group) == [(1, Kind.BEAT, None)]


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
    assert said(group) == [(1, Kind.STOP, None), (2, Kind.STOP, None)]
