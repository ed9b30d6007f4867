"""The learning rate by width, and what follows from the first steps."""

import math

import pytest

from ppsd_rt.distill.rate import MOST_TRIALS, Trial, ended, first_rate, judging, next_rate, rate_to_go_on, trial_steps

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


def test_the_best_head_judges_and_none_that_has_diverged_hides():
    assert judging([8.0, 6.4]) == judging([6.4, 8.0]) == 6.4
    assert all(math.isnan(judging(losses)) for losses in ([math.nan, 6.4], [6.4, math.nan]))


def test_a_trial_is_judged_by_its_last_quarter():
    trial = ended(0.1, [9, 9, 9, 9, 9, 9, 5, 3], [7, 7, 7, 7, 7, 7, 6, 4])
    assert trial == Trial(0.1, loss=4, guess=5)
    assert trial.learns
    assert not Trial(0.1, 5, 5).learns
    assert not Trial(0.1, NAN, 5).learns


@pytest.mark.parametrize(
    ("losses", "rate"),
    [
        ([9], 3),  # lower
        ([NAN], 3),
        ([9, 8], 1),  # it helps: lower still
        ([NAN, NAN], 1),
        ([8, 9], 9),  # it does not: back
        ([8, NAN], 1),  # nothing is known of this one
        ([9, 8, 7, 6, 5], None),  # enough: go on
        ([NAN] * MOST_TRIALS, None),
    ],
)
def test_the_next_rate(losses, rate):
    trials = [Trial(9 / 3**number, loss, guess=1) for number, loss in enumerate(losses)]
    assert next_rate(trials) == (rate if rate is None else pytest.approx(rate))
