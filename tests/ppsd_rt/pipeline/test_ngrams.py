"""The memory of answers by itself: whose tokens are found, what a head knows beforehand, a clock that goes round."""

import numpy as np
import pytest

from ppsd_rt import _native
from ppsd_rt._native import Ngrams
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import parse_schedule

ASKED, SECRET = [40, 41, 42, 43, 44, 45, 46, 47], [201, 202, 203, 204, 205, 206]


def copies(ngrams, prompt, answer):
    """-> the drafts that are copied for a text which goes on so, and how many of them are right."""
    text = [*prompt, *answer]
    rounds = _native.testing.replay(
        parse_schedule("recycle"), text, len(prompt), lambda *_: pytest.fail("no head"), Limits(len(text)), ngrams
    )
    return [draft.token for round in rounds for draft in round.judged], sum(round.accepted for round in rounds)


@pytest.mark.parametrize("other", [0, 5, 2**40])
@pytest.mark.parametrize("shift", [-2, -1, 1, 2, 7])
def test_owners_that_are_near_see_nothing_of_each_other(other, shift):
    """Whatever the last token is: an owner and a token made up for another owner and another token."""
    ngrams, last = Ngrams(1 << 16), 100
    ngrams.of(other).learn([*ASKED, last + shift, *SECRET] * 3)
    found, _ = copies(ngrams.of((other + shift) % 2**64), [*ASKED, last], [7, 8, 9])
    assert not {*found} & {*SECRET}
    assert copies(ngrams.of(other), [*ASKED, last + shift], SECRET)[1] >= 4, "his own are found"


@pytest.mark.parametrize("owner", [0, 5, 2**63 + 1, None])
def test_a_heads_successors_serve_every_owner(owner):
    ngrams = Ngrams(1 << 16)
    ngrams.know(np.array([[-1, 100, 201, 7], [100, 201, 202, 7]], np.int32))
    assert copies(ngrams.of(owner), [*ASKED, 100], [201, 202, 203])[0] == [202]


def test_the_newest_texts_are_found_however_many_were_before():
    """By an index that has been full for long, and halves the age of all now and then, as by one that never has to."""
    rng = np.random.default_rng(1)
    texts, found = [rng.integers(0, 49152, 500).tolist() for _ in range(120)], []
    for ngrams in (Ngrams(1 << 18, clock=4096), Ngrams(1 << 18)):
        for text in texts:
            ngrams.learn(text)
        found.append([copies(ngrams, text[:8], text[8:])[1] for text in texts[-3:]])
    assert min(found[0]) > 400 and abs(np.subtract(*found)).max() < 30
