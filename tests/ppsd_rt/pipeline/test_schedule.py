"""Schedules: the named points, their text form, and what makes no sense."""

import numpy as np
import pytest

from ppsd_rt.errors import UsageError
from ppsd_rt.pipeline.schedule import NAMES, PLAIN, Auto, Schedule, describe, named, parse_schedule
from ppsd_rt.pipeline.stop_rules import ConfidenceThreshold


def test_named_points_are_what_the_design_says():
    assert named("plain") == PLAIN
    assert not PLAIN.drafts
    eesd, ppsd, elastic = named("eesd"), named("ppsd"), named("elastic")
    assert (eesd.first_chunk == eesd.max_chunk) and not eesd.overlap
    assert ppsd.max_chunk == 1 and ppsd.overlap
    assert elastic.max_chunk > 1 and elastic.overlap


def test_changes():
    schedule = parse_schedule("eesd:length=3,stop_rule=confidence=0.7")
    assert schedule == Schedule(3, 3, 3, False, ConfidenceThreshold(0.7))
    assert parse_schedule("elastic:overlap=off,lookahead=9").lookahead == 9


@pytest.mark.parametrize("text", [*NAMES, "elastic:max_chunk=4", "eesd:stop_rule=calibrated", "ppsd:lookahead=5"])
def test_text_form_goes_both_ways(text):
    assert parse_schedule(describe(parse_schedule(text))) == parse_schedule(text)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "eesd:length=16", "eesd:length=-1", "eesd:length", "eesd:speed=3", "plain:lookahead=4"]
    + ["elastic:first_chunk=9", "elastic:overlap=yes", "elastic:lookahead=1", "eesd:stop_rule=never"],
)
def test_nonsense_is_refused_in_one_line(text):
    with pytest.raises(UsageError) as caught:
        parse_schedule(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("number", ["9" * 5000, "3000000000", "1025", "٣"])
@pytest.mark.parametrize(
    "text", ["elastic:lookahead=", "eesd:length=", "auto:lookup=", "lookup:lookup=", "ppsd:max_chunk="]
)
def test_numbers_that_no_schedule_has_are_refused_in_one_line(text, number):
    with pytest.raises(UsageError) as caught:
        parse_schedule(text + number)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("value", [10**5000, -1, 3.0, "3", None, True], ids=type)
def test_fields_are_whole_numbers_in_range(value):
    with pytest.raises(UsageError):
        Schedule(first_chunk=0, max_chunk=1, lookahead=value)
    with pytest.raises(UsageError):
        Auto(lookup=value)


def test_fields_may_be_numpys():
    schedule = Schedule(np.int64(3), np.int32(3), np.int8(3))
    assert schedule == Schedule(3, 3, 3)
    assert type(schedule.max_chunk) is int
