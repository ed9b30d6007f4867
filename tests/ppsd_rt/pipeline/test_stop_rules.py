"""Stop rules: what they decide, what they learn, and that they see the drafting side only."""

import random

import pytest

from ppsd_rt._native import testing
from ppsd_rt.errors import UsageError
from ppsd_rt.pipeline.schedule import Schedule
from ppsd_rt.pipeline.stop_rules import (
    BetaThompson,
    CalibratedThompson,
    Paying,
    Survival,
    describe_stop_rule,
    parse_stop_rule,
)


def start(rule, seed):
    return testing.StopRule(Schedule(1, 1, 1, stop_rule=rule), seed)


def share_stopped(controller, confidence=0.5, draws=2000):
    return sum(controller.stop(confidence) for _ in range(draws)) / draws


def test_beta_thompson_starts_undecided_and_learns():
    """A uniform prior stops half the time; the chance to go on tends to the observed acceptance."""
    controller = start(BetaThompson(discount=1.0), 7)
    assert share_stopped(controller) == pytest.approx(0.5, abs=0.05)
    for _ in range(100):
        controller.observe([(0.5, True)] * 9 + [(0.5, False)])
    assert share_stopped(controller) == pytest.approx(0.1, abs=0.03)


def test_beta_thompson_follows_a_change():
    forgetful, elephant = start(BetaThompson(discount=0.9), 1), start(BetaThompson(discount=1.0), 1)
    for controller in (forgetful, elephant):
        for _ in range(200):
            controller.observe([(0.5, True)])
        for _ in range(30):
            controller.observe([(0.5, False)])
    assert share_stopped(forgetful) > 0.8
    assert share_stopped(elephant) < 0.3


def test_calibrated_thompson_trusts_confidence_first_and_verdicts_later():
    controller = start(CalibratedThompson(discount=1.0), 5)
    assert share_stopped(controller, 0.95) == pytest.approx(0.05, abs=0.03)
    assert share_stopped(controller, 0.15) == pytest.approx(0.85, abs=0.04)
    for _ in range(200):  # an overconfident draft: wrong half of the time when it says 0.95
        controller.observe([(0.95, True), (0.95, False)])
    assert share_stopped(controller, 0.95) == pytest.approx(0.5, abs=0.05)
    assert share_stopped(controller, 0.15) == pytest.approx(0.85, abs=0.04)  # other bins have learned nothing


@pytest.mark.parametrize(("acceptance", "cost", "best"), [(0.8, 0.05, 8), (0.8, 0.4, 2), (0.5, 0.05, 3), (0.3, 0.8, 1)])
def test_paying_comes_to_the_length_that_is_fastest(acceptance, cost, best):
    """Where all drafts are alike, the best length has a closed form."""

    def speed(length):
        return sum(acceptance**place for place in range(length + 1)) / (1 + length * cost)

    assert max(range(1, 16), key=speed) == best
    controller, draws = start(Paying(cost, discount=0.999), 0), random.Random(1)
    lengths = []
    for _ in range(3000):
        length = 1
        while not controller.stop(acceptance) and length < 15:
            length += 1
        rights = [draws.random() < acceptance for _ in range(length)]
        judged = rights.index(False) + 1 if False in rights else length
        controller.observe([(acceptance, right) for right in rights[:judged]])
        lengths.append(length)
    late = lengths[1000:]
    assert sum(map(speed, late)) / len(late) > 0.98 * speed(best)
    assert abs(sum(late) / len(late) - best) < 1.5


def test_thresholds_may_depend_on_how_many_drafts_there_are():
    controller = start(Survival(copy_threshold=0.9, thresholds=(0.0, 0.1, 0.7), copy_thresholds=(0.3, 0.6)), 0)
    assert controller.may_copy(0.31, False) and not controller.may_copy(0.29, False)
    assert not controller.stop_copying(0.8)
    assert controller.may_copy(0.76, False) and not controller.may_copy(0.74, False)
    assert controller.stop_copying(0.8), "0.64 is less than 0.7"
    assert controller.may_copy(0.95, False) and not controller.may_copy(0.9, False), "the last one goes for all others"
    controller.observe([])  # a round later
    assert controller.may_copy(0.31, False)


def test_paying_spends_less_where_the_head_doubts():
    controller = start(Paying(0.2), 0)
    verdict = [(0.9, True)] * 4 + [(0.1, False)]
    for _ in range(50):
        for confidence, _right in verdict:
            controller.stop(confidence)
        controller.observe(verdict)
    assert not controller.stop(0.9)
    assert controller.stop(0.1)
    controller.observe([])
    assert not controller.stop(0.9)  # another chunk


@pytest.mark.parametrize(
    "text", ["fixed", "confidence", "beta", "calibrated", "survival", "confidence=0.75", "paying=0.05"]
)
def test_text_form_goes_both_ways(text):
    rule = parse_stop_rule(text)
    assert parse_stop_rule(describe_stop_rule(rule)) == rule


@pytest.mark.parametrize(
    "text", ["", "thompson", "beta=0.5", "confidence=x", "confidence=1.5", "paying=0", "paying=nan"]
)
def test_unknown_rules_are_refused(text):
    with pytest.raises(UsageError):
        parse_stop_rule(text)


def test_bad_numbers_are_refused():
    for make in (lambda: BetaThompson(0), lambda: CalibratedThompson(bins=0), lambda: CalibratedThompson(discount=2)):
        with pytest.raises(UsageError):
            make()
