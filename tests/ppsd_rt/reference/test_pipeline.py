"""The loop with toy stages: any schedule gives what plain decoding gives, and takes the ticks that the formulas say."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow
from toys import PROMPT, VOCAB, ToyDraft, ToyVerify, blurred, hashed_logits, schedules

from ppsd_rt.pipeline.rounds import Drafted, Limits, Round
from ppsd_rt.pipeline.schedule import MAX_CHUNK, MAX_ROWS, PLAIN, Schedule, named
from ppsd_rt.pipeline.stop_rules import ConfidenceThreshold
from ppsd_rt.reference.pipeline import Pipeline, Ticks
from ppsd_rt.reference.sampler import Sampler
from ppsd_rt.sampling.params import SamplingParams


def run(schedule, truth, drafts, params=SamplingParams(), limits=Limits(60), ticks=Ticks(), draft_ids=None):
    draft, verify = ToyDraft(drafts, draft_ids), ToyVerify(truth)
    pipeline = Pipeline(draft, verify, schedule, Sampler(params), limits, ticks)
    return pipeline, list(pipeline.run(PROMPT))


def rounds(events):
    return [event for event in events if isinstance(event, Round) and not event.prompt]


samplings = st.sampled_from(
    [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=3),
        SamplingParams(temperature=1.0, top_k=4, top_p=0.9, repetition_penalty=1.3, seed=11),
    ]
)


@settings(max_examples=150, deadline=None)
@given(
    schedule=schedules,
    params=samplings,
    noise=st.sampled_from([0.0, 0.5, 2.0, 1000.0]),
    salt=st.integers(0, 50),
    stages=st.integers(1, 5),
    per_stage=st.integers(1, 6),
    end=st.integers(4, 60),
    stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
    half=st.booleans(),
)
def test_any_schedule_equals_plain(schedule, params, noise, salt, stages, per_stage, end, stop_ids, half):
    truth = hashed_logits(salt)
    draft_ids = torch.arange(0, VOCAB, 2) if half else None
    drafts = blurred(truth, noise)
    seen = (lambda history: drafts(history)[draft_ids]) if half else drafts
    limits = Limits(end, stop_ids)
    plain, _ = run(PLAIN, truth, drafts, params, limits)
    pipeline, events = run(schedule, truth, seen, params, limits, Ticks(stages, per_stage), draft_ids)
    assert pipeline.tokens == plain.tokens
    check_bookkeeping(pipeline, schedule, events)


def check_bookkeeping(pipeline, schedule, events):
    """What every run of the loop must satisfy."""
    committed = [id for event in events if isinstance(event, Round) for id in event.committed]
    assert pipeline.tokens == PROMPT + committed
    position = len(PROMPT)
    for event in events:
        if isinstance(event, Round):
            assert event.position == position
            assert 1 <= len(event.committed) <= event.rows or event.prompt
            assert event.rows <= min(schedule.max_chunk + 1 + event.siblings, MAX_ROWS) or event.prompt
            assert schedule.siblings or not event.siblings
            assert event.accepted <= len(event.judged) <= event.accepted + 1
            accepted = [draft.token for draft in event.judged[: event.accepted]]
            assert list(event.committed[: event.accepted]) == accepted
            assert not event.corrected or event.committed[event.accepted] != event.judged[event.accepted].token
            assert len(event.committed) <= event.accepted + 1 + event.rescued
            if event.rescued:
                assert event.committed[event.accepted] == event.judged[event.accepted].sibling
                # With overlap the sibling may be under way in a later pass.
                assert len(event.committed) == event.accepted + 2 or schedule.overlap
            position += len(event.committed)
    drafted = sum(isinstance(event, Drafted) for event in events)
    assert drafted == sum(len(event.judged) + event.dropped for event in rounds(events))
    # After the end the stages hold the rows of the committed text but the last, ready for the next turn.
    assert pipeline.draft.length <= len(pipeline.tokens) - 1
    assert pipeline.verify.length <= len(pipeline.tokens) - 1


def known_truth(history):
    """True token: the position modulo VOCAB."""
    return torch.nn.functional.one_hot(torch.tensor(len(history) % VOCAB), VOCAB).float() * 9


def wrong_at(*positions):
    """Drafts that are right except at these positions."""

    def drafts(history):
        shift = len(history) in positions
        return torch.nn.functional.one_hot(torch.tensor((len(history) + shift) % VOCAB), VOCAB).float() * 9

    return drafts


@pytest.mark.parametrize(("chunk", "ticks", "known"), [(1, Ticks(3, 1), 0), (8, Ticks(1, 6), 1)])
def test_a_sibling_is_judged_with_its_draft_or_after_it(chunk, ticks, known):
    """The second choice is always right. A pass that begins with its row goes on after the rejection. known: of the
    tokens after siblings, those that come with the rejection."""

    def drafts(history):
        right = len(history) % VOCAB
        wrong = torch.nn.functional.one_hot(torch.tensor((right + 1) % VOCAB), VOCAB).float()
        return known_truth(history) + wrong * (10 if len(history) % 3 == 0 else -1)

    schedule = Schedule(0, chunk, 8, overlap=True, siblings=1e-6)
    pipeline, events = run(schedule, known_truth, drafts, limits=Limits(40), ticks=ticks)
    assert pipeline.tokens[len(PROMPT) :] == [place % VOCAB for place in range(len(PROMPT), 40)]
    rescued = [event for event in rounds(events) if event.rescued]
    assert len(rescued) > 5
    assert any(len(event.committed) == event.accepted + 1 + known for event in rescued)
    check_bookkeeping(pipeline, schedule, events)


ALWAYS_WRONG = wrong_at(*range(1000))
LENGTH_5 = Schedule(5, 5, 5)


def test_all_accepted():
    _, events = run(LENGTH_5, known_truth, wrong_at(), limits=Limits(3 + 1 + 12))
    assert [(r.rows, r.accepted, len(r.committed), r.corrected) for r in rounds(events)] == [(6, 5, 6, False)] * 2


def test_all_rejected():
    _, events = run(LENGTH_5, known_truth, ALWAYS_WRONG, limits=Limits(3 + 1 + 4))
    # Nothing is drafted for the last position, whose token verification gives anyway.
    assert [(r.accepted, len(r.judged), r.dropped, r.committed) for r in rounds(events)] == [
        (0, 1, 2, (4,)),
        (0, 1, 1, (5,)),
        (0, 1, 0, (6,)),
        (0, 0, 0, (7,)),
    ]


@pytest.mark.parametrize("accepted", range(5))
def test_each_partial_length(accepted):
    first = len(PROMPT) + 1  # the prompt pass commits position 3; drafts begin at 4
    pipeline, events = run(LENGTH_5, known_truth, wrong_at(first + accepted), limits=Limits(30))
    round = rounds(events)[0]
    assert (round.accepted, len(round.judged), round.dropped) == (accepted, accepted + 1, 4 - accepted)
    assert (len(round.committed), round.corrected, round.epoch) == (accepted + 1, True, 0)
    assert rounds(events)[1].epoch == 1
    assert pipeline.tokens[3:] == [p % VOCAB for p in range(3, 30)]


@pytest.mark.parametrize("schedule", [LENGTH_5, named("elastic"), named("ppsd")], ids=["eesd", "elastic", "ppsd"])
@pytest.mark.parametrize("place", range(8))
def test_stop_id_at_each_place_of_a_chunk(place, schedule):
    """Nothing after a stop id is committed, and it is committed itself."""
    stop = 4 + place
    pipeline, events = run(
        schedule, known_truth, wrong_at(), limits=Limits(50, frozenset({stop})), ticks=Ticks(per_stage=4)
    )
    assert pipeline.tokens == [*PROMPT, *range(3, stop + 1)]
    assert rounds(events)[-1].committed[-1] == stop


@pytest.mark.parametrize("schedule", [LENGTH_5, named("elastic"), named("ppsd")], ids=["eesd", "elastic", "ppsd"])
@pytest.mark.parametrize("budget", range(1, 14))
def test_budget_inside_a_chunk(budget, schedule):
    pipeline, events = run(schedule, known_truth, wrong_at(7), limits=Limits(3 + budget), ticks=Ticks(per_stage=3))
    assert len(pipeline.tokens) == 3 + budget
    check_bookkeeping(pipeline, schedule, events)


def test_end_in_the_prompt_pass():
    pipeline, events = run(LENGTH_5, known_truth, wrong_at(), limits=Limits(50, frozenset({3})))
    assert (len(events), pipeline.tokens) == (1, [1, 2, 3, 3])


def test_stop_rule_ends_the_draft():
    _, events = run(Schedule(5, 5, 5, False, ConfidenceThreshold(0.9999)), known_truth, wrong_at(), limits=Limits(30))
    assert {r.rows for r in rounds(events)} == {2}


def test_serial_schedules_never_draft_during_verification():
    _, events = run(LENGTH_5, known_truth, wrong_at(), ticks=Ticks(per_stage=7))
    assert all(r.dropped == 0 for r in rounds(events)[:-1])


def test_elastic_drafts_during_verification_and_takes_all_that_is_pending():
    """Verification takes 4 ticks, so with perfect drafts it finds 4 rows waiting each time."""
    _, events = run(Schedule(1, 8, 15, True), known_truth, wrong_at(), ticks=Ticks(per_stage=4), limits=Limits(60))
    assert {r.rows for r in rounds(events)[2:-2]} == {4}


def coin(alpha, seed):
    """Drafts that are right with probability alpha, independently at each position and history length."""
    rng = random.Random(seed)
    return lambda history: wrong_at(*([] if rng.random() < alpha else [len(history)]))(history)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("stages", [slow(2), 4, slow(8)])
def test_published_ppsd_takes_the_ticks_of_its_formula(alpha, stages):
    """alpha + (1 - alpha) n ticks per token, against n for plain pipelined decoding (docs: PPSD, speed-up)."""
    schedule = Schedule(0, 1, MAX_CHUNK, True)
    end = 3 + (200 if alpha in (0, 1) else 3000)
    pipeline, _ = run(schedule, known_truth, coin(alpha, 1), ticks=Ticks(stages=stages - 1), limits=Limits(end))
    expected = alpha + (1 - alpha) * stages
    assert pipeline.tick / (end - 4) == pytest.approx(expected, rel=0.05)
    plain, _ = run(PLAIN, known_truth, wrong_at(), ticks=Ticks(stages=stages - 1), limits=Limits(203))
    assert plain.tick / 199 == pytest.approx(stages, rel=0.02)


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_draft_then_verify_commits_what_its_formula_says(alpha):
    """(1 - alpha^(K+1)) / (1 - alpha) tokens per round of K drafts."""
    _, events = run(Schedule(4, 4, 4), known_truth, coin(alpha, 2), limits=Limits(6000))
    sizes = [len(r.committed) for r in rounds(events)]
    assert sum(sizes) / len(sizes) == pytest.approx((1 - alpha**5) / (1 - alpha), rel=0.05)


def test_same_run_same_rounds():
    def make():
        return run(named("elastic"), known_truth, coin(0.7, 5), ticks=Ticks(per_stage=3))[1]

    assert make() == make()


def test_cancel_keeps_the_rows_of_the_committed_text():
    draft, verify = ToyDraft(wrong_at()), ToyVerify(known_truth)
    pipeline = Pipeline(draft, verify, named("elastic"), Sampler(SamplingParams()), Limits(60), Ticks(per_stage=4))
    events = pipeline.run(PROMPT)
    for _ in range(12):
        next(events)
    pipeline.cancel()
    assert pipeline.drafts == []
    assert draft.ids == pipeline.tokens[: draft.length]
    assert verify.length <= draft.length == len(pipeline.tokens) - 1
