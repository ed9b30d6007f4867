"""The closed forms: what the papers say for equal stages, and the simulator for all others."""

from dataclasses import replace

import pytest
from cost_support import equal_stages, stage_costs, table
from hypothesis import given, settings
from hypothesis import strategies as st
from support import slow

from ppsd_rt.bench.simulate import simulate
from ppsd_rt.pipeline.schedule import PLAIN, Schedule, named, parse_schedule
from ppsd_rt.planning.closed_forms import closed_form

PPSD = named("ppsd")


def speedup(schedule, costs, acceptance, tokens):
    """How many times faster than plain decoding on the same stages."""
    return simulate(schedule, costs, acceptance, tokens).tokens_per_second * costs.plain_step


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
def test_equal_stages_give_the_formula_of_the_paper(stages, acceptance):
    published = stages / (acceptance + (1 - acceptance) * stages)
    assert closed_form(PPSD, equal_stages(stages), acceptance) == pytest.approx(published)


def test_draft_then_verify_by_hand():
    """All right: 4 tokens for 3 drafts of 1 + 0.5, a row of 1, a pass over 4 rows of 2 + 4 * 0.25, links of 2."""
    costs = stage_costs(table(1.0), 0.5, (table(2.0, 0.25),), links=1.0)
    assert closed_form(Schedule(3, 3, 3), costs, 1.0) == pytest.approx(5.25 * 4 / (4.5 + 1 + 3 + 2))
    assert closed_form(Schedule(3, 3, 3), costs, 0.0) == pytest.approx(5.25 * 1 / (4.5 + 1 + 3 + 2))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    verify=st.lists(st.floats(0.1, 1), min_size=2, max_size=6),
    step=st.floats(0.1, 1),
    head=st.floats(0, 0.3),
    link=st.floats(0, 0.5),
    link_row=st.floats(0, 0.1),
    acceptance=st.sampled_from([0.0, 0.5, 0.8, 1.0]),
)
def test_uneven_stages_with_links_against_the_simulator(verify, step, head, link, link_row, acceptance):
    costs = stage_costs(table(step), head, tuple(map(table, verify)), link, link_row=link_row)
    for schedule in (PPSD, Schedule(4, 4, 4)):
        expected = closed_form(schedule, costs, acceptance)
        assert speedup(schedule, costs, acceptance, 10_000) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("acceptance", [0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("lookahead", [slow(1), 3, slow(15)])
def test_few_drafts_do_not_fill_a_long_pipeline(lookahead, acceptance):
    costs = equal_stages(8, links=0.3)
    schedule = replace(PPSD, lookahead=lookahead)
    expected = closed_form(schedule, costs, acceptance)
    assert speedup(schedule, costs, acceptance, 20_000) == pytest.approx(expected, rel=0.03)


def test_rows_on_a_slow_link_set_the_pace():
    """A row takes 2 s on each of the two links that carry rows, the verdict nothing; stages take 1 s."""
    costs = stage_costs(table(1.0), 0.0, (table(1.0), table(1.0)), links=0.5, link_row=2.0)
    assert costs.plain_step == pytest.approx(3 * 1 + 3 * 0.5 + 2 * 2)
    assert simulate(PLAIN, costs, 0.0, tokens=8).seconds == pytest.approx(8 * 8.5)
    assert simulate(PPSD, costs, 1.0, tokens=1000).seconds == pytest.approx(1000 * 2, rel=0.01)
    chunk = simulate(Schedule(3, 3, 3), costs, 1.0, tokens=400)  # 4 rows at a time: 4 steps, 2 passes, links of 0.5 + 8
    assert chunk.seconds == pytest.approx(100 * (4 + 2 + 3 * 0.5 + 2 * 8), rel=0.01)


def test_where_there_is_no_formula():
    costs = equal_stages(4)
    assert closed_form(PLAIN, costs, 0.5) == 1
    for name in ("elastic", "eesd", "eesd:length=4,stop_rule=confidence=0.5", "ppsd:stop_rule=beta"):
        assert closed_form(parse_schedule(name), costs, 0.5) is None
    assert closed_form(Schedule(2, 4, 4), costs, 0.5) is None
