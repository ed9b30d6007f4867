"""Simulated time against the closed forms of the papers, and sums done by hand."""

import pytest

from ppsd_rt.bench.simulate import simulate
from ppsd_rt.errors import UsageError
from ppsd_rt.pipeline.schedule import MAX_CHUNK, PLAIN, Schedule, named, parse_schedule
from ppsd_rt.planning.closed_forms import Pipeline

PPSD = named("ppsd")


@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("length", [1, 2, 5, MAX_CHUNK])
def test_draft_then_verify(length, acceptance):
    """(1 - alpha^(K+1)) / (1 - alpha) tokens per K t_draft + t_verify(K + 1).

    t_draft is a pass over [0, E) and the head; t_verify is the pass over [E, L) and, before it, the row of the last
    draft token through [0, E).
    """
    found = simulate(Schedule(length, length, length), Pipeline((0.15, 0.7), 0.05), acceptance, 10_000)
    per_round = sum(acceptance**i for i in range(length + 1))
    seconds = length * (0.15 + 0.05) + 0.15 + 0.7
    assert found.tokens / found.seconds == pytest.approx(per_round / seconds, rel=0.02)
    assert found.tokens / found.passes == pytest.approx(per_round, rel=0.02)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("link", [0.0, 0.01, 3.0])
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
