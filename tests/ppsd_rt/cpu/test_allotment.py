"""Drafts under load: rows go where they earn most. Pure arithmetic, on made-up times of passes."""

import itertools
import random
from statistics import mean

import numpy as np
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
    return testing.allot(seen, 0.2, acceptance, others, writing, left, most, margin)[:4]


def copies(seen, answers, margin=2.0):
    return testing.allot(seen, 0.2, [0.5] * answers, 0, 0, 64 - answers, 15, margin)[4]


def rate(seen, acceptance, drafts, others=0):
    """Tokens per second of a round with these drafts, as the model of it says."""
    early, draft, late, choose = map(dict, seen)
    rows = len(acceptance) + others + sum(drafts)
    tokens = sum(sum(a**j for j in range(k + 1)) for a, k in zip(acceptance, drafts, strict=True))
    own = len(acceptance) + others
    steps = (draft[sum(k >= level for k in drafts)] for level in range(1, max(drafts, default=0) + 1))
    return tokens / (early[own] + sum(steps) + late[rows] + choose[rows])


@pytest.mark.parametrize(("passes", "drafts"), [(1, True), (2, True), (3, False), (4, False)])
def test_over_ranks_rank_0_drafts_while_it_would_wait(passes, drafts):
    """Four equal stages: with two passes under way rank 0 waits half of the time, with four it never does."""
    times_of_four = times(row=0.02, whole=10.0, share=0.25)
    given = testing.allot(times_of_four, 0.2, [0.6], 0, 0, 32, 15, 1.1, 0, passes)[0]
    assert (given[0] > 0) == drafts


def test_long_drafts_alone_and_none_where_rows_are_dear():
    cheap, dear = times(row=0.1), times(row=10.0, whole=0.0)
    alone, *_ = allot(cheap, [0.9])
    assert alone[0] >= 5
    assert allot(dear, [0.9])[0] == [0]
    crowd, *_ = allot(cheap, [0.9] * 30)
    assert max(crowd) < alone[0]
    assert allot(dear, [0.9] * 30)[0] == [0] * 30


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
    free, held = (allot(seen, acceptance, margin=m)[0] for m in (1.0, 2.0))
    assert 0 < sum(held) < sum(free)
    (*_, row, draft), (*_, dear_row, dear_draft) = (allot(seen, acceptance, left=1, margin=m) for m in (1.0, 2.0))
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


# -- many rounds, in simulated time ------------------------------------------------------------------------------------

# Of one row of a pass, by rows: two kernels of AVX2 (int8, int4), which take four rows together, and a cheap one.
ROWS = {
    "int8": {1: 1.0, 2: 1.1, 4: 1.37, 8: 2.0, 16: 4.0, 64: 14.8},
    "int4": {1: 1.0, 2: 1.17, 4: 1.76, 8: 3.2, 16: 5.8, 64: 23.0},
    "cheap": {1: 1.0, 4: 1.05, 16: 1.3, 64: 2.5},
}


def pass_seconds(kind, rows):
    """Between the measured ones in steps of four rows."""
    rows = rows if rows <= 4 else -(-rows // 4) * 4
    return float(np.interp(rows, [*ROWS[kind]], [*ROWS[kind].values()]))


BURST = 0.25, 1.5  # chance that requests are read during a pass, and how many times longer it then takes


def speed(kind, answers, acceptance, rounds=200, seeds=3, bursts=False):
    """Tokens per second over plain decoding's, in the mean.

    Three answers in ten find something to copy in a round, which is right a little more often than a draft.
    """
    return mean(_speed(kind, answers, acceptance, rounds, random.Random(seed), bursts) for seed in range(seeds))


def _speed(kind, answers, acceptance, rounds, dice, bursts):
    seen = ([], [], [], [])
    parts = (0.2, 0.2, 0.64, 0.16)  # early layers, drafts, late layers, LM head
    seconds = plain = tokens = 0.0

    def take(part, rows):
        took = parts[part] * pass_seconds(kind, rows)
        if bursts and dice.random() < BURST[0]:
            took *= BURST[1]
        seen[part].append((rows, took * dice.uniform(0.97, 1.03)))
        return took

    for _ in range(rounds):
        given = testing.allot(seen, 0.2, [acceptance] * answers, 0, 0, 64 - answers, 15, 2.0, copying=answers)
        drafts, copied = given[0], 0
        if given[4]:
            copied = sum(dice.random() < 0.3 for _ in range(answers))
        for level in range(1, max(drafts) + 1):
            seconds += take(1, sum(k >= level for k in drafts))
        if not sum(drafts):
            seconds += take(0, answers)
        seconds += sum(take(part, answers + sum(drafts) + copied) for part in (2, 3))
        for count in drafts:
            right = next((k for k in range(count) if dice.random() >= acceptance), count)
            tokens += 1 + right
        tokens += sum(dice.random() < 0.4 + acceptance for _ in range(copied))
        plain += pass_seconds(kind, answers) * (1.0 + bursts * BURST[0] * (BURST[1] - 1.0))
    return tokens / seconds * plain / (answers * rounds)


@pytest.mark.parametrize(("answers", "least"), [(8, 0.99), (16, 0.975)])
def test_passes_that_are_held_up_now_and_then_make_no_row_cheap(answers, least):
    """One number of rows seemed dear and the next free: drafts took 2 to 6 % of the speed."""
    for kind in ("int8", "int4"):
        for acceptance in (0.2, 0.35, 0.5):
            assert speed(kind, answers, acceptance, seeds=6, bursts=True) >= least, (kind, acceptance)


def test_a_sure_copy_must_pay_too():
    """Eight answers: the ninth row costs half a round, which is four tokens."""
    plain = [(8, 2.0)] * 50
    assert copies((plain, [], plain, plain), 8), "nobody knows it yet"
    tried = [*plain, (9, 3.0), *plain]
    assert not copies((plain, [], tried, tried), 8)
    faster = [*tried, *((8, 1.0),) * 10]
    assert not copies((plain, [], faster, faster), 8), "all passes are faster, not only those that were made since"
    assert copies((plain, [], [*plain, (9, 2.05)], plain), 8)


def test_a_copy_costs_what_it_does_where_that_is_dearest():
    """The ninth row is free, and the tenth costs a quarter of the round: nobody knows how many copies there will be."""
    seen = [(8, 2.0), (9, 2.0), (10, 2.5)] * 50
    one, many = (testing.allot((seen, [], seen, seen), 0.2, [0.5] * 8, 0, 0, 56, 15, copying=n)[2] for n in (1, 8))
    assert one == pytest.approx(0.0, abs=0.05)
    assert many == pytest.approx(0.5, rel=0.1)
