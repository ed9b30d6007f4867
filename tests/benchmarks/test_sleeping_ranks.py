"""benchmarks/sleeping_ranks.py: what a sleeping stage takes, by a clock of the test's; and real processes."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


class Clock:
    """Sleeps end `late` seconds too late."""

    def __init__(self):
        self.now, self.late = 100.0, 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds + self.late


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("sleeping_ranks")


@pytest.fixture
def clock(module, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_work_takes_what_it_costs_however_late_the_wake_ups_are(module, clock):
    stage = module.SleepingVerify([0.010, 0.011])
    for late in (0.0, 0.0002, 0.004):
        clock.late, begun = late, clock.now
        for row in range(200):
            assert stage.run(row, [1], None, lambda: False) is None  # the rows that it was given
        assert clock.now - begun == pytest.approx(2.0, abs=0.010)


def test_rows_in_one_pass_are_as_cheap_as_the_table_says(module, clock):
    stage = module.SleepingVerify([0.010, 0.011])
    for ids, seconds in (([1], 0.010), ([1, 2], 0.011), ([1, 2, 3, 4, 5], 0.032)):
        begun = clock.now
        stage.run(0, ids, None, None)
        assert clock.now - begun == pytest.approx(seconds)


def test_void_work_ends_at_once_and_owes_nothing(module, clock):
    stage = module.SleepingDraft(module.equal_stages(4, token=0.16, row_share=0.02))
    begun = clock.now
    assert stage.step(0, [0], True, lambda: clock.now - begun > 0.020) is None
    assert clock.now - begun < 0.022
    begun = clock.now
    assert stage.step(0, [0], True, lambda: False) == (0, 0.0)
    assert clock.now - begun == pytest.approx(0.040)


def test_the_text_depends_on_all_of_itself(module):
    text, other = module.text_of(40), module.Text()
    assert len(text) == 40
    assert len(set(text)) > 30
    other.go_on(0, text)
    assert [other.next_after(row) for row in range(39)] == text[1:]
    last = other.next_after(39)
    other.go_on(3, [7, *text[4:]])
    assert other.next_after(39) != last
    with pytest.raises(ValueError, match="gap"):
        other.go_on(41, [1])
