"""`auto` in torch is the one planner; everything else there needs no C++ extension."""

import subprocess
import sys
from dataclasses import replace

import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt._native import Costs, Planner, StageCosts
from ppsd_rt.backend import Cancellation, RunOptions
from ppsd_rt.pipeline.rounds import Draft, Limits, Round
from ppsd_rt.pipeline.schedule import MAX_ROWS, parse_schedule
from ppsd_rt.pipeline.stop_rules import Survival
from ppsd_rt.reference import auto
from ppsd_rt.reference.stage import DraftStage, VerifyStage

FREE = SamplingParams(max_tokens=60, ignore_eos=True)
TABLE = tuple(1.0 + 0.01 * rows for rows in range(MAX_ROWS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("auto") / "model")


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.from_pretrained(folder, exit_head="norm:2", backend="torch", dtype="float32")


@pytest.mark.parametrize("params", [FREE, replace(FREE, temperature=0.9, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", [0.01, 1000.0], ids=["cheap", "dear"])  # more than an answer can earn
def test_auto_gives_the_plain_answer(engine, params, draft):
    """Schedules change in the middle of it."""
    plain = engine.generate("Hello", params, "plain").run()
    engine.backend._costs = Costs(StageCosts(0.005, draft, TABLE))
    engine.backend._planners.clear()
    for _ in range(2):
        answer = engine.generate("Hello", params, "auto").run()
        assert answer.ids == plain.ids
    measured = engine.backend._planners.used.measured()
    assert measured["plain"].rounds > 0
    assert (measured["turns"].rounds > 0) == (draft < 1)
    assert sum(kind.tokens for kind in measured.values()) <= 2 * 60
    assert "acceptance" in engine.backend.explain()


def test_stages_are_measured(folder):
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="torch", dtype="float32")
    assert engine.generate("Hello", FREE, "auto").run().ids == engine.generate("Hello", FREE, "plain").run().ids
    costs = engine.backend._costs
    assert costs.overlapped is None
    assert costs.turns.row_step > 0


def test_costs_are_what_the_stages_take(monkeypatch, engine):
    """By a clock that a pass moves on by its rows, and a draft by 3."""
    clock = [0.0]

    def tick(seconds):
        clock[0] += seconds

    monkeypatch.setattr(auto, "perf_counter", lambda: clock[0])
    verified, run, logits = VerifyStage.logits, DraftStage.run_tokens, DraftStage.draft_logits
    passed = lambda stage, hidden, last: tick(10 + len(hidden)) or verified(stage, hidden, last)  # noqa: E731
    monkeypatch.setattr(VerifyStage, "logits", passed)
    monkeypatch.setattr(DraftStage, "run_tokens", lambda stage, ids: tick(1.0) or run(stage, ids))
    monkeypatch.setattr(DraftStage, "draft_logits", lambda stage: tick(3.0) or logits(stage))
    draft, verify = engine.backend._new_stages()
    draft.reserve(64)
    verify.reserve(64)
    turns = auto.measure(draft, verify, 32).turns
    assert (turns.row_step, turns.draft_step) == (1.0, 4.0)
    assert turns.verify == pytest.approx([10 + rows for rows in range(1, MAX_ROWS + 1)])


def test_what_the_planner_wants_and_learns():
    planner = Planner(Costs(StageCosts(0.1, 0.2, TABLE)), 0.7, lookup=3)
    assert not planner.schedule().drafts, "its first round is plain"
    auto.learn(planner, Round(0, 9, 1, (1,), (), 0, 0), 1.1)
    schedule = planner.schedule()
    assert schedule.drafts and not schedule.overlap and schedule.lookup == 3
    assert isinstance(schedule.stop_rule, Survival)
    before = planner.acceptance
    judged = (Draft(1, 0.9, copied=4), Draft(2, 0.5), Draft(3, 0.5))
    auto.learn(planner, Round(0, 10, 5, (1, 2, 4), judged, 2, 1), 2.0)
    assert planner.acceptance < before, "of the head's two drafts one was right"
    assert sum(measured.rounds for measured in planner.measured().values()) == 2


def test_another_schedule_between_two_rounds_keeps_what_was_learned(engine):
    ids = engine.encode("Hello")
    plain = engine.generate(ids, FREE, "plain").run().ids
    schedules = [parse_schedule(text) for text in ("eesd:stop_rule=survival", "plain", "eesd:length=2", "lookup")]
    limits = Limits(len(ids) + FREE.max_tokens, frozenset())
    events = engine.backend.rounds(ids, FREE, schedules[0], limits, RunOptions(), Cancellation())
    committed: list[int] = []
    for number, event in enumerate(event for event in events if isinstance(event, Round)):
        committed += event.committed
        engine.backend._active.set_schedule(schedules[number % len(schedules)])
    assert tuple(committed) == plain


WITHOUT = """
import sys
import ppsd_rt
sys.modules["ppsd_rt._native"] = None  # not to be imported
from ppsd_rt import Engine, SamplingParams
engine = Engine.from_pretrained(sys.argv[1], exit_head="norm:2", backend="torch")
names = "plain", "eesd", "elastic"
assert len({engine.generate([1, 2, 3], SamplingParams(max_tokens=20), name).run().ids for name in names}) == 1
try:
    engine.generate([1, 2, 3], SamplingParams(max_tokens=20), "auto").run()
except ImportError as error:
    print("only auto needs it:", "_native" in str(error))
"""


def test_a_given_schedule_needs_no_extension(folder):
    done = subprocess.run([sys.executable, "-c", WITHOUT, folder], capture_output=True, text=True)
    assert done.stdout.strip() == "only auto needs it: True", done.stderr
