"""`auto`: its predictions, what it makes of what it sees, and that it changes no token."""

import json
from dataclasses import replace

import pytest
from planner_support import DRAFT, MORE, ONE, ROW, World, best_fixed, costs, planner

from ppsd_rt import Engine, SamplingParams, _native
from ppsd_rt._native import Costs, StageCosts, testing
from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.pipeline.schedule import MAX_CHUNK, Auto
from ppsd_rt.planning import planner as planning


def earned(plan: _native.Planner, seconds: float = ROW + ONE) -> _native.Planner:
    """A plain round, which says nothing of the head, has committed so much that any round of drafts can be paid."""
    testing.after(plan, 20, 0, 0, seconds)
    return plan


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 1.0])
def test_predictions_are_the_closed_forms(acceptance):
    plan = planner(costs())
    assert testing.predict(plan, "plain", 0, acceptance) == pytest.approx(1 / (ROW + ONE))
    for length in range(1, MAX_CHUNK + 1):
        tokens = sum(acceptance**k for k in range(length + 1))
        seconds = length * DRAFT + ROW + ONE + MORE * length
        assert testing.predict(plan, "turns", length, acceptance) == pytest.approx(tokens / seconds)


def test_what_the_cache_holds_is_foreseen():
    """The first draft of a round reads its weights from memory; where nothing is drafted, a pass finds more."""
    c = costs()
    c = Costs(c.turns.replace(first_draft=2.5 * DRAFT, plain=0.9 * (ROW + ONE)), c.overlapped)
    plan = planner(c)
    assert testing.predict(plan, "plain", 0, 0.5) == pytest.approx(1 / (0.9 * (ROW + ONE)))
    for length in (1, 2, 6):
        tokens = sum(0.5**k for k in range(length + 1))
        seconds = (length + 1.5) * DRAFT + ROW + ONE + MORE * length
        assert testing.predict(plan, "turns", length, 0.5) == pytest.approx(tokens / seconds)
        assert c.turns.round(length) == pytest.approx(seconds)
    assert c.plain_seconds == pytest.approx(0.9 * (ROW + ONE))
    # A further draft costs what it costs in the cache: the first one's price does not end the drafting.
    dear = Costs(c.turns.replace(draft_step=2.5 * DRAFT), c.overlapped)
    thresholds = [testing.schedule(earned(_native.Planner(costs, 0.8))).stop_rule.threshold for costs in (c, dear)]
    assert thresholds[0] < thresholds[1]


DEEPER = 0.2e-6  # seconds that a position of the text adds to each row of a pass


def deep_costs(overlapped: bool = False) -> Costs:
    """Attention costs by the row: after 8000 positions a further row costs 1.7 ms, and not 0.1."""
    c = costs(overlapped=overlapped)
    deeper = {"step_deeper": 0.1 * DEEPER, "verify_deeper": tuple(DEEPER * n for n in range(1, 17))}
    beside = c.overlapped.replace(**deeper) if c.overlapped else None
    return Costs(c.turns.replace(**deeper), beside)


@pytest.mark.parametrize("context", [128, 1000, 8000])
def test_a_longer_text_makes_rows_dearer(context):
    plan, more = planner(deep_costs()), context - 128
    testing.begin(plan, context)
    assert testing.predict(plan, "plain", 0, 0.5) == pytest.approx(1 / (ROW + ONE + 1.1 * DEEPER * more))
    for length in (1, 2, 6):
        tokens = sum(0.5**k for k in range(length + 1))
        steps = length * DRAFT + ROW + (length + 1) * 0.1 * DEEPER * more
        seconds = steps + ONE + MORE * length + (length + 1) * DEEPER * more
        assert testing.predict(plan, "turns", length, 0.5) == pytest.approx(tokens / seconds)


def test_far_into_a_text_less_is_drafted_and_copied():
    plan = earned(_native.Planner(deep_costs(), 0.55, lookup=3, siblings=True))
    before = testing.schedule(plan)
    assert before.drafts
    for _ in range(5):  # as the text grows; what rounds take is no news
        testing.after(plan, 2, 2, 1, 1.0, position=8000)
    later, copies = testing.schedule(plan), before.stop_rule.copy_threshold
    assert later.stop_rule.copy_threshold > 3 * copies
    dearer = later.stop_rule.threshold > before.stop_rule.threshold and later.siblings > before.siblings
    assert dearer or not later.drafts
    testing.begin(plan, 128)  # another answer
    assert testing.schedule(plan).stop_rule.copy_threshold == pytest.approx(copies, rel=0.5)


def test_a_first_draft_need_not_pay_for_a_sibling():
    """There is 0.32 of a plain step: enough for a draft and its row (0.24), but not for a sibling's row too (0.40)."""
    c = costs(0.45e-3)
    verify = (ONE, ONE + 0.24 * (ROW + ONE) - 0.45e-3, ONE + 0.4 * (ROW + ONE) - 0.45e-3)
    c = Costs(c.turns.replace(verify=verify + verify[-1:] * 13), c.overlapped)
    plan = _native.Planner(c, 0.8, siblings=True)
    assert not testing.schedule(plan).drafts  # before there is anything to compare with
    testing.after(plan, 1, 0, 0, ROW + ONE)
    assert testing.schedule(plan).drafts == 1


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_rounds_that_take_what_was_foreseen_leave_the_pace_alone(drafts):
    c = costs()
    c = Costs(c.turns.replace(first_draft=2.5 * DRAFT, plain=0.9 * (ROW + ONE)), c.overlapped)
    plan = earned(planner(c, 0.6), c.plain_seconds) if drafts else planner(c)
    assert testing.schedule(plan).drafts == bool(drafts)
    seconds = c.turns.round(drafts) if drafts else c.plain_seconds
    for _ in range(4 if drafts else 1):  # after its first round it tries the head
        testing.after(plan, drafts + 1, drafts, drafts, seconds)
    measured = plan.measured()["turns" if drafts else "plain"]
    assert measured.seconds == pytest.approx(measured.predicted_seconds)


def test_a_head_that_becomes_good_is_noticed_and_one_that_becomes_bad_too():
    c = costs()
    world = World(planner(c), c, 0.02)
    world.decode(500)
    world.acceptance = 0.9
    world.decode(300)  # noticed meanwhile
    assert world.decode(500) > 0.85 * best_fixed(c, 0.9)
    world.acceptance = 0.0
    world.decode(150)
    before = world.plain_rounds
    world.decode(300)
    assert world.plain_rounds - before > 280


def test_costs_that_were_measured_wrong_are_found_out():
    """Drafting costs four times what the calibration says, and does not pay."""
    believed, real = costs(0.2e-3), costs(3e-3)
    world = World(planner(believed, prior=0.5), real, 0.5)
    world.decode(1500)
    assert world.decode(1000) > 0.95 / (1.01 * real.plain_seconds)


@pytest.mark.parametrize("others", [1.0, 2.0])
def test_overlapping_that_does_not_pay_is_left(others):
    """Turns were measured while they had half of the cores (or all is twice as slow now): overlapping seems best."""
    real = costs(overlapped=True, slow=1.8)
    turns = real.turns
    crowded = StageCosts(2 * turns.row_step, 2 * turns.draft_step, tuple(2 * s for s in turns.verify))
    plan = planner(Costs(crowded, real.overlapped), prior=0.6)
    world = World(plan, real, 0.6)
    world.pace = others
    world.decode(1000)
    assert world.overlapped > 0
    began, before = world.seconds, world.overlapped
    assert world.decode(1500) > 0.93 * best_fixed(real, 0.6) / (1.01 * others)
    assert world.overlapped - before < 0.1 * (world.seconds - began)


def test_overlapping_that_pays_is_kept():
    real = costs(overlapped=True, slow=1.0)
    world = World(planner(real), real, 0.8)
    overlap = testing.predict(planner(real), "overlap", 0, 0.8)
    assert overlap > 1.1 * best_fixed(real, 0.8)
    assert world.decode(300) > 0.95 * best_fixed(real, 0.8)
    assert world.decode(2000) > 0.95 * overlap


# -- with an engine ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path))
    return tmp_path / "calibration"


def load(folder, threads=2):
    return Engine.from_pretrained(folder, exit_head="norm:2", dtype="float32", threads=threads)


FREE = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.mark.parametrize("which", ["measured", "overlap is best", "drafting is free", "drafting is dear"])
def test_auto_gives_the_plain_answer(folder, cache, monkeypatch, which):
    """Whatever the planner believes; where overlapping seems best, carriers change in the middle of the answer."""
    believed = {
        "overlap is best": costs(overlapped=True, slow=0.3),
        "drafting is free": costs(1e-9),
        "drafting is dear": costs(1.0),
    }
    params = replace(FREE, temperature=0.9, seed=3)
    if which in believed:
        monkeypatch.setattr(_native.Engine, "calibrate", lambda _, **options: believed[which])
    engine = load(folder)
    ids = engine.encode("Hello, world")
    plain = engine.generate(ids, params, "plain").run()
    # A toy's answers repeat themselves, and what was counted in them costs nothing to draft.
    schedule = Auto(recycle=which != "drafting is dear")
    for acceptance in (None, 0.9, 0.0):
        oracle = None if acceptance is None else Oracle((*ids, *plain.ids), acceptance)
        for _ in range(3):
            completion = engine.generate(ids, params, schedule, RunOptions(oracle=oracle)).run()
            assert completion.ids == plain.ids
        measured = engine.backend._planners.used.measured()
        assert completion.statistics.tokens == 200
        if which == "overlap is best" and acceptance == 0.9:
            assert measured["overlap"].rounds > 0
        if which == "drafting is dear" and acceptance is None:
            assert measured["plain"].rounds > 500


def test_costs_are_measured_in_the_first_runs_and_kept(folder, cache, monkeypatch):
    first, calls = costs(overlapped=True), []
    monkeypatch.setattr(_native.Engine, "calibrate", lambda engine, **options: calls.append(engine) or first)
    monkeypatch.setattr("time.time", lambda: 1e9)
    for measured in (1, 2, 3, 3):
        engine = load(folder)
        for _ in range(2):
            assert engine.backend.costs().turns.verify == pytest.approx(first.turns.verify)
            assert len(calls) == measured
    (file,) = cache.iterdir()
    assert engine.backend.costs(again=True) == first
    assert len(calls) == 4
    assert len(json.loads(file.read_text())) == planning.MOMENTS
    file.write_text('[{"turns": ')
    assert load(folder).backend.costs().turns.verify == pytest.approx(first.turns.verify)
    assert len(calls) == 5


def test_a_crowded_moment_counts_until_there_is_a_calmer_one(tmp_path, monkeypatch):
    """On fewer threads than later, turns cost what one of them takes, and overlapping seems to pay."""
    calm = costs(overlapped=True)
    crowded = Costs(calm.overlapped, calm.turns, True)
    hour, measured = 3600.0, []

    def goes_by(now, at):
        monkeypatch.setattr("time.time", lambda: at)
        found = planning.costs_here(tmp_path / "costs", lambda: measured.append(at) or now)
        expected = crowded if found.crowded else calm
        assert found.turns.verify == pytest.approx(expected.turns.verify)
        assert (found.overlapped is None) == found.crowded  # which does not say what overlapping brings
        return expected

    for at in (0.0, 1.0, 2.0):
        assert goes_by(crowded, at) is crowded  # there is nothing else
    assert goes_by(calm, 3.0) is crowded and len(measured) == 3  # it has looked often enough for now
    assert goes_by(crowded, hour) is crowded
    assert goes_by(calm, hour + 60) is crowded and len(measured) == 4  # each time it waits longer
    assert goes_by(calm, 2 * hour) is calm
    assert goes_by(crowded, 3 * hour) is calm  # which counts no more
    assert goes_by(calm, 5 * hour) is goes_by(calm, 24 * hour) is calm
    for at in (25 * hour, 1e9):
        assert goes_by(crowded, at) is calm and len(measured) == 8  # three calm ones will do
    assert len(json.loads((tmp_path / "costs").read_text())) == planning.MOMENTS


def test_an_engine_is_measured(folder, cache):
    """Whatever the moment: what cannot have been measured is refused where costs are made (test_calibrate.py)."""
    engine = load(folder)
    assert engine.backend.another_engine(2).calibrate().overlapped is not None
    costs = engine.backend.another_engine(1).calibrate()
    assert costs.overlapped is None
    assert min(costs.turns.first_draft, costs.turns.plain) > 0  # not left to the others
    assert engine.backend.costs().turns.row_step > 0


def test_sampled_answers_are_learned_from_apart(folder):
    engine = load(folder)
    engine.backend.believe(costs())  # by measured ones overlap may pay at first and not later: that is another planner
    planned = []
    for params in (FREE, replace(FREE, temperature=1.0), FREE, replace(FREE, temperature=0.5)):
        engine.generate("hello", params, "auto").run()
        planned.append(engine.backend._planners.used)
    assert planned[0] is planned[2] is not planned[1]
    assert planned[1] is planned[3]


def test_copies_say_nothing_of_the_head():
    plan = _native.Planner(costs(), 0.5, lookup=3)
    before = plan.acceptance
    for _ in range(20):  # three copies a round, all right, and no draft of the head
        testing.after(plan, committed=4, judged=3, accepted=3, seconds=ROW + ONE + 3 * MORE, copied=3)
    assert plan.acceptance == before
    testing.after(plan, committed=3, judged=3, accepted=2, seconds=ROW + ONE + 3 * MORE + DRAFT, copied=2)
    assert plan.acceptance < before, "the head's one was wrong"
    measured = plan.measured().values()
    assert (sum(m.rounds for m in measured), sum(m.tokens for m in measured)) == (21, 83)
    predicted = sum(m.predicted_seconds for m in measured)
    assert sum(m.seconds for m in measured) == pytest.approx(predicted, rel=0.02), (
        "a copy costs a row, not a draft step"
    )
