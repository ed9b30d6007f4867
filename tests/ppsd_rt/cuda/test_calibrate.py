"""Calibration: what is made of the times that the GPU stamps."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from types import SimpleNamespace

from ppsd_rt.cuda import calibrate
from ppsd_rt.pipeline.schedule import MAX_ROWS

ROW, DRAFT, PASS, PLAIN = 11, 12, 13, 15  # graphs
SECONDS = {ROW: 1.0, DRAFT: 1.5}


class Text:
    """Stages of 4 layers, the exit after 1, for a model of texts of so many tokens."""

    def __init__(self, device="cuda", longest=2048):
        self.home, self.devices, self.context = torch.device(device), [torch.device("cpu")], 0
        config = SimpleNamespace(vocab_size=100, max_position_embeddings=longest, num_hidden_layers=4)
        self.weights = SimpleNamespace(config=config, exit_layer=1)

    def begin(self, prompt, params, keep, **options):
        assert keep == len(prompt) - 1
        self.context = len(prompt)


class Lanes:
    """Streams of a GPU on which a pass of n rows takes 10 + n / 10, and everything longer beside something else: then
    a pass has the rows that were there before. The first draft after a pass takes another 0.5, and so does a pass after
    drafts. A plain step in one launch saves 0.3."""

    def __init__(self, slower, text):
        self.slower, self.text, self.rows, self.drafted = list(slower), text, 0, False

    def timeline(self, launches):
        free = {-1: 0.0, 0: 0.0}
        beside, there = {lane for lane, _ in launches} == {-1, 0}, self.rows
        slower = self.slower[0] if beside else 1.0
        if beside and len(self.slower) > 1:
            self.slower.pop(0)
        spans = []
        for lane, graph in launches:
            rows = there if beside else self.rows
            took = SECONDS.get(graph, 10 + rows / 10 + 1e-3 * rows * (self.text.context - calibrate.CONTEXT))
            took += 0.5 * (self.drafted if graph == PASS else graph == DRAFT and not self.drafted)
            took *= slower
            if graph == PLAIN:
                took = SECONDS[ROW] + 10.1 - 0.3
            self.drafted = graph == DRAFT or (self.drafted and graph not in (PASS, PLAIN))
            self.rows = 0 if graph in (PASS, PLAIN) else self.rows + 1
            spans.append((free[lane], free[lane] + took))
            free[lane] += took
        return spans


def costs_of(*slower, longest=2048):
    """slower: beside something else; the first time, the second, and so on."""
    text = Text(longest=longest)
    lanes = Lanes(slower, text)
    graphs = SimpleNamespace(apart=False, lanes=lanes, draft=DRAFT, row=ROW, rounds={0: PLAIN}, verify=[PASS])
    return calibrate.calibrate(text, graphs)


def test_tables_from_measured_rows():
    turns = costs_of(1.0).turns
    assert (turns.row_step, turns.draft_step, turns.first_draft) == (1.0, 1.5, 2.0)
    assert turns.verify[0] == pytest.approx(10.1), "again and again: after no drafts"
    assert turns.verify[1:] == pytest.approx([10.5 + n / 10 for n in range(2, MAX_ROWS + 1)])
    assert turns.plain == turns.plain_step == pytest.approx(10.8), "as it is decoded: in one launch"


def test_what_a_longer_text_costs():
    turns = costs_of(1.0).turns
    assert turns.verify_deeper == pytest.approx([1e-3 * n for n in range(1, MAX_ROWS + 1)])
    assert turns.step_deeper == pytest.approx(1e-3 / 3)  # by its share of the layers
    shorter = costs_of(1.0, longest=700).turns
    assert shorter.verify_deeper == pytest.approx(turns.verify_deeper)
    assert costs_of(1.0, longest=300).turns.step_deeper == 0.0, "such texts are too short to tell"


def test_a_gpu_that_stamps_the_same_time_twice_has_measured_nothing(monkeypatch):
    monkeypatch.setitem(SECONDS, ROW, 0.0)
    with pytest.raises(ValueError, match="a cost that cannot be: row_step"):
        costs_of(1.0)


def test_what_takes_longer_beside_something_else_shows_in_the_table():
    costs = costs_of(1.8)
    assert costs.overlapped.draft_step / costs.turns.draft_step == pytest.approx(1.8)
    assert costs.overlapped.verify[0] / costs.turns.verify[0] == pytest.approx(1.8)


def test_overlap_that_only_shares_the_bandwidth_is_refused():
    """Twice as long each: in turns as much is done."""
    for slower in ((2.0,), (1.95,), (1.5, 1.5, 2.0, 1.5)):
        costs = costs_of(*slower)
        assert costs.overlapped is None, slower
    assert costs_of(2.0, 1.5).overlapped is not None, "the first time warms up"


def test_there_is_room_for_what_is_measured():
    for longest in (64, 512, 4096):
        room = calibrate.most_positions(longest) - sum(calibrate.MEASURED_ROWS) - 4 * (24 + MAX_ROWS)
        assert room > calibrate.CONTEXT
    assert calibrate.most_positions(700) == 700 and calibrate.most_positions(10**6) < 2048


class Apart:
    """Graphs on two GPUs: of a pass, 4 on the one that drafts, 6 on the other."""

    apart = True
    draft, row, verify = DRAFT, ROW, [PASS, PASS + 1]

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
    apart = calibrate.calibrate(Text(), Apart(False, 1.0))
    assert (apart.turns.row_step, apart.turns.draft_step, apart.turns.verify) == (1.0, 1.5, (10.0,) * MAX_ROWS)
    assert apart.overlapped == apart.turns
    # Four tenths of a pass are beside drafts, where both take twice as long.
    shared = calibrate.calibrate(Text(), Apart(True, 2.0))
    assert shared.turns == apart.turns
    assert shared.overlapped.draft_step == pytest.approx(1.4 * 1.5)
    assert shared.overlapped.verify[0] == pytest.approx(1.4 * 10)


def test_eager_launches(monkeypatch):
    """By a made-up clock; the interpreter has no depth."""
    clock, text = [0.0], Text("cpu")
    text.legs = ["verify"]
    for step, took in {"early_step": 1.0, "draft_step": 1.5, "verification": 10.0}.items():
        setattr(text, step, lambda *_, took=took: clock.__setitem__(0, clock[0] + took))
    monkeypatch.setattr(calibrate, "perf_counter", lambda: clock[0])
    costs = calibrate.calibrate(text, None)
    assert costs.overlapped is None
    assert (costs.turns.row_step, costs.turns.draft_step, costs.turns.plain) == (1.0, 1.5, 11.0)
    assert costs.turns.verify == (10.0,) * MAX_ROWS
