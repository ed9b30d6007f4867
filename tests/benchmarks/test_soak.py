"""benchmarks/soak.py: it ends well on a tiny model, and sees what goes wrong."""

import importlib
import json
from itertools import count
from pathlib import Path

import pytest
from support import write_model

from ppsd_rt.cli.prompts import NamedPrompt

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def soak(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("soak")
    monkeypatch.setattr(module, "FILL", 2)
    monkeypatch.setattr(module, "GROWTH", 9)  # of so short a time nothing is to be said
    monkeypatch.setattr(module, "read_prompts", lambda _: [NamedPrompt("a", "a", "ab"), NamedPrompt("b", "b", "cdef")])
    return module


@pytest.fixture
def run(soak, tmp_path, capsys, monkeypatch):
    """-> (status, report, standard error)"""
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model")

    def run(*options):
        options = ["--exit-head", "norm:2", "--minutes", "0.03", "--clients", "3", "-t", "1", *options]
        status = soak.main(["-m", str(folder), *options])
        captured = capsys.readouterr()
        return status, json.loads(captured.out.splitlines()[-1]), captured.err

    return run


def test_growth(soak):
    assert soak.growth([1, 2, 3, 100, 100, 100, 110, 110, 110]) == pytest.approx(0.1)
    assert soak.growth([100]) == 0


@pytest.mark.slow
def test_a_server_that_is_in_order(run):
    status, report, err = run()
    assert (status, report["wrong"]) == (0, []), err
    assert sum(report["requests"].values()) >= 3
    assert report["megabytes"][0] > 1


@pytest.mark.slow
def test_another_text_is_seen(run, soak, monkeypatch):
    numbers, request = count(), {"path": "/v1/completions", "leaves": None}
    request["body"] = {"prompt": "ab", "max_tokens": 3, "temperature": 0}
    monkeypatch.setattr(soak, "draw", lambda *_: request)
    monkeypatch.setattr(soak, "_texts", lambda events: [str(next(numbers))])
    status, report, _ = run()
    assert status == 1
    assert any("another text than before" in line for line in report["wrong"])
