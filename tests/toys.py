"""What the tests of the loop share: language models without a model, and schedules of every kind."""

import random

import numpy as np
import torch
from hypothesis import strategies as st

from ppsd_rt import _native
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
    lambda chunk, first, ahead, overlap, rule, lookup, recycle: Schedule(
        min(first, chunk), chunk, max(ahead, chunk), overlap, rule, lookup, recycle
    ),
    st.integers(1, MAX_CHUNK),
    st.integers(0, MAX_CHUNK),
    st.one_of(st.integers(1, 20), st.integers(20, MOST_LOOKAHEAD)),
    st.booleans(),
    stop_rules,
    st.sampled_from([0, 0, 1, 2, 3, 8]),
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


class ToyPasses:
    """Passes without a model, as ppsd_rt/reference/passes.py has them: a row is its id, the KV cache holds ids, and
    logits come from functions of the text so far."""

    hidden_size, vocab_size, draft_share, draft_ids, taps = 1, VOCAB, 0.5, (), ()
    drafts = True
    lags = hears = follows = decoded_rows_differ = chooses = False

    def __init__(self, truth, drafts):
        self.rotary = _native.Rotary([1.0])
        self._truth, self._drafts = truth, drafts
        self._cache, self._rows = {}, []

    def reserve(self, rows, rotated_as):
        pass

    def change(self, wiped, copies):
        for page in wiped:
            self._cache[page] = {}
        for origin, copy in copies:
            self._cache[copy] = dict(self._cache[origin])

    def embed(self, ids):
        return np.array(ids, np.float32)[:, None]

    def _history(self, pages, position):
        return [self._cache[pages[place // 64]][place % 64] for place in range(position + 1)]

    def early(self, texts, x, cancelled):
        ids = iter(x[:, 0].astype(int).tolist())
        for start, count, pages, _ in texts:
            for place in range(start, start + count):
                self._cache.setdefault(pages[place // 64], {})[place % 64] = next(ids)
        return x

    def late(self, texts, x, cancelled):
        spread = [(pages, place) for start, count, pages, _ in texts for place in range(start, start + count)]
        self._rows = [self._history(*row) for row in spread]
        assert x[: len(spread), 0].astype(int).tolist() == [history[-1] for history in self._rows]
        return x, None

    def logits(self, rows):
        assert all(len(self._rows[row]) == position + 1 for row, position in rows)
        return np.stack([self._truth(self._rows[row]).numpy() for row, _ in rows])

    def draw(self, draws, cancelled):
        return [self._drafts(self._history(pages, start + count - 1)).numpy() for (start, count, pages, _), *_ in draws]
