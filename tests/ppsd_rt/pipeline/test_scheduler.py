"""The C++ scheduler gives the plain text; noise in C++ has the bits of its readable twin."""

from functools import cache

import noise_twin
import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_twin import confidence
from toys import PROMPT, VOCAB, blurred, hashed_logits, schedules

from ppsd_rt._native import testing
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import parse_schedule

seeds = st.integers(0, 2**64 - 1)


def decoded(schedule, salt, noise, end, stop_ids, seed, stages):
    """A toy model's text, and the rounds in which it was committed."""
    truth, text = hashed_logits(salt), list(PROMPT)
    while len(text) < end:
        text.append(int(truth(text).argmax()))
    drafts = blurred(truth, noise)

    @cache
    def draw(position, place, right):
        logits = drafts(text[:position])
        token = int(logits.argmax())
        return token, confidence(logits, token)

    limits = Limits(end, stop_ids)
    return text, testing.replay(schedule, text, len(PROMPT), draw, limits, seed=seed, stages=stages)


@settings(max_examples=300, deadline=None)
@given(
    schedule=schedules,
    noise=st.sampled_from([0.0, 0.5, 2.0, 1000.0]),
    salt=st.integers(0, 50),
    seed=seeds,
    stages=st.integers(1, 4),
    end=st.integers(len(PROMPT) + 1, 60),
    stop_ids=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
)
def test_any_schedule_commits_the_plain_text(schedule, noise, salt, seed, stages, end, stop_ids):
    """Whatever is done first, wherever there is a choice."""
    plain, rounds = decoded(schedule, salt, noise, end, stop_ids, seed, stages)
    text = list(PROMPT)
    for round in rounds:
        assert round.position == len(text)
        assert round.accepted <= len(round.judged) and len(round.committed) <= round.accepted + 1
        text += round.committed
    assert text == plain[: len(text)]
    assert len(text) == end or text[-1] in stop_ids
    assert not stop_ids & set(text[len(PROMPT) : -1])
    if noise == 0.0:
        assert all(round.judged[round.accepted].copied for round in rounds if round.corrected)


def test_the_comparison_would_notice():
    """Such a run holds acceptances, corrections and drops; another order gives other rounds."""
    schedule = parse_schedule("elastic")
    _, rounds = decoded(schedule, 1, 1.0, 60, frozenset(), 0, 2)
    assert any(round.corrected for round in rounds)
    assert any(round.accepted > 1 for round in rounds)
    assert any(round.dropped for round in rounds)
    assert rounds != decoded(schedule, 1, 1.0, 60, frozenset(), 1, 2)[1]


@given(seed=seeds, counter=st.tuples(*[st.integers(0, 2**32 - 1)] * 4))
def test_philox_words(seed, counter):
    key = (seed & 0xFFFFFFFF, seed >> 32)
    assert tuple(testing.philox(seed, counter)) == noise_twin.philox(key, counter)


@given(seed=seeds, position=st.integers(0, 2**20), stream=st.integers(0, 3))
def test_uniform_numbers_to_the_bit(seed, position, stream):
    ids = np.array([0, 1, 49151, 2**24, 2**31 - 1])
    expected = noise_twin.uniform(seed, position, ids, stream)
    got = np.array([testing.uniform(seed, position, int(id), stream) for id in ids], np.float32)
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize(("a", "b"), [(1, 1), (0.4, 3.6), (30, 5)])
def test_thompson_stop_rules_draw_beta(a, b):
    assert scipy.stats.kstest(testing.beta(3, a, b, 50_000), "beta", args=(a, b)).pvalue > 1e-3
    assert testing.beta(3, a, b, 9) == testing.beta(3, a, b, 9) != testing.beta(4, a, b, 9)
