"""The C++ scheduler gives the plain text, and what has a readable twin the same draws and the same bits."""

from functools import lru_cache

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_twin import confidence
from toys import PROMPT, VOCAB, blurred, hashed_logits, schedules, stop_rules

from ppsd_rt._native import testing
from ppsd_rt.pipeline.rounds import Drafted, Limits, Round
from ppsd_rt.pipeline.schedule import Schedule, named
from ppsd_rt.sampling import noise

seeds = st.integers(0, 2**64 - 1)


def lock_step_events(schedule, truth, drafts, limits, seed, stages, per_stage):
    def draw(history, place):
        logits = drafts(history)
        token = int(logits.argmax())
        second = int(logits.clone().index_fill(0, torch.tensor(token), -torch.inf).argmax())
        return token, confidence(logits, token), second, confidence(logits, second)

    return testing.lock_step_events(
        PROMPT, draw, lambda history: int(truth(history).argmax()), schedule, limits, seed, stages, per_stage
    )


@settings(max_examples=300, deadline=None)
@given(
    schedule=schedules,
    noise=st.sampled_from([0.0, 0.5, 2.0, 1000.0]),
    salt=st.integers(0, 50),
    seed=seeds,
    stages=st.integers(1, 4),
    per_stage=st.integers(1, 6),
    end=st.integers(len(PROMPT) + 1, 60),
    stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
)
def test_lock_step_gives_the_plain_text(schedule, noise, salt, seed, stages, per_stage, end, stop_ids):
    truth = cached(hashed_logits(salt), 3)
    drafts = cached(blurred(truth, noise), 5)
    events = lock_step_events(schedule, truth, drafts, Limits(end, stop_ids), seed, stages, per_stage)
    rounds = [event for event in events if isinstance(event, Round)]
    text = list(PROMPT)
    for round in rounds:
        assert round.position == len(text)
        assert round.accepted <= len(round.judged) and len(round.committed) <= round.accepted + 1 + round.rescued
        for token in round.committed:
            assert token == int(truth(text).argmax())
            text.append(token)
    assert len(text) == end or text[-1] in stop_ids
    assert not stop_ids & set(text[len(PROMPT) : -1])
    if noise == 0.0:
        assert all(round.judged[round.accepted].copied for round in rounds if round.corrected)


def cached(logits, last):
    """The toy language models look at the last few ids only."""
    known = lru_cache(maxsize=None)(lambda ids: logits(list(ids)))
    return lambda history: known(tuple(history[-last:]))


def test_the_comparison_would_notice():
    """Events of such a run hold drafts, acceptances, corrections and drops; other ticks give other events."""
    truth = hashed_logits(1)
    arguments = (named("elastic"), truth, blurred(truth, 1.0), Limits(60), 0, 2)
    events = lock_step_events(*arguments, 3)
    rounds = [event for event in events if isinstance(event, Round)]
    assert any(isinstance(event, Drafted) for event in events)
    assert any(round.corrected for round in rounds)
    assert any(round.accepted > 1 for round in rounds)
    assert any(round.dropped for round in rounds)
    assert lock_step_events(*arguments, 5) != events


copies = st.tuples(st.floats(0, 1), st.booleans())


@settings(max_examples=200, deadline=None)
@given(
    rule=stop_rules,
    seed=seeds,
    history=st.lists(
        st.one_of(st.floats(0, 1), copies, st.lists(copies, max_size=5)),  # drafts, copies, verdicts
        max_size=60,
    ),
)
def test_stop_rules_draw_by_draw(rule, seed, history):
    controller = rule.start(seed)
    expected = []
    for item in history:
        if isinstance(item, float):
            expected.append(controller.stop(item))
        elif isinstance(item, tuple):
            expected += [controller.may_copy(*item), controller.stop_copying(item[0])]
        else:
            controller.observe(item)
    schedule = Schedule(1, 1, 1, stop_rule=rule)
    assert testing.stop_rule_draws(schedule, seed, history) == expected


@given(seed=seeds, counter=st.tuples(*[st.integers(0, 2**32 - 1)] * 4))
def test_philox_words(seed, counter):
    key = (seed & 0xFFFFFFFF, seed >> 32)
    assert tuple(testing.philox(seed, counter)) == noise.philox(key, counter)


@given(seed=seeds, position=st.integers(0, 2**20), stream=st.integers(0, 3))
def test_uniform_numbers_to_the_bit(seed, position, stream):
    ids = np.array([0, 1, 49151, 2**24, 2**31 - 1])
    expected = noise.uniform(seed, position, ids, stream)
    got = np.array([testing.uniform(seed, position, int(id), stream) for id in ids], np.float32)
    assert got.tobytes() == expected.tobytes()
