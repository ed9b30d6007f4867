"""benchmarks/early_exit_model.py: a model that exits early by itself, and what papers.py measures of it."""

import importlib
from pathlib import Path

import pytest

from ppsd_rt import Engine, SamplingParams

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def folder(load, tmp_path):
    module = load("early_exit_model")
    model, losses = module.train(2)
    assert len(losses) == module.LAYERS
    module.write(tmp_path / "model", model)
    return tmp_path / "model"


def test_it_drafts_from_its_own_exit(folder):
    engine = Engine.from_pretrained(folder, backend="cpu", dtype="bfloat16", threads=1)
    assert (engine.head.kind, engine.head.exit_layer) == ("norm", 2)
    text = "def f():\n\treturn 'é\0'"
    assert engine.encode(text) == list(text.encode())
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    plain, eesd = (engine.generate(text, params, schedule).run() for schedule in ("plain", "eesd"))
    assert plain.ids == eesd.ids
    assert eesd.statistics.judged > 0


def test_what_is_measured_of_it(load, folder, monkeypatch):
    module = load("paper_experiments.exits")
    monkeypatch.setattr(module, "model", lambda steps: folder)
    found = {"exit 1": module.measured(1, steps=0, prompts=1), "exit 6": module.measured(6, steps=0, prompts=1)}
    assert [case["cost"] for case in found.values()] == [1 / 8, 6 / 8]
    assert all(len(case["fixed"]) == 15 and 0 <= case["acceptance"] <= 1 for case in found.values())
    rows = module.table(found).splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| 1 of 8", "| 6 of 8"]
    [panel] = module.charts(found)["exits"].panels
    assert [line.name for line in panel.lines] == ["exit 1", "exit 6"]
