"""What the tests of the loop share: language models without a model, and schedules of every kind."""

import random

import torch
from hypothesis import strategies as st

from ppsd_rt.pipeline.schedule import MAX_CHUNK, MOST_LOOKAHEAD, PLAIN, Schedule
from ppsd_rt.pipeline.stop_rules import (
    BetaThompson,
    CalibratedThompson,
    ConfidenceThreshold,
    FixedLength,
    Paying,
    Survival,
)

VOCAB = 12
PROMPT = [1, 2, 3]


def hashed_logits(salt):
    """A `language model`: logits that depend on the last three tokens."""

    def logits(history):
        rng = random.Random(f"{salt}{history[-3:]}")
        return torch.tensor([4 * rng.random() for _ in range(VOCAB)])

    return logits


def blurred(truth, noise):
    """Logits near the true ones, so that some drafts are right."""

    def logits(history):
        rng = random.Random(f"{noise}{history[-5:]}")
        return truth(history) + torch.tensor([noise * rng.random() for _ in range(VOCAB)])

    return logits


stop_rules = st.one_of(
    st.just(FixedLength()),
    st.floats(0.01, 0.99).map(ConfidenceThreshold),
    st.floats(0.5, 1.0).map(BetaThompson),
    st.builds(CalibratedThompson, st.integers(1, 12), st.floats(0.5, 8), st.floats(0.5, 1)),
    st.builds(Survival, st.floats(0.01, 0.99), st.integers(1, 12), st.floats(0.5, 8), st.floats(0.5, 1)),
    st.builds(Paying, st.floats(0.01, 2), st.integers(1, 12), st.floats(0.5, 8), st.floats(0.5, 1)),
)
drafting_schedules = st.builds(
    lambda chunk, first, ahead, overlap, rule, lookup, siblings, recycle: Schedule(
        min(first, chunk), chunk, max(ahead, chunk), overlap, rule, lookup, siblings, recycle
    ),
    st.integers(1, MAX_CHUNK),
    st.integers(0, MAX_CHUNK),
    st.one_of(st.integers(1, 20), st.integers(20, MOST_LOOKAHEAD)),
    st.booleans(),
    stop_rules,
    st.sampled_from([0, 0, 1, 2, 3, 8]),
    st.sampled_from([0.0, 1e-9, 0.001, 0.03, 0.3]),
    st.booleans(),
)
copying_schedules = st.builds(
    lambda chunk, overlap, rule, lookup, recycle: Schedule(
        0, chunk, 0, overlap, rule, lookup if recycle else max(lookup, 1), recycle=recycle
    ),
    st.integers(1, MAX_CHUNK),
    st.booleans(),
    stop_rules,
    st.integers(0, 8),
    st.booleans(),
)
schedules = st.one_of(st.just(PLAIN), drafting_schedules, copying_schedules)
