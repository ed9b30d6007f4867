"""What drafts cost and what they let expect, with made-up times."""

import pytest
from support import write_model

from ppsd_rt import Engine
from ppsd_rt.pipeline.price import expected_speed, measured_price, price
from ppsd_rt.statistics import Statistics


def of(rounds, seconds, judged=0, dropped=0):
    """The prompt's second is not part of it."""
    return Statistics(tokens=9, rounds=rounds, seconds=1 + seconds, ttft_seconds=1, judged=judged, dropped=dropped)


def test_the_price_is_what_rounds_take_beyond_plain_steps():
    """Plain steps of 2 s; 4 rounds of 3 drafts, the last one of 2, take 8 s as plain ones and 11 drafts of 0.5 s."""
    assert price(of(8, 16), of(4, 8 + 11 * 0.5, judged=7, dropped=4)) == pytest.approx(0.25)
    assert price(of(8, 16), of(4, 7.5, judged=7, dropped=4)) == 0, "a round of drafts is not shorter than a plain one"


def test_what_a_head_lets_expect():
    assert expected_speed(0.0, 0.2) == 1.0
    assert expected_speed(1.0, 0.2) == pytest.approx(16 / 4)
    assert 1.5 < expected_speed(0.8, 0.2) < expected_speed(0.9, 0.2) < expected_speed(0.9, 0.1)


def test_it_is_measured_in_answers_of_short_texts(tmp_path):
    folder = write_model(tmp_path / "model", max_position_embeddings=64)
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype="float32", threads=1)
    assert measured_price(engine, 3) >= 0
