"""The figures of docs/reference/statistics.md, worked out by hand for a small answer."""

import json

import pytest

from ppsd_rt.pipeline.rounds import Draft, Round
from ppsd_rt.statistics import Statistics

D = Draft(1, 0.5)
ROUNDS = [
    (Round(0, 9, 9, (1,), prompt=True), 0.5),
    (Round(0, 10, 4, (1, 1, 1, 1), (D, D, D), accepted=3), 0.1),  # three drafts accepted, and the bonus
    (Round(0, 14, 4, (1, 2), (D, D), accepted=1, dropped=1), 0.1),  # one accepted, one corrected, one unjudged
    (Round(1, 16, 4, (2,), (D,), accepted=0, dropped=2), 0.1),
    (Round(2, 17, 1, (2,)), 0.1),  # nothing drafted
]


@pytest.fixture
def statistics():
    s = Statistics("eesd", "torch", "float32", 1, prompt_tokens=9)
    for round, seconds in ROUNDS:
        s.add(round, seconds)
    return s


def test_counts(statistics):
    s = statistics
    assert (s.tokens, s.rounds, s.rows, s.accepted, s.judged, s.dropped) == (9, 4, 13, 4, 6, 3)


def test_derived_figures(statistics):
    s = statistics
    assert s.acceptance == pytest.approx(4 / 6)
    assert s.acceptance_by_position == pytest.approx([2 / 3, 1 / 2, 1.0])
    assert s.tokens_per_round == pytest.approx(8 / 4)
    assert (s.seconds, s.ttft_seconds) == pytest.approx((0.9, 0.5))
    assert s.tokens_per_second == pytest.approx(9 / 0.9)
    assert s.decode_tokens_per_second == pytest.approx(8 / 0.4)
    assert s.ms_per_token == pytest.approx(50)


def test_json(statistics):
    figures = json.loads(json.dumps(statistics.as_dict()))
    assert figures["accepted_histogram"] == [2, 1, 0, 1]
    wanted = "tokens seconds tokens_per_second ttft_seconds rounds acceptance tokens_per_round schedule backend dtype"
    assert figures.keys() >= set(wanted.split())
    assert figures["threads"] == 1


def test_an_answer_of_one_token_has_no_rates():
    s = Statistics()
    s.add(*ROUNDS[0])
    assert (s.acceptance, s.tokens_per_round, s.decode_tokens_per_second, s.ms_per_token) == (None,) * 4
    assert s.as_dict()["accepted_histogram"] == []
