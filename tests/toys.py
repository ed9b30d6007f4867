"""What the tests of the loop share: stages without a model, and schedules of every kind."""

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


class ToyDraft:
    """A draft stage without a model: the `hidden state` of a row is its history, the drafts come from a function."""

    def __init__(self, drafts, draft_ids=None):
        self.length, self.draft_ids = 0, draft_ids
        self.drafts, self.ids = drafts, []
        self.learned, self.siblings = [], {}

    def follow(self, text):
        pass

    def run_tokens(self, ids):
        assert ids, "a pass without rows"
        self.ids += ids
        self.length += len(ids)

    def exit_hidden(self, start, count):
        assert start + count <= self.length, "verification was given rows that have not been run"
        return [self.ids[: row + 1] for row in range(start, start + count)]

    def draft_logits(self):
        return self.drafts(self.ids)

    def run_sibling(self, position, token):
        assert position < self.length and self.ids[position] != token
        self.siblings[position] = [*self.ids[:position], token]

    def sibling_hidden(self, position):
        return [self.siblings[position]]

    def adopt(self, position):
        self.ids = list(self.siblings[position])
        self.length = position + 1

    def learn(self, position, last_hidden):
        assert len(last_hidden) == position + 1, "the history of another row"
        self.learned.append((position, last_hidden))

    def rollback(self, length):
        self.length = min(self.length, length)
        del self.ids[self.length :]


class ToyVerify:
    def __init__(self, truth):
        self.length, self.truth, self.rows = 0, truth, []

    def logits(self, exit_hidden, last):
        assert len(exit_hidden[0]) == self.length + 1, "rows must come in order, without gaps"
        self.length += len(exit_hidden)
        self.rows.append(len(exit_hidden))
        self.last = exit_hidden[-last:]
        return torch.stack([self.truth(history) for history in exit_hidden[-last:]])

    def sibling_logits(self, exit_hidden, position):
        assert position < self.length and len(exit_hidden[0]) == position + 1
        self.last = exit_hidden
        return torch.stack([self.truth(exit_hidden[0])])

    def adopt(self, position):
        assert position < self.length
        self.length = position + 1

    def last_hidden(self):
        return self.last

    def rollback(self, length):
        self.length = min(self.length, length)


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
