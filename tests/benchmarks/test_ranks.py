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


@pytest.mark.parametrize("trained", [True, False])
def test_answers_of_every_schedule_in_one_process(ranks, tmp_path, trained, monkeypatch):
    monkeypatch.setattr(ranks, "questions", lambda args: ["What is rain?", "Why?"])
    engine = Engine.from_pretrained(write_model(tmp_path / "model"), exit_head="norm:2", backend="cpu", threads=1)
    options = ["-n", "20", "-r", "2", "--schedules", ",".join(SCHEDULES), *(["--trained"] if trained else [])]
    args = ranks.parsed([*options, "--acceptance", "0.5"])
    found = ranks.measure(engine, args)
    assert [row["schedule"] for row in found["rows"]] == SCHEDULES
    assert {row["acceptance"] for row in found["rows"]} == {None if trained else 0.5}
    [realised] = {row["realised"] for row in found["rows"]}
    assert 0 <= realised <= 1 if trained else 0.2 < realised < 0.8
    assert len(found["tokens"]) == 2 and max(found["tokens"]) <= 19
    for row in found["rows"]:
        assert [len(seconds) for seconds in row["seconds"]] == [2, 2]
        fastest = sum(found["tokens"]) / sum(min(seconds) for seconds in row["seconds"])
        assert 0 < row["tokens_per_second"] <= fastest * 1.001
