"""The policy of an answer alone, in made-up time: drafts lose little whatever they are worth, and pay if they can."""

import random
from statistics import mean

import numpy as np
import pytest

from ppsd_rt._native import testing
from ppsd_rt.pipeline import learned

FAST = {1: 5.0, 2: 5.2, 4: 5.5, 8: 6.2, 16: 8.6}  # milliseconds of a pass by its rows: int8 with VNNI
DEAR = {1: 6.6, 2: 7.7, 4: 11.6, 8: 21.0, 16: 38.2}  # int4 on AVX2
QUICK = {1: 3.6, 2: 3.95, 4: 4.7, 8: 6.8, 16: 9.5}  # int4 with VNNI
PARTS = {"early": 0.15, "late": 0.65, "choose": 0.2}  # of a pass
HEAD = 0.08  # of a pass, beside the early layers: a draft


def pass_of(table, rows):
    return float(np.interp(rows, [*table], [*table.values()]))


class World:
    """acceptance: by the tokens that have been written. slower: what passes over several rows take more, after half."""

    def __init__(self, table, acceptance, seed=0, noise=0.0, slower=1.0, overlaps=False, gain=1.0, prior=0.5):
        self.table, self.acceptance, self.noise, self.slower, self.gain = table, acceptance, noise, slower, gain
        self.random = random.Random(seed)
        self.alone = testing.Alone(0.3, prior, overlaps)
        self.drafts = self.overlapped = 0

    def takes(self, kind, share, rows, written, pace=1.0):
        dear = self.slower if written and rows > 1 else 1.0
        seconds = (
            1e-3 * share * pass_of(self.table, rows) * dear * pace * (1 + self.noise * self.random.expovariate(1.0))
        )
        self.alone.took(kind, rows, seconds)
        return seconds

    def answer(self, tokens):
        """-> seconds in all, over those of plain decoding"""
        self.alone.begin()
        seconds, written = 0.0, 0
        while written < tokens:
            plan = self.alone.plan()
            overlap = plan.overlap
            self.overlapped += overlap
            most = min(3 if overlap else plan.lookahead, tokens - written - 1)
            drafts, right, alive = 0, 0, 1.0
            chance = self.acceptance(written)
            while drafts < most and (drafts == 0 or overlap or alive >= plan.stop_rule.thresholds[drafts]):
                drafts += 1
                alive *= chance
            while right < drafts and self.random.random() < chance:
                right += 1
            late = 2 * written >= tokens
            pace = 1 / self.gain if overlap else 1.0
            seconds += sum(self.takes("draft", PARTS["early"] + HEAD, 1, late, pace) for _ in range(drafts))
            seconds += self.takes("early", PARTS["early"], 1, late, pace)
            seconds += self.takes("late", PARTS["late"], drafts + 1, late, pace)
            seconds += self.takes("choose", PARTS["choose"], drafts + 1, late, pace)
            self.alone.learn(drafts, right)
            self.drafts += drafts
            written += right + 1
        plain = sum(1e-3 * pass_of(self.table, 1) * (1 + self.noise) for _ in range(written))
        return seconds / plain


@pytest.mark.parametrize("table", [FAST, DEAR], ids=["fast", "dear"])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_a_head_that_is_always_wrong_costs_two_per_cent(table, noise):
    """Beginning with the first answer, whatever its file says of it."""
    for prior in (0.1, 0.9):
        world = World(table, lambda _: 0.0, noise=noise, prior=prior)
        taken = [world.answer(128) for _ in range(4)]
        assert mean(taken) <= 1.022
        assert max(taken) <= (1.03 if noise == 0.0 else 1.08), "and no answer much more"


def test_luck_with_the_clock_is_no_gain():
    """A plain round that was held up makes those with drafts look fast: a gain, while no draft was right."""
    worlds = [World(FAST, lambda _: 0.0, seed=seed, noise=0.3, prior=0.9) for seed in range(12)]
    assert max(world.answer(128) for world in worlds for _ in range(6)) <= 1.08


def test_answers_that_differ_each_get_their_drafts():
    """As prompts do: what the answer before was like says little of this one."""
    taken = []
    for seed in range(30):
        chances, world = random.Random(seed), World(QUICK, None, seed=seed, noise=0.3, prior=0.6)
        for _ in range(10):
            usual = min(max(chances.gauss(0.58, 0.16), 0.12), 0.92)
            drawn = [chances.betavariate(2.4 * usual, 2.4 * (1 - usual)) for _ in range(128)]
            world.acceptance = drawn.__getitem__
            taken.append(world.answer(128))
    assert mean(taken) <= 0.695


@pytest.mark.parametrize("slower", [1.5, 2.0])
@pytest.mark.parametrize("table", [FAST, DEAR], ids=["fast", "dear"])
def test_drafts_that_turn_wrong_or_dear_lose_little(table, slower):
    """In mid-answer the head stops being right, or passes over several rows take longer while a plain one does not."""
    turning = mean(World(table, lambda at: 0.8 if at < 64 else 0.0, seed=s).answer(128) for s in range(8))
    dearer = mean(World(table, lambda _: 0.5, seed=s, slower=slower).answer(128) for s in range(8))
    assert turning <= 1.0
    assert dearer <= 1.03


def test_good_drafts_make_it_faster_from_the_first_answer_on():
    world = World(FAST, lambda _: 0.8)
    assert world.answer(128) <= 0.75
    assert mean(world.answer(128) for _ in range(4)) <= 0.62
    shared = World(FAST, lambda _: 0.8, noise=0.3)
    assert mean(shared.answer(128) for _ in range(5)) <= 0.75


def test_a_head_that_becomes_good_is_found():
    world = World(FAST, lambda _: 0.0)
    world.answer(256)
    world.acceptance = lambda _: 0.9
    for _ in range(4):
        taken = world.answer(256)
    assert taken <= 0.65


@pytest.mark.parametrize("gain", [0.7, 1.5])
def test_overlapping_is_kept_where_it_is_faster(gain):
    """gain: how many times faster a round is while stages work side by side."""
    world = World(FAST, lambda _: 0.8, overlaps=True, gain=gain)
    for _ in range(12):
        world.answer(256)
    world.overlapped = 0
    for _ in range(4):
        world.answer(256)
    assert (world.overlapped > 100) == (gain > 1)
    assert "overlapped" in world.alone.explain()


def test_what_was_learned_is_what_the_next_process_begins_with(tmp_path, monkeypatch):
    """Its first answer drafts at once; numbers of another form are no matter."""
    world, path = World(FAST, lambda _: 0.8, prior=0.1), tmp_path / "learned" / "a.json"
    for _ in range(3):
        world.answer(128)
    learned.write(path, world.alone.learned())
    fresh, taught = World(FAST, lambda _: 0.8, prior=0.1), World(FAST, lambda _: 0.8, prior=0.1)
    taught.alone.know(learned.read(path))
    assert taught.answer(24) < fresh.answer(24)
    for damaged in (b"[1, 2", b"{}", b"[true]", b'["a"]', b"[1e999]"):
        path.write_bytes(damaged)
        assert learned.read(path) == []
    again = World(FAST, lambda _: 0.8)
    for numbers in ([1.0], [float("nan")] * len(world.alone.learned()), [-1.0] * len(world.alone.learned())):
        again.alone.know(numbers)
    assert again.answer(24) == World(FAST, lambda _: 0.8).answer(24)


def test_copies_are_as_many_as_the_account_pays():
    alone = testing.Alone(0.3, 0.0)
    alone.begin(copies=True)
    for _ in range(300):
        plan = alone.plan()
        for kind, share in PARTS.items():
            alone.took(kind, plan.max_chunk + 1, 1e-3 * share * pass_of(FAST, plan.max_chunk + 1))
        alone.learn(plan.max_chunk, plan.max_chunk, copied=plan.max_chunk)
    assert plan.max_chunk == 15
    assert plan.recycle
    assert plan.stop_rule.copy_thresholds[0] < 0.6


class Disturbed(World):
    """Another program holds up the first draft step."""

    steps = 0

    def takes(self, kind, share, rows, written, pace=1.0):
        self.steps += kind == "draft"
        return super().takes(kind, share, rows, written, 8.0 if kind == "draft" and self.steps == 1 else pace)


def test_one_draft_step_that_was_held_up_is_no_reason_to_stop():
    table = {1: 3.0, 2: 3.6, 4: 4.6, 8: 6.5, 16: 11.0}
    assert mean(Disturbed(table, lambda _: 0.65, seed=s).answer(128) for s in range(40)) <= 0.94
