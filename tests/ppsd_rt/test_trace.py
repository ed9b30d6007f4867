"""Timelines: valid trace-event JSON, one thing at a time per stage, and no effect on the answer."""

import json
from itertools import pairwise

import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.backend import RunOptions
from ppsd_rt.cli import main as cli
from ppsd_rt.generation import Committed
from ppsd_rt.pipeline.schedule import Schedule
from ppsd_rt.trace import MARKS, TraceFile, occupancy

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, seed=3)
WORK = {"draft", "verify", "prompt", "dropped draft", "dropped verify"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("trace") / "model", num_hidden_layers=8)


@pytest.fixture(scope="module", params=["cpu", "torch"])
def engine(request, folder):
    return Engine.from_pretrained(folder, exit_head="norm:4", backend=request.param, dtype="float32", threads=2)


def traced(engine, schedule):
    completion = engine.generate("trace me", PARAMS, schedule, RunOptions(trace=True)).run()
    return completion, engine.backend.spans()


@pytest.mark.parametrize("schedule", ["plain", "eesd", "ppsd", "elastic"])
def test_a_stage_does_one_thing_at_a_time(engine, schedule):
    completion, spans = traced(engine, schedule)
    assert {name for name, *_ in spans} <= WORK | {"wait", *MARKS}
    for track in {span[1] for span in spans}:
        times = sorted((begin, end) for name, on, _, begin, end in spans if on == track and name not in MARKS)
        assert all(0 <= begin <= end for begin, end in times)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(times))
    verified = [rows for name, track, rows, *_ in spans if (name, track) == ("verify", 1)]
    assert sum(verified) == completion.statistics.rows  # every round's rows, and no others
    assert any(name == "prompt" and rows >= 1 for name, _, rows, *_ in spans)


@pytest.mark.parametrize("schedule", ["plain", "eesd", "ppsd", "elastic", "eesd:lookup=2"])
def test_every_event_has_its_moment(engine, schedule):
    """In their order: a mark for each draft token, and for each round, with what it committed and if it rolled back."""
    if schedule.endswith("lookup=2") and not engine.backend.copies:
        pytest.skip("this backend copies no drafts")
    options = RunOptions(trace=True, report_drafts=True)
    events = list(engine.generate("trace me me me me", PARAMS, schedule, options).events())
    told = [
        ("roll back" if e.round.corrected else "commit", len(e.round.committed))
        if isinstance(e, Committed)
        else ("drafted", 1)
        for e in events
    ]
    marks = [span for span in engine.backend.spans() if span[0] in MARKS]
    assert [(name, rows) for name, _, rows, *_ in marks] == told
    assert all(begin == end for *_, begin, end in marks)
    assert all(one[3] <= other[3] for one, other in pairwise(marks))


def test_tracing_changes_no_token_and_off_means_none(engine):
    completion, spans = traced(engine, "elastic")
    assert spans
    assert engine.generate("trace me", PARAMS, "elastic").run().ids == completion.ids
    assert engine.backend.spans() == []


def test_threads_really_overlap(folder):
    """Sooner or later, however busy the cores, drafting and verifying go on at the same time: else this never ends."""
    engine = Engine.from_pretrained(folder, exit_head="norm:4", backend="cpu", dtype="float32", threads=2)
    seed, overlapped = 0, False
    while not overlapped:
        params = SamplingParams(max_tokens=200, ignore_eos=True, seed=seed)
        engine.generate("overlap", params, Schedule(1, 8, 15, overlap=True), RunOptions(trace=True)).run()
        spans = engine.backend.spans()
        drafts, verifies = ([s for s in spans if s[1] == track and s[0].split()[-1] in WORK] for track in (0, 1))
        overlapped = any(min(d[4], v[4]) > max(d[3], v[3]) for d in drafts for v in verifies)
        seed += 1

    engine.generate("overlap", PARAMS, "eesd", RunOptions(trace=True)).run()
    times = sorted((begin, end) for name, _, _, begin, end in engine.backend.spans() if name not in MARKS)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(times))  # and without overlap they never do


def test_answers_of_one_file_follow_each_other(tmp_path):
    with TraceFile(tmp_path / "t.json") as trace:
        trace.add([("draft", 0, 1, 0.0, 10.0)], "first")
        trace.add([("draft", 0, 1, 2.0, 5.0)])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [(e["pid"], e["ts"]) for e in events if e["ph"] == "X"] == [(0, 0.0), (1, 12.0)]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["first", "answer 2"]


def test_the_file_of_a_run(folder, tmp_path, capsys):
    prompts, path = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n')
    options = ["--model", str(folder), "--exit-head", "norm:4", "--raw", "-n", "20", "--json", "--compare"]
    assert cli.main(["--prompts", str(prompts), *options, "--schedule", "elastic", "--trace", str(path)]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    trace = json.loads(path.read_text())
    titles = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert titles == ["a", "b"]
    for process, answer in enumerate(answers):
        verified = [e for e in trace["traceEvents"] if e["pid"] == process and e["name"] == "verify"]
        assert sum(e["args"]["rows"] for e in verified) == answer["stats"]["rows"]


def test_overlap_efficiency_is_work_over_time():
    spans = [
        ("prompt", 1, 9, 0.0, 500.0),
        ("draft", 0, 1, 1000.0, 1400.0),
        ("wait", 0, 0, 1400.0, 2000.0),
        ("verify", 1, 4, 1200.0, 1800.0),
        ("draft", 0, 1, 1900.0, 2000.0),
    ]
    told = occupancy(spans)
    assert told.wall == pytest.approx(1000e-6)
    assert told.worked == pytest.approx(1100e-6)
    assert told.overlap_efficiency == pytest.approx(1.1)
    assert told.idle == pytest.approx(100e-6), "between the pass and the last draft"
    assert "overlap efficiency 1.100" in str(told)
    assert "nothing ran for 10.0 %" in str(told)
    assert occupancy([]).overlap_efficiency == 0.0
