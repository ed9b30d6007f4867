"""Simulated time against the closed forms of the papers, and sums done by hand."""

from itertools import pairwise

import pytest
from cost_support import equal_stages, stage_costs, table
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import schedules

from ppsd_rt._native import testing
from ppsd_rt.bench.simulate import simulate, utilisation
from ppsd_rt.pipeline.schedule import MAX_CHUNK, MAX_ROWS, PLAIN, Schedule, named

PPSD = named("ppsd")


def enough(acceptance):
    """Tokens for the mean to be within 2 %."""
    return 20_000 if 0 < acceptance < 1 else 1500


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("length", [1, 2, 5, MAX_CHUNK])
def test_draft_then_verify(length, acceptance):
    """(1 - alpha^(K+1)) / (1 - alpha) tokens per K t_draft + t_verify(K + 1).

    t_draft is a pass over [0, E) and the head; t_verify is the pass over [E, L) and, before it, the row of the last
    draft token through [0, E). A corrected or bonus token's row goes along with the next draft step, where one pass
    takes two rows; so the passes over [0, E) are given the same cost for any number of rows.
    """
    costs = stage_costs(table(0.15), 0.05, (table(0.7, row=0.02),))
    chunk = Schedule(length, length, length)
    per_round = sum(acceptance**i for i in range(length + 1))
    seconds = length * (0.15 + 0.05) + 0.15 + costs.stages[0][length]
    simulation = simulate(chunk, costs, acceptance, enough(acceptance))
    assert simulation.tokens_per_second == pytest.approx(per_round / seconds, rel=0.02)
    assert simulation.statistics.tokens_per_round == pytest.approx(per_round, rel=0.02)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("delay", [0.0, 0.01, 3.0])
def test_a_plain_token_passes_every_stage_and_link_once(stages, delay):
    costs = stage_costs(table(0.25, row=0.01), 9.0, (table(0.5),) * stages, links=delay)
    assert costs.plain_step == pytest.approx(0.26 + 0.5 * stages + delay * (stages + 1))
    assert simulate(PLAIN, costs, 0.5, tokens=50).seconds == pytest.approx(50 * costs.plain_step, rel=1e-9)


def test_links_delay_a_full_pipeline_only_at_rejections():
    """All right: a token leaves at every 1/n. All wrong: every token pays for every link."""
    near, far = equal_stages(4), equal_stages(4, links=0.1)
    assert simulate(PPSD, far, 1.0, tokens=3000).seconds == pytest.approx(
        simulate(PPSD, near, 1.0, 3000).seconds, rel=0.01
    )
    assert simulate(PPSD, far, 0.0, tokens=300).seconds == pytest.approx(300 * (1 + 4 * 0.1), rel=1e-6)


def test_interference_lasts_while_both_work():
    """One stage of 4 s beside draft steps of 1 s, all right: drafting gets far ahead and then waits.

    A pass commits two tokens: a draft token and, the last committed token's row going along, the one after it.
    """
    costs = stage_costs(table(1.0), 0.0, (table(4.0),))
    free = simulate(PPSD, costs, 1.0, tokens=2000)
    assert free.seconds == pytest.approx(1000 * 4, rel=0.01)
    # Two draft steps beside each pass: with a factor of 2 they last 4 s, in which 4 / 1.5 s of the pass are done; the
    # other 4 - 4 / 1.5 s of it run alone.
    slowed = simulate(PPSD, costs.replace(draft_interference=2.0, verify_interference=1.5), 1.0, tokens=2000)
    assert slowed.seconds == pytest.approx(1000 * (4 + 4 - 4 / 1.5), rel=0.01)
    assert simulate(PLAIN, costs.replace(draft_interference=9.0), 1.0, 100).seconds == pytest.approx(500)


@settings(max_examples=150, deadline=None)
@given(
    schedule=schedules,
    acceptance=st.lists(st.floats(0, 1), min_size=1, max_size=4),
    step=st.floats(0.001, 2),
    head=st.floats(0, 2),
    verify=st.lists(st.floats(0.001, 5), min_size=1, max_size=4),
    link=st.sampled_from([0.0, 0.01, 1.5]),
    interference=st.sampled_from([1.0, 1.3, 4.0]),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_schedule_commits_the_plain_text(schedule, acceptance, step, head, verify, link, interference, seed):
    stages = tuple(table(v, 0.003) for v in verify)
    costs = stage_costs(table(step, 0.01), head, stages, link, interference=interference)
    simulation = simulate(schedule, costs, acceptance, tokens=120, seed=seed, trace=True)
    assert simulation.tokens == tuple(testing.random_text(seed, 120)[-120:])
    committed = [id for timed in simulation.rounds for id in timed.round.committed]
    assert tuple(committed) == simulation.tokens
    times = [timed.seconds for timed in simulation.rounds]
    assert times == sorted(times)
    for track in range(len(verify) + 1):  # a stage does one thing at a time
        spans = sorted((s[3], s[4]) for s in simulation.spans if s[1] == track)
        assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(spans))
    least = min(step, *verify) * 120 / MAX_ROWS
    assert simulation.seconds >= least


def test_utilisation_by_hand():
    spans = [
        ("draft", 0, 1, 0.0, 1e6),
        ("draft", 0, 2, 1e6, 2e6),
        ("dropped draft", 0, 1, 2e6, 2.5e6),
        ("verify", 1, 2, 1e6, 4e6),
        ("verify", 2, 2, 4e6, 5e6),
        ("dropped verify", 1, 4, 4e6, 5e6),
    ]
    assert utilisation(spans, 3, tokens=2, seconds=5.0) == {
        "stall": pytest.approx(1 - 5 / 10),
        "wasted_drafting": pytest.approx(1 - 2 / 4),
        "wasted_verification": pytest.approx(1 - 4 / 8),
        "dropped_draft_steps": 1,
        "dropped_passes": 1,
    }
