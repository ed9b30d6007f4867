"""Calibration: what is made of the times that the GPU stamps."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from types import SimpleNamespace

from ppsd_rt.cuda import calibrate
from ppsd_rt.schedule import MAX_ROWS

ROW, DRAFT, PASS = 11, 12, 13  # graphs
SECONDS = {ROW: 1.0, DRAFT: 1.5}


class Lanes:
    """Streams of a GPU on which a pass of n rows takes 10 + n / 10, and everything longer beside something else."""

    def __init__(self, slower):
        self.slower, self.rows = slower, 0

    def timeline(self, launches):
        free = {-1: 0.0, 0: 0.0}
        beside = {lane for lane, _ in launches} == {-1, 0}
        spans = []
        for lane, graph in launches:
            took = SECONDS.get(graph, 10 + self.rows / 10) * (self.slower if beside else 1.0)
            self.rows = 0 if graph == PASS else self.rows + (graph == DRAFT)
            spans.append((free[lane], free[lane] + took))
            free[lane] += took
        return spans


def costs_of(slower):
    stages = SimpleNamespace(
        begin=lambda *arguments, **options: None,
        devices=[torch.device("cpu")],
        weights=SimpleNamespace(config=SimpleNamespace(vocab_size=100)),
        state=torch.zeros(1, dtype=torch.int32),
    )
    graphs = SimpleNamespace(apart=False, lanes=Lanes(slower), row=ROW, draft=DRAFT, verify=[PASS])
    return calibrate.calibrate(stages, graphs)


def test_tables_from_measured_rows():
    costs = costs_of(1.0)
    assert (costs.turns.row_step, costs.turns.draft_step) == (1.0, 1.5)
    assert costs.turns.verify == pytest.approx([10 + n / 10 for n in range(1, MAX_ROWS + 1)])
    assert costs.plain_seconds == pytest.approx(11.1)


def test_a_gpu_that_stamps_the_same_time_twice_has_measured_nothing(monkeypatch):
    monkeypatch.setitem(SECONDS, ROW, 0.0)
    with pytest.raises(ValueError, match="a cost that cannot be: row_step"):
        costs_of(1.0)


def test_overlap_that_only_shares_the_bandwidth_shows_in_the_table():
    costs = costs_of(1.8)
    assert costs.overlapped.draft_step == pytest.approx(1.8 * costs.turns.draft_step)
    # The pass beside drafts has all their rows: it takes a little longer for that too.
    assert 1.75 < costs.overlapped.verify[0] / costs.turns.verify[0] < 2.3


def test_there_is_room_for_what_is_measured():
    assert calibrate.most_positions() > calibrate.CONTEXT + 6 * sum(calibrate.MEASURED_ROWS)


class Apart:
    """Graphs on two GPUs: of a pass, 4 on the one that drafts, 6 on the other."""

    apart = True
    row, draft, verify = ROW, DRAFT, [PASS, PASS + 1]

    def __init__(self, shared, slower):
        self.drafts_beside_a_stage, self.lanes = shared, self
        self.slower = slower

    def timeline(self, launches):
        if launches[-1] == (0, PASS):
            return [*((i * 1.5 * self.slower, (i + 1) * 1.5 * self.slower) for i in range(len(launches) - 1)), (0, 8.0)]
        ends = [sum(SECONDS[graph] for _, graph in launches[: i + 1]) for i in range(len(launches))]
        return list(zip([0.0, *ends], ends, strict=False))

    def pass_apart(self, window, first=0):
        return [4.0, 6.0][first:]


def test_legs_of_a_pass_on_several_devices():
    stages = SimpleNamespace(
        begin=lambda *arguments, **options: None,
        weights=SimpleNamespace(config=SimpleNamespace(vocab_size=100)),
        devices=[torch.device("cpu", 0), torch.device("cpu", 1)],
    )
    apart = calibrate.calibrate(stages, Apart(False, 1.0))
    assert (apart.turns.row_step, apart.turns.draft_step, apart.turns.verify) == (1.0, 1.5, (10.0,) * MAX_ROWS)
    assert apart.overlapped == apart.turns
    # Four tenths of a pass are beside drafts, where both take twice as long.
    shared = calibrate.calibrate(stages, Apart(True, 2.0))
    assert shared.turns == apart.turns
    assert shared.overlapped.draft_step == pytest.approx(1.4 * 1.5)
    assert shared.overlapped.verify[0] == pytest.approx(1.4 * 10)
