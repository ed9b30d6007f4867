"""ppsd_rt's dataclasses, read by the C++ extension (csrc/bindings/values.cpp). What it gives is compared elsewhere."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from ppsd_rt import SamplingParams, UsageError
from ppsd_rt._native import testing
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import Schedule, named
from ppsd_rt.sampling.params import LEAST_TEMPERATURE

EVERY = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, repetition_penalty=1.1, seed=2**64 - 1)


@pytest.mark.parametrize(
    "params",
    [
        EVERY,
        SamplingParams(temperature=LEAST_TEMPERATURE, seed=0),
        SamplingParams(temperature=1 / 3 * 3, top_p=1e-3, seed=1),
    ],
    ids=["every field", "the least temperature", "rounded"],
)
def test_numbers_of_32_bits_come_back_as_they_were_written(params):
    assert testing.read_sampling(params) == params


def test_what_is_no_schedule_is_refused():
    for wrong in (SamplingParams(), {"first_chunk": 1}, None):
        with pytest.raises(TypeError, match="Schedule"):
            testing.StopRule(wrong, 0)


@dataclass(frozen=True)
class Own:
    kind: ClassVar[str] = "own"


@dataclass(frozen=True)
class Nameless:
    threshold: float = 0.5


@pytest.mark.parametrize(("rule", "name"), [(Own(), "own"), (Nameless(), "without a kind")])
def test_a_stop_rule_that_is_not_known_is_an_error(rule, name):
    with pytest.raises(UsageError, match=f"stop rule {name} is unknown; CONTRIBUTING.md says how to add one"):
        testing.StopRule(Schedule(1, 1, 1, stop_rule=rule), 0)


def test_limits_beyond_all_positions():
    """The end is as far away as positions can be counted; stop ids end the text before."""
    limits = Limits(10**30, frozenset({7, 3}))
    rounds = testing.replay(named("plain"), [1, 5, 5, 3], 1, lambda *_: (0, 0.5), limits)
    assert [each.committed for each in rounds] == [(5,), (5,), (3,)]
