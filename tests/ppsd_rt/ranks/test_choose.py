"""What ranks fill a table of costs with."""

import pytest

from ppsd_rt._native import StageCosts
from ppsd_rt.pipeline.schedule import MAX_ROWS
from ppsd_rt.ranks.costs import displacer, side_by_side, time_drafts, time_passes


def flat(seconds):
    return (seconds,) * MAX_ROWS


EVEN = StageCosts(1.0, 1.1, (flat(1.0), flat(1.0), flat(1.0)), links=0.05)


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
