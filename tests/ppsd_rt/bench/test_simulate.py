"""Simulated time and closed forms: against the papers, against each other, and sums done by hand."""

from dataclasses import replace

import pytest

from ppsd_rt.bench.closed_forms import Pipeline, closed_form
from ppsd_rt.bench.simulate import simulate
from ppsd_rt.errors import UsageError
from ppsd_rt.pipeline.schedule import MAX_CHUNK, PLAIN, Schedule, named, parse_schedule

PPSD = named("ppsd")


def equal(stages, link=0.0):
    """Stages that each take an equal part of a plain token's second."""
    return Pipeline((1 / stages,) * stages, link=link)


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_equal_stages_give_the_formula_of_the_paper(acceptance):
    for stages in (2, 3, 8):
        published = stages / (acceptance + (1 - acceptance) * stages)
        assert closed_form(PPSD, equal(stages), acceptance) == pytest.approx(published)


def test_draft_then_verify_by_hand():
    """All right: 4 tokens for 3 drafts of 1 + 0.5, a row of 1, a pass of 4 rows of 2 * (1 + 3 * 0.25), links of 2."""
    pipeline = Pipeline((1.0, 2.0), head=0.5, row_share=0.25, link=1.0)
    assert closed_form(Schedule(3, 3, 3), pipeline, 1.0) == pytest.approx(5 * 4 / (4.5 + 1 + 3.5 + 2))
    assert closed_form(Schedule(3, 3, 3), pipeline, 0.0) == pytest.approx(5 * 1 / (4.5 + 1 + 3.5 + 2))


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 0.9, 1.0])
@pytest.mark.parametrize(
    ("schedule", "pipeline"),
    [
        *((Schedule(length, length, length), Pipeline((0.15, 0.7), 0.05)) for length in (1, 5, MAX_CHUNK)),
        *((schedule, Pipeline((0.5, 0.3, 1.0, 0.2), 0.1, link=0.3)) for schedule in (PPSD, Schedule(4, 4, 4))),
        (replace(PPSD, lookahead=3), equal(8, link=0.3)),  # few drafts do not fill a long pipeline
    ],
)
def test_the_simulator_comes_to_the_closed_form(schedule, pipeline, acceptance):
    expected = closed_form(schedule, pipeline, acceptance)
    assert simulate(schedule, pipeline, acceptance, 5000, seed=1).speedup == pytest.approx(expected, rel=0.04)


def test_where_there_is_no_formula():
    pipeline = equal(4)
    assert closed_form(PLAIN, pipeline, 0.5) == 1
    for name in ("elastic", "eesd", "eesd:length=4,stop_rule=confidence=0.5", "ppsd:stop_rule=beta"):
        assert closed_form(parse_schedule(name), pipeline, 0.5) is None
    assert closed_form(Schedule(2, 4, 4), pipeline, 0.5) is None


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("link", [0.0, 3.0])
def test_a_plain_token_passes_every_stage_and_link_once(stages, link):
    pipeline = Pipeline((0.26, *[0.5] * stages), 9.0, 0.01, link)
    assert pipeline.plain_step == pytest.approx(0.26 + 0.5 * stages + link * (stages + 1))
    found = simulate(PLAIN, pipeline, 0.5, tokens=50)
    assert (found.seconds, found.speedup) == pytest.approx((50 * pipeline.plain_step, 1), rel=1e-9)


def test_links_delay_a_full_pipeline_only_at_rejections():
    """All right: a token leaves at every 1/n. All wrong: every token pays for every link."""
    near, far = (Pipeline((0.25,) * 4, link=link) for link in (0.0, 0.1))
    assert simulate(PPSD, far, 1.0, 3000).seconds == pytest.approx(simulate(PPSD, near, 1.0, 3000).seconds, rel=0.01)
    assert simulate(PPSD, far, 0.0, 300).seconds == pytest.approx(300 * (1 + 4 * 0.1), rel=1e-6)


def test_a_slow_stage_takes_two_rows_at_a_time():
    """One stage of 4 s beside draft steps of 1 s, all right: drafting gets far ahead and then waits. A pass commits two
    tokens: a draft token and, the last committed token's row going along, the one after it."""
    assert simulate(PPSD, Pipeline((1.0, 4.0)), 1.0, 2000).seconds == pytest.approx(1000 * 4, rel=0.01)


@pytest.mark.parametrize("schedule", ["elastic", "elastic:first_chunk=0", "ppsd", "eesd:length=4,stop_rule=fixed"])
def test_every_token_is_decoded_whatever_is_right(schedule):
    """Neither faster than its slowest stage allows, nor slower than one round of drafts a token."""
    schedule, pipeline = parse_schedule(schedule), Pipeline((0.1, 0.3, 0.2), 0.02, 0.05, 0.04)
    seconds = []
    for acceptance in (0.0, [0.9, 0.5, 0.1], 1.0):
        found = simulate(schedule, pipeline, acceptance, 300, seed=7)
        assert found == simulate(schedule, pipeline, acceptance, 300, seed=7)
        assert 300 / 16 <= found.passes <= 300
        assert found.passes * 0.3 <= found.seconds <= 300 * 2 * (pipeline.plain_step + 4 * 0.12)
        seconds.append(found.seconds)
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("schedule", ["eesd", "lookup", "elastic:stop_rule=beta"])
def test_what_depends_on_the_text_is_refused(schedule):
    with pytest.raises(UsageError, match="simulate stop_rule=fixed"):
        simulate(parse_schedule(schedule), Pipeline((1.0, 1.0)), 0.5)
