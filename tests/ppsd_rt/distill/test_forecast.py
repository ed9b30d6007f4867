"""What a run will take, with made-up clocks; the learning rate by width, and what follows from the first steps."""

import itertools
import math
from types import SimpleNamespace

import pytest
from support import tiny_model

from ppsd_rt.distill.forecast import Forecast, sampling_speed, step_seconds
from ppsd_rt.distill.rate import MOST_TRIALS, first_rate, judged, next_rate, rate_to_go_on, trial_steps
from ppsd_rt.distill.shards import HELD_OUT_SLOTS
from ppsd_rt.distill.train import TrainSettings
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import HeadInfo


class Writer:
    slots, capacity, stride = 8, 512, 2

    def __init__(self):
        self.texts, self.steps = [], 0

    def write(self, ids, temperature, seed, most):
        assert most > self.stride * 6, "no text may end before all is measured"
        self.texts.append(SimpleNamespace(left=len(ids), begun=False))
        return self.texts[-1]

    def step(self):
        self.steps += 1
        for text in self.texts:
            text.left = max(text.left - 50, 0)
            text.begun = text.left == 0


def ticking(seconds):
    """A clock that stands `seconds` later whenever it is read."""
    return itertools.count(0, seconds).__next__


def test_sampling_speed_counts_what_comes_after_the_first_step():
    writer = Writer()
    assert sampling_speed(writer, ticking(0.5), steps=6) == 8 * 2 * 5 / 0.5
    assert len(writer.texts) == 8 and writer.steps == 4 + 5  # four to read


@pytest.mark.parametrize("states", [True, False])
def test_a_training_step_is_measured_once_all_is_warm(states):
    model = tiny_model()
    head = ExitHead.from_model(model, HeadInfo("feedback", 2, "tiny", "0"), [*range(50)])
    assert step_seconds(model, [head], TrainSettings(batch_tokens=300), states, ticking(2)) == 2


def test_a_forecast_adds_up():
    forecast = Forecast(1000, 2.0, TrainSettings(batch_tokens=650, epochs=2))
    assert forecast.sampling(5000) == 5
    assert forecast.settings.steps(5000) == 10
    assert forecast.training(5000) == 20
    shard = 1024 / 1000 + forecast.training(1024)
    assert forecast.shards_within((1.024 + 3 * shard) / 3600, slots=1) == 3
    assert forecast.shards_within(1.0 / 3600, slots=1) == 0
    few, many = HELD_OUT_SLOTS * 1.024, 1000 * shard
    assert forecast.shards_within((few + 2.01 * many) / 3600, slots=1000) == 2, (
        "what is held out does not grow with the slots"
    )


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
    assert judged([[math.nan, 6.4, 5]]) == judged([[6.4, math.nan, 5]]) == (math.inf, 5)


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
