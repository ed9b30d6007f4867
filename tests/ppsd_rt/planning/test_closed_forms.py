"""The closed forms: what the papers say for equal stages, and the simulator for all others."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow

from ppsd_rt.bench.simulate import simulate
from ppsd_rt.pipeline.schedule import PLAIN, Schedule, named, parse_schedule
from ppsd_rt.planning.closed_forms import Pipeline, closed_form

PPSD = named("ppsd")


def equal(stages, link=0.0):
    """Stages that each take an equal part of a plain token's second."""
    return Pipeline((1 / stages,) * stages, link=link)


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_equal_stages_give_the_formula_of_the_paper(stages, acceptance):
    published = stages / (acceptance + (1 - acceptance) * stages)
    assert closed_form(PPSD, equal(stages), acceptance) == pytest.approx(published)


def test_draft_then_verify_by_hand():
    """All right: 4 tokens for 3 drafts of 1 + 0.5, a row of 1, a pass of 4 rows of 2 * (1 + 3 * 0.25), links of 2."""
    pipeline = Pipeline((1.0, 2.0), head=0.5, row_share=0.25, link=1.0)
    assert closed_form(Schedule(3, 3, 3), pipeline, 1.0) == pytest.approx(5 * 4 / (4.5 + 1 + 3.5 + 2))
    assert closed_form(Schedule(3, 3, 3), pipeline, 0.0) == pytest.approx(5 * 1 / (4.5 + 1 + 3.5 + 2))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    verify=st.lists(st.floats(0.1, 1), min_size=2, max_size=6),
    step=st.floats(0.1, 1),
    head=st.floats(0, 0.3),
    link=st.floats(0, 0.5),
    acceptance=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
)
def test_uneven_stages_with_links_against_the_simulator(verify, step, head, link, acceptance):
    pipeline = Pipeline((step, *verify), head, link=link)
    for schedule in (PPSD, Schedule(4, 4, 4)):
        expected = closed_form(schedule, pipeline, acceptance)
        assert simulate(schedule, pipeline, acceptance, 10_000).speedup == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("lookahead", [slow(1), 3, slow(15)])
def test_few_drafts_do_not_fill_a_long_pipeline(lookahead, acceptance):
    schedule, pipeline = replace(PPSD, lookahead=lookahead), equal(8, link=0.3)
    expected = closed_form(schedule, pipeline, acceptance)
    assert simulate(schedule, pipeline, acceptance, 10_000, seed=1).speedup == pytest.approx(expected, rel=0.03)


def test_where_there_is_no_formula():
    pipeline = equal(4)
    assert closed_form(PLAIN, pipeline, 0.5) == 1
    for name in ("elastic", "eesd", "eesd:length=4,stop_rule=confidence=0.5", "ppsd:stop_rule=beta"):
        assert closed_form(parse_schedule(name), pipeline, 0.5) is None
    assert closed_form(Schedule(2, 4, 4), pipeline, 0.5) is None
