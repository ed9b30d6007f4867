"""Calibration: what is made of the times of made-up stages, by a made-up clock; and which costs are refused."""

from threading import Condition

import pytest

from ppsd_rt._native import Costs, StageCosts, testing
from ppsd_rt.pipeline.schedule import MAX_ROWS

ROW, DRAFT, SHARE = 1.0, 1.5, 0.25
GUARD = 60.0  # seconds that a thread waits for the other one, should it never come


def verify(rows, context=128):
    """Attention costs by the row of the pass and by the row of the text."""
    return 10.0 + 0.1 * rows + 0.001 * rows * (context - 128)


class Bench:
    """Stages of which everything takes `slower` times as long beside something else. Its clock stands `still`, or each
    look at it finds all time used up; and no look depends on what the time really is."""

    slower = 2.0

    def __init__(self, still=False):
        self.still, self.looks = still, 0
        self.changed = Condition()
        self.drafting_thread = False
        self.drafts, self.passes = 0, 0  # side by side
        self.began = False

    def now(self):
        self.looks += 1
        return 0.0 if self.still else 1e6 * self.looks

    def short_handed(self):
        return False

    def work_on(self, stage):
        with self.changed:
            if stage == 0:
                self.changed.wait_for(self.may_begin, GUARD)
            self.began = self.began or stage == 0
            self.drafting_thread = True

    def may_begin(self):
        return True

    def may_draft(self):
        return True

    def draft(self, draw):
        if not self.began:
            return DRAFT if draw else ROW
        with self.changed:
            self.changed.wait_for(self.may_draft, GUARD)
            self.drafts += 1
            return self.slower * (DRAFT if draw else ROW)

    def verify(self, rows, context):
        with self.changed:
            self.passes += self.drafting_thread
            self.changed.notify_all()
            return verify(rows, context) * (self.slower if self.began else 1.0)


def calibrate(bench, overlap=True):
    return testing.calibrate(bench, 2, overlap, SHARE)


@pytest.mark.parametrize("still", [False, True])
def test_costs_are_what_the_stages_take(still):
    found = calibrate(Bench(still))
    turns = found.turns
    assert (turns.row_step, turns.draft_step, turns.first_draft) == (ROW, DRAFT, DRAFT)
    assert turns.plain == pytest.approx(ROW + verify(1))
    assert turns.verify == pytest.approx([verify(rows) for rows in range(1, 64 + 1)])
    assert turns.verify_deeper == pytest.approx([0.001 * rows for rows in range(1, MAX_ROWS + 1)])
    assert turns.step_deeper == pytest.approx(SHARE * 0.001)
    assert not found.crowded
    beside = found.overlapped
    assert (beside.row_step, beside.draft_step) == (2 * ROW, 2 * DRAFT)
    assert beside.verify == pytest.approx([2 * seconds for seconds in turns.verify[:MAX_ROWS]])
    assert beside.verify_deeper == pytest.approx([2 * seconds for seconds in turns.verify_deeper])
    assert beside.step_deeper == pytest.approx(2 * turns.step_deeper)  # on one of two threads
    assert calibrate(Bench(still), overlap=False) == Costs(found.turns, None, found.crowded)


def test_drafting_that_gets_no_core_until_all_passes_could_be_over_is_waited_for():
    class Late(Bench):
        def may_begin(self):
            return self.passes >= 200

    bench = Late()
    found = calibrate(bench).overlapped
    assert bench.passes >= 200
    assert (found.row_step, found.draft_step) == (2 * ROW, 2 * DRAFT)
    assert found.verify[0] == pytest.approx(2 * verify(1))  # and passes beside nothing do not count


@pytest.mark.parametrize("where", ["work_on", "draft", "verify"])
@pytest.mark.parametrize("beside", [False, True], ids=["in turns", "side by side"])
def test_what_a_stage_throws_ends_it(where, beside):
    class Broken(Bench):
        def __getattribute__(self, name):
            if name == where and (object.__getattribute__(self, "drafting_thread") or not beside):
                raise ZeroDivisionError(name)
            return object.__getattribute__(self, name)

    with pytest.raises(ZeroDivisionError, match=where):
        calibrate(Broken())


def test_crowded_and_implausible_moments():
    class Crowded(Bench):
        def short_handed(self):
            return True

    class Odd(Bench):
        """Plain steps of the first rounds take twice as long."""

        odd, steps = True, 0

        def draft(self, draw):
            self.steps = 0 if draw else self.steps + 1
            return super().draft(draw) + (10.0 if self.odd and self.steps > 1 else 0.0)

        def now(self):
            self.odd = self.odd and self.looks < 2
            return super().now()

    assert calibrate(Crowded(), overlap=False).crowded
    assert calibrate(Odd(), overlap=False) == calibrate(Bench(), overlap=False)


@pytest.mark.parametrize("stage", ["draft", "verify"])
def test_a_clock_that_stands_is_no_measurement(stage):
    bench = Bench()
    setattr(bench, stage, lambda *_: 0.0)
    with pytest.raises(ValueError, match="a cost that cannot be"):
        testing.calibrate(bench, 2, False, SHARE)


# -- costs that cannot be ----------------------------------------------------------------------------------------------

TABLE = tuple(1.0 + 0.1 * rows for rows in range(MAX_ROWS))
GOOD = StageCosts(
    0.1,
    0.2,
    TABLE,
    first_draft=0.25,
    plain=1.1,
    step_deeper=1e-6,
    verify_deeper=[1e-6 * rows for rows in range(MAX_ROWS)],
)
NUMBERS = [-0.1, float("nan"), float("inf"), 1e300, 10**400, "0.1", None, [0.1]]
BAD = [
    *({name: value} for name in ("row_step", "draft_step") for value in (0.0, 1e-300, *NUMBERS)),
    *({name: value} for name in ("first_draft", "plain", "step_deeper") for value in NUMBERS),
    *({"verify": (value, *TABLE[1:])} for value in (0.0, TABLE[1] + 0.1, *NUMBERS)),
    *({"verify": (*TABLE[:-1], value)} for value in (0.0, *NUMBERS)),
    *({"verify_deeper": (*GOOD.verify_deeper[:-1], value)} for value in (0.0, *NUMBERS)),
    *({name: table} for name in ("verify", "verify_deeper") for table in (TABLE[1:], TABLE * 5)),
    {"verify": ()},
]


@pytest.mark.parametrize("bad", BAD, ids=[f"{i}-{next(iter(bad))}" for i, bad in enumerate(BAD)])
def test_costs_that_cannot_be_are_refused_by_all_who_take_them(bad):
    with pytest.raises(ValueError, match="cost that cannot be"):
        Costs(GOOD.replace(**bad))
    good = Costs(GOOD, GOOD).to_dict()
    assert StageCosts(**good["turns"]) == GOOD
    for stages in ("turns", "overlapped"):
        with pytest.raises(ValueError, match="cost that cannot be"):
            Costs(**{"turns": GOOD, "overlapped": GOOD, stages: StageCosts(**{**good[stages], **bad})})


# -- one table ---------------------------------------------------------------------------------------------------------


def test_rows_between_those_that_were_measured_are_interpolated():
    table = StageCosts.between({1: 3.0, 2: 2.0, 4: 4.0, 12: 12.0})
    assert table[0] == table[1] == 2.0  # fewer rows never cost more
    assert (table[2], table[9]) == (3.0, 10.0)
    assert table[11:] == (12.0,) * 5  # nothing is known of more
    assert len(table) == MAX_ROWS
    assert StageCosts.between({1: 1.0, 64: 64.0}, rows=64) == pytest.approx(range(1, 65))
    with pytest.raises(ValueError, match="at least one"):
        StageCosts.between({})


def test_more_rows_than_the_table_has_go_on_as_its_last_ones():
    assert testing.pass_seconds(GOOD, MAX_ROWS + 10) == pytest.approx(TABLE[-1] + 10 * (TABLE[-1] - TABLE[-2]))


def test_a_pass_through_several_stages_and_links():
    costs = StageCosts(0.1, 0.15, (TABLE, TABLE), links=(0.5, 0.25, 0.125), link_row=0.01)
    assert costs.verify == pytest.approx([2 * seconds for seconds in TABLE])
    assert costs.stages == (TABLE, TABLE)
    assert testing.pass_seconds(costs, 4) == pytest.approx(2 * TABLE[3] + 0.875 + 2 * 4 * 0.01)
    assert costs.plain_step == pytest.approx(0.1 + testing.pass_seconds(costs, 1))
    assert costs.round(3) == pytest.approx(3 * 0.15 + 0.1 + testing.pass_seconds(costs, 4))
    assert StageCosts(**costs.to_dict()) == costs != costs.replace(link_row=0.0)
    with pytest.raises(ValueError, match="2 verification stages have 3 links, not 2"):
        costs.replace(links=(0.5, 0.5))
