"""How many members of a team work while other programs want their cores (csrc/cpu/team.h)."""

from itertools import pairwise

import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt._native import testing

PASS = 0.005  # seconds


def levels(size, room, lost=0.9, pinnable=True):
    return testing.worker_set(size, pinnable, PASS, lost, room)


def test_calm_teams_stay_whole_on_their_cores():
    assert set(levels(4, [4] * 200)) == {(4, True)}
    assert set(levels(1, [1] * 200)) == {(1, True)}
    assert set(levels(2, [2] * 200, pinnable=False)) == {(2, False)}


def test_a_little_waiting_is_borne():
    assert set(levels(2, [1] * 200, lost=0.3)) == {(2, True)}
    assert set(levels(8, [7] * 200, lost=0.1)) == {(8, True)}


def test_bursts_pass():
    """A server's answers to new requests: 40 ms of other work, four times a second."""
    assert set(levels(2, ([1] * 8 + [2] * 42) * 20)) == {(2, True)}


def test_crowded_teams_first_leave_their_cores_and_then_shrink():
    assert list(dict.fromkeys(levels(3, [1] * 60))) == [(3, True), (3, False), (2, False), (1, False)]
    assert list(dict.fromkeys(levels(8, [6] * 240, lost=0.3))) == [(8, True), (8, False), (7, False), (6, False)]
    assert list(dict.fromkeys(levels(2, [1] * 60, pinnable=False))) == [(2, False), (1, False)]


def test_members_come_back_when_it_is_calm():
    back = levels(3, [1] * 60 + [3] * 200)[60:]
    assert list(dict.fromkeys(back)) == [(1, False), (2, False), (3, False), (3, True)]
    assert back[-1] == (3, True)


def test_what_has_proven_itself_is_not_on_trial_any_more():
    """After ten seconds of neighbours, one who comes by for a moment does not send anybody away."""
    after = levels(2, [1] * 2000 + [2] * 800 + ([1] * 8 + [2] * 42) * 4)
    assert set(after[-200:]) == {(2, True)}


def test_trying_in_vain_gets_rarer():
    active = [active for active, _ in levels(2, [1] * 4000)]  # 20 s
    tries = [number for number, (before, now) in enumerate(pairwise(active)) if now > before]
    pauses = [(after - before) * PASS for before, after in pairwise(tries)]
    assert pauses == sorted(pauses) and pauses[0] < 0.3 and 2.5 < pauses[-1] < 3.5
    assert active.count(2) < 0.05 * len(active)


@pytest.mark.parametrize(("schedule", "dtype"), [("plain", "int4"), ("eesd", "int8"), ("elastic", "int8")])
def test_neighbours_do_not_change_the_answer(tmp_path, schedule, dtype):
    """Members leave and come back in the middle of it; `elastic`'s teams are apart: one drafts, two verify."""
    model = write_model(tmp_path)
    engine = Engine.from_pretrained(model, exit_head="norm:2", backend="cpu", dtype=dtype, threads=3)

    def answer(name):
        return engine.generate(list(range(3, 40)), SamplingParams(max_tokens=160, ignore_eos=True), name).run().ids

    loop = engine.backend._answers.loop
    calm = testing.crowd(loop, PASS, 0.9, [3])
    alone = answer("plain")
    assert set(calm.worked) == {3}
    crowd = testing.crowd(loop, PASS, 0.9, [1] * 40 + [3] * 40)
    assert answer(schedule) == alone
    assert set(crowd.worked) == {1, 2, 3}
    assert all(crowd.worked[members] > 10 for members in ((1, 2) if schedule == "elastic" else (1, 2, 3)))
