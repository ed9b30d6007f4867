"""`auto` over ranks: what it chooses from measured costs, and how it follows the acceptance."""

import pytest

from ppsd_rt.ranks.choose import RankChooser, candidates
from ppsd_rt.ranks.costs import RankCosts, displacer, interpolate, time_drafts, time_passes
from ppsd_rt.ranks.slices import layers_of
from ppsd_rt.schedule import MAX_ROWS, PLAIN
from ppsd_rt.simulate import simulate


def flat(seconds):
    return (seconds,) * MAX_ROWS


EVEN = RankCosts(row=1.0, draft=1.1, verify=(flat(1.0), flat(1.0), flat(1.0)), link=0.05)
ONE_DEVICE = RankCosts(row=1.0, draft=1.9, verify=(flat(9.0),), link=0.05)  # an early exit with a heavy head


@pytest.mark.parametrize("costs", [EVEN, ONE_DEVICE], ids=["even", "uneven"])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
def test_the_choice_is_within_a_few_percent_of_the_best(costs, acceptance):
    chooser = RankChooser(costs.simulated(), acceptance)
    speeds = {s: simulate(s, costs.simulated(), acceptance, 1500).tokens_per_second for s in candidates()}
    assert speeds[chooser.schedule] > 0.93 * max(speeds.values())


def test_a_useless_head_means_plain_decoding_with_few_tries():
    chooser = RankChooser(ONE_DEVICE.simulated(), 0.0)
    assert chooser.schedule == PLAIN
    drafted = 0
    for _ in range(400):
        judged = int(chooser.schedule.drafts)
        drafted += judged
        chooser.after(judged, 0)
    assert 0 < drafted < 20
    assert chooser.schedule == PLAIN


def test_it_learns_that_drafts_are_good():
    chooser = RankChooser(ONE_DEVICE.simulated(), 0.05)
    rounds = 0
    while rounds < 300:
        judged = 4 if chooser.schedule.drafts else 0
        chooser.after(judged, judged)
        rounds += 1
    assert chooser.acceptance > 0.8
    assert chooser.schedule.drafts
    assert f"acceptance {chooser.acceptance:.2f}" in chooser.explain()


def test_interference_is_what_working_side_by_side_adds():
    beside = RankCosts(
        row=1.2, draft=2.2, verify=tuple(flat(seconds * 1.5) for (seconds, *_) in EVEN.verify), link=0.05
    )
    costs = EVEN.simulated(beside)
    assert costs.draft_interference == pytest.approx(2.0)
    assert costs.verify_interference == pytest.approx(1.5)
    assert EVEN.simulated().draft_interference == 1.0


def test_rows_between_those_that_were_timed_are_interpolated():
    table = interpolate({1: [3.0], 2: [2.0], 4: [4.0], 16: [16.0]})
    assert table[0] == table[1] == 2.0  # fewer rows never cost more
    assert table[2] == 3.0
    assert table[9] == 10.0
    assert len(table) == MAX_ROWS
    assert time_passes(lambda rows, context: float(rows), seconds=0.0)[6] == 7.0
    assert set(time_passes(lambda rows, context: float(rows), seconds=0.0, one_row=True)) == {1.0}


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


def test_layers_of_ranks():
    assert [layers_of((3, 9, 9, 9), rank) for rank in range(4)] == [(0, 3), (3, 12), (12, 21), (21, 30)]
