"""Drafts under load: rows go where they earn most. Pure arithmetic, on made-up times of passes."""

import itertools

import pytest

from ppsd_rt._native import testing


def times(row=0.0, whole=10.0, share=0.2):
    """Seconds of early layers, drafts, late layers and LM head: `whole` for any rows, and `row` more for each."""
    rows = range(1, 65)
    early = [(r, share * (whole + row * r)) for r in rows]
    late = [(r, (1 - share) * 0.8 * (whole + row * r)) for r in rows]
    choose = [(r, (1 - share) * 0.2 * (whole + row * r)) for r in rows]
    return early, [(r, 1.2 * seconds) for r, seconds in early], late, choose


def allot(seen, acceptance, others=0, writing=0, left=None, most=15, margin=1.0):
    left = 64 - len(acceptance) - others if left is None else left
    drafts, worth, row, draft = testing.allot(seen, 0.2, acceptance, others, writing, left, most, margin)
    return drafts, worth, row, draft


def rate(seen, acceptance, drafts, others=0):
    """Tokens per second of a round with these drafts, as the model of it says."""
    early, draft, late, choose = map(dict, seen)
    rows = len(acceptance) + others + sum(drafts)
    tokens = sum(sum(a**j for j in range(k + 1)) for a, k in zip(acceptance, drafts, strict=True))
    own = len(acceptance) + others
    steps = (draft[sum(k >= level for k in drafts)] for level in range(1, max(drafts, default=0) + 1))
    return tokens / (early[own] + sum(steps) + late[rows] + choose[rows])


def test_long_drafts_alone_and_none_where_rows_are_dear():
    cheap, dear = times(row=0.1), times(row=10.0, whole=0.0)
    alone, *_ = allot(cheap, [0.9])
    assert alone[0] >= 5
    assert allot(dear, [0.9])[0] == [0]
    crowd, *_ = allot(cheap, [0.9] * 30)
    assert max(crowd) < alone[0]
    assert allot(dear, [0.9] * 30)[0] == [0] * 30


def test_the_best_answers_have_the_longest_drafts():
    drafts, *_ = allot(times(row=0.2), [0.2, 0.95, 0.7, 0.0])
    assert drafts[1] >= drafts[2] >= drafts[0] >= drafts[3] == 0
    assert drafts[1] > drafts[0]


@pytest.mark.parametrize("row", [0.05, 0.3, 1.0, 3.0])
@pytest.mark.parametrize("acceptance", [[0.8], [0.9, 0.4], [0.7, 0.7, 0.2], [0.5, 0.95]])
def test_nearly_the_best_of_all(row, acceptance):
    """Beside every way to give up to 8 drafts to each."""
    seen = times(row=row)
    drafts, worth, *_ = allot(seen, acceptance, most=8)
    best = max(rate(seen, acceptance, d) for d in itertools.product(range(9), repeat=len(acceptance)))
    assert rate(seen, acceptance, drafts) >= 0.97 * best
    assert worth == pytest.approx(rate(seen, acceptance, drafts), rel=0.05)
    assert worth >= rate(seen, acceptance, [0] * len(acceptance)) * 0.999


def test_a_margin_makes_drafts_dearer():
    seen, acceptance = times(row=0.1), [0.8] * 3
    (free, _, row, draft), (held, _, dear_row, dear_draft) = (allot(seen, acceptance, margin=m) for m in (1.0, 2.0))
    assert 0 < sum(held) < sum(free)
    assert (dear_row, dear_draft) == pytest.approx((2 * row, 2 * draft))


def test_bounds():
    drafts, *_ = allot(times(), [0.99] * 10, left=17)
    assert 0 < sum(drafts) <= 17
    assert max(allot(times(), [0.999], most=4)[0]) == 4
    assert allot(([], [], [], []), [0.9])[0] == [0], "nothing has been measured: the first rounds are plain"
    assert allot(times(), [])[0] == []


def test_times_of_few_sizes():
    """A guess divides the time of passes that all had as many rows; others say better, and a disturbed one little."""
    same = [(1, 10.0)] * 20
    row = allot((same, [], same, same), [0.9])[2]
    assert row == pytest.approx(2 * 10 / 6, rel=0.01), "as if reading took as long as five rows"
    line = [(rows, 9.0 + rows) for rows in (1, 64, 1, 1, 1, 1)]
    assert allot((line, [], line, line), [0.9])[2] == pytest.approx(2.0, rel=0.05)
    disturbed = [*line * 3, (1, 1000.0), *line]
    assert allot((disturbed, [], disturbed, disturbed), [0.9])[2] == pytest.approx(2.0, rel=0.1)


def test_drafts_cost_their_share_of_the_weights_until_one_is_made():
    early, draft, late, choose = times(row=0.1)
    guessed, made = (allot((early, kind, late, choose), [0.9])[3] for kind in ([], draft))
    assert guessed == pytest.approx(made, rel=0.25)
