"""The timeline of all ranks, with clocks that the test makes up."""

import random

import numpy as np
import pytest

from ppsd_rt.ranks.control import PAYLOAD_WORDS
from ppsd_rt.ranks.timeline import ClockOffset, clock_offset, on_one_clock, pack_spans, unpack_spans


@pytest.mark.parametrize("ahead", [0, 12_345_678_901_234, -5_000_000_000])
def test_the_error_bounds_an_offset_whatever_the_ways_take(ahead):
    draws = random.Random(ahead)
    for _ in range(200):
        now, questions = 10**15, []
        for _ in range(draws.randint(1, 20)):
            there, back = (round(draws.expovariate(1 / 50_000)) for _ in range(2))  # as uneven as it comes
            questions.append((now, now + there + ahead, now + there + back))
            now += there + back + 1_000_000
        found = clock_offset(questions)
        assert abs(found.offset - ahead) <= found.error + 1  # halves of nanoseconds
        assert found.error == (min(heard - asked for asked, _, heard in questions) + 1) // 2


def test_the_question_that_came_back_soonest_counts():
    assert clock_offset([(0, 5_900, 10_000), (20_000, 21_100, 20_200), (30_000, 31_500, 31_000)]) == ClockOffset(
        1_000, 100
    )


SPANS = [
    ("prompt", 1, 9, 1e12, 1e12 + 500.0),
    ("verify", 1, 3, 2e12 + 0.25, 2e12 + 100.25),
    ("dropped verify", 1, 1, 3e12, 3e12),
]


def test_spans_travel_in_control_messages():
    messages = pack_spans(SPANS * 10, PAYLOAD_WORDS)
    assert [len(words) for words in messages] == [55, 55, 40]
    assert all(words.dtype == np.int32 for words in messages)
    came = [span for words in messages for span in unpack_spans(words, 1)]
    assert [span[:3] for span in came] == [span[:3] for span in SPANS * 10]
    for span, sent in zip(came, SPANS * 10, strict=True):
        assert span[3:] == pytest.approx(sent[3:], abs=0.001)


@pytest.mark.parametrize("words", [[0] * 4, [3, 1, 0, 0, 0], [-1, 1, 0, 0, 0], [0, -1, 0, 0, 0]])
def test_nonsense_is_refused(words):
    with pytest.raises(ValueError, match="span"):
        unpack_spans(np.array(words, np.int32), 1)


def test_all_ranks_are_on_rank_0s_clock():
    here = [("draft", 0, 1, 5_000.0, 5_100.0), ("drafted", 0, 1, 5_099.0, 5_099.0)]
    ahead = [("verify", 1, 2, 1_005_050.0, 1_005_400.0)]  # a second ahead
    behind = [("verify", 2, 2, 4_500.0, 4_600.0)]  # a millisecond behind
    spans = on_one_clock(here, [(ClockOffset(1_000_000_000, 10), ahead), (ClockOffset(-1_000_000, 10), behind)])
    assert spans == [
        ("draft", 0, 1, 0.0, 100.0),
        ("verify", 1, 2, 50.0, 400.0),
        ("drafted", 0, 1, 99.0, 99.0),
        ("verify", 2, 2, 500.0, 600.0),
    ]
    assert on_one_clock([], []) == []
