"""The learning rate by width, and what follows from the first steps."""

import math

import pytest

from ppsd_rt.distill.rate import MOST_TRIALS, first_rate, judged, next_rate, rate_to_go_on, trial_steps

NAN = float("nan")


def test_the_first_rate_goes_through_what_was_measured():
    assert (first_rate(576), first_rate(1536), first_rate(64)) == (5e-3, 5e-4, 5e-3)
    assert first_rate(4096) < first_rate(2048) < 5e-4


def test_a_trained_head_goes_on_more_slowly_the_shorter_the_run():
    assert [rate_to_go_on(576, steps) for steps in (3, 75, 300, 9000)] == [3e-4, 1.5e-3, 3e-3, 3e-3]


def test_short_runs_have_no_trial():
    assert [trial_steps(steps, 4096) for steps in (1, 49, 50, 9999)] == [0, 0, 25, 25]
    assert [trial_steps(steps, 2048) for steps in (50, 99, 100)] == [0, 0, 50]
    assert trial_steps(50, 1 << 20) == 25


def test_a_trial_is_judged_by_the_best_head_in_its_last_quarter():
    """And no head that has diverged hides behind another one."""
    steps = [[9.0, 9.0, 7.0]] * 6 + [[8.0, 5.0, 6.0], [3.0, 4.0, 4.0]]
    assert judged(steps) == (4, 5)
    assert judged([[NAN, 6.4, 5]]) == judged([[6.4, NAN, 5]]) == (math.inf, 5)


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ([9], 3),  # lower
        ([math.inf], 3),
        ([9, 8], 1),  # it helps: lower still
        ([math.inf] * 2, 1),
        ([8, 9], 9),  # it does not: back
        ([8, math.inf], 1),  # nothing is known of this one
        ([9, 8, 7, 6, 5], 9 / 81),  # enough: go on
        ([math.inf] * MOST_TRIALS, 9 / 81),
    ],
)
def test_the_next_rate(losses, rate):
    assert next_rate([(loss, 9 / 3**number) for number, loss in enumerate(losses)]) == pytest.approx(rate)
