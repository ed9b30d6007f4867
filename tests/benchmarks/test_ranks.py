"""benchmarks/ranks.py and its experiment of papers.py: what is asked, what is put beside what; and real processes."""

import importlib
from pathlib import Path

import pytest
from support import write_model

from ppsd_rt import Engine

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCHEDULES = ["plain", "eesd", "ppsd"]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def ranks(load):
    return load("ranks")


def test_the_head_that_ships_drafts_for_a_prompt_of_each_family(ranks):
    args = ranks.parsed(["--trained", "--seeds", "3"])
    assert args.acceptance == [None]
    asked = ranks.questions(args)
    assert len(set(asked)) == 3
    assert ranks.questions(ranks.parsed(["--seeds", "3"])) == [ranks.PROMPT] * 3


@pytest.mark.parametrize("trained", [True, False])
def test_answers_of_every_schedule_in_one_process(ranks, tmp_path, trained, monkeypatch):
    monkeypatch.setattr(ranks, "questions", lambda args: ["What is rain?", "Why?"])
    engine = Engine.from_pretrained(write_model(tmp_path / "model"), exit_head="norm:2", backend="cpu", threads=1)
    options = ["-n", "20", "-r", "2", "--schedules", ",".join(SCHEDULES), *(["--trained"] if trained else [])]
    args = ranks.parsed([*options, "--acceptance", "0.5"])
    found = ranks.measure(engine, args, None)
    assert [row["schedule"] for row in found["rows"]] == SCHEDULES
    assert {row["acceptance"] for row in found["rows"]} == {None if trained else 0.5}
    [realised] = {row["realised"] for row in found["rows"]}
    assert 0 <= realised <= 1 if trained else 0.2 < realised < 0.8
    assert len(found["tokens"]) == 2 and max(found["tokens"]) <= 19
    for row in found["rows"]:
        assert [len(seconds) for seconds in row["seconds"]] == [2, 2]
        fastest = sum(found["tokens"]) / sum(min(seconds) for seconds in row["seconds"])
        assert 0 < row["tokens_per_second"] <= fastest * 1.001


def test_splits_are_of_the_default_model(load):
    module = load("paper_experiments.real_ranks")
    for splits in module.KINDS.values():
        for count, sizes in splits.items():
            layers = list(map(int, sizes.split(",")))
            assert (len(layers), sum(layers)) == (count, 30)
            assert min(layers) > 0
    assert {sizes.split(",")[0] for sizes in module.TRAINED.values()} == {"3"}


def test_parts_grow_with_the_cores(load, monkeypatch):
    module = load("paper_experiments.real_ranks")
    for cores, most in ((2, 3), (4, 4), (16, 8)):
        monkeypatch.setattr(module.os, "cpu_count", lambda cores=cores: cores)
        parts = module.parts(True)
        assert f"{most} processes, 5 ms, trained head" in parts
        assert max(int(name.split()[0]) for name in parts if "processes" in name) == most


def test_the_table_puts_processes_beside_plain_one_process_and_the_simulator(load):
    module = load("paper_experiments.real_ranks")

    def case(processes, link, **speeds):
        rows = [{"schedule": name, "tokens_per_second": speed} for name, speed in speeds.items()]
        return {"processes": processes, "link_ms": link, "load": 2.2, "rows": rows}

    schedules = {"eesd": 60.0, "ppsd": 120.0, "elastic": 90.0, "auto": 100.0}
    two = case(2, 5.0, plain=50.0, **schedules)
    for row in two["rows"][:-1]:
        row |= {"over_simulated": 0.91, "closed_form": 2.5 if row["schedule"] == "ppsd" else None}
    found = {
        "one process, oracle, 0.8": case(1, 0.0, plain=200.0, **schedules),
        "one process, trained head": case(1, 0.0, plain=250.0, **schedules),
        "2 processes, 5 ms, trained head": two,
        "tensor-parallel, 2, 5 ms": case(2, 5.0, **{"plain, tensor-parallel": 10.0}),
    }
    assert module.table(found).splitlines()[2:] == [
        "| oracle | 1 | 0 | 2 | 200 | 1.00 | 0.30 | 0.60 | - | 0.45 | 0.50 | - |",
        "| trained head | 1 | 0 | 2 | 250 | 1.00 | 0.24 | 0.48 | - | 0.36 | 0.40 | - |",
        "| trained head | 2 | 5 | 2 | 50 | 0.20 | 1.20 (0.91) | 2.40 (0.91) | 2.50 | 1.80 (0.91) | 2.00 | 0.20 |",
    ]


@pytest.mark.slow
def test_processes_answer_like_plain_decoding_and_are_put_beside_the_simulator(ranks, tmp_path, monkeypatch):
    """As fast as a tiny model goes: the speeds mean nothing then. Answers that differ end the run."""
    folder = write_model(tmp_path / "model")
    monkeypatch.setattr(ranks, "DRAFT_VOCABULARY", 200)
    options = ["-m", str(folder), "--stages", "2,2", "-n", "12", "-r", "1", "--seeds", "1", "--acceptance", "0.5"]
    result = ranks.pipeline(ranks.parsed(options), 0.1)
    assert [row["schedule"] for row in result["rows"]] == ["plain", "ppsd", "elastic"]
    assert all(row["over_simulated"] > 0 and row["speedup"] > 0 for row in result["rows"])
    assert result["link_ms"] == pytest.approx(0.1)
