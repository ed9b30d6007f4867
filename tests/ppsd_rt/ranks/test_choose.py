"""What ranks fill the planner's table with, and what it makes of several stages."""

import pytest
from planner_support import World

from ppsd_rt import _native
from ppsd_rt._native import Costs, StageCosts, testing
from ppsd_rt.lab.simulate import simulate
from ppsd_rt.pipeline.schedule import MAX_ROWS, parse_schedule
from ppsd_rt.ranks.costs import displacer, side_by_side, time_drafts, time_passes


def flat(seconds):
    return (seconds,) * MAX_ROWS


EVEN = StageCosts(1.0, 1.1, (flat(1.0), flat(1.0), flat(1.0)), links=0.05)
ONE_DEVICE = StageCosts(1.0, 1.9, (flat(9.0),), links=0.05)  # an early exit with a heavy head


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("stages", [EVEN, ONE_DEVICE], ids=["even", "uneven"])
def test_of_overlapped_schedules_the_best_is_foreseen(stages, acceptance):
    """Over ranks `ppsd` and other first chunks stand beside `elastic`."""
    names = ("ppsd", *(f"elastic:first_chunk={first}" for first in (0, 1, 2, 4)))
    best = max(simulate(parse_schedule(name), stages, acceptance, 1500).tokens_per_second for name in names)
    foreseen = testing.predict(_native.Planner(side_by_side(stages, stages), acceptance), "overlap", 0, acceptance)
    assert foreseen == pytest.approx(best, rel=0.06)  # of 96 tokens


def test_a_useless_head_means_plain_decoding_with_few_tries():
    costs = Costs(ONE_DEVICE)
    world = World(_native.Planner(costs, 0.0), costs, 0.0)
    world.decode(400)
    assert 0 < 400 - world.plain_rounds < 20


def test_interference_is_what_working_side_by_side_adds():
    slower = tuple(flat(seconds * 1.5) for (seconds, *_) in EVEN.stages)
    beside = StageCosts(1.2, 2.2, slower, links=0.05)
    costs = side_by_side(EVEN, beside)
    assert costs.turns == EVEN
    assert costs.overlapped.to_dict()["draft_interference"] == pytest.approx(2.0)
    assert costs.overlapped.to_dict()["verify_interference"] == pytest.approx(1.5)
    assert side_by_side(EVEN, EVEN).overlapped == EVEN


def test_between_timed_passes_the_other_ranks_weights_go_through_the_cache():
    done: list[str] = []

    def time_pass(rows: int, context: int) -> float:
        done.append("pass")
        return 1.0

    time_passes(time_pass, seconds=0.0, displace=lambda: done.append("others"))
    assert done[:1] == ["pass"]  # makes the context
    assert done[1:] == ["others", "pass"] * (len(done) // 2)
    done.clear()
    time_drafts(lambda draw, context: time_pass(1, context), seconds=0.0, displace=lambda: done.append("others"))
    assert done[1:] == ["others", "pass"] * (len(done) // 2)
    assert [displacer(count)() for count in (0, 800, 1e12)] == [0, 100, (64 << 20) // 8]
