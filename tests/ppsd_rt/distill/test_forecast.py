"""What a run will take, with made-up clocks."""

import itertools
from types import SimpleNamespace

import pytest
from support import tiny_model

from ppsd_rt.distill.forecast import Forecast, sampling_speed, step_seconds
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
