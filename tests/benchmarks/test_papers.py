"""benchmarks/papers.py: what is kept and measured again, and the page's tables."""

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


class NoBar:
    """A progress bar that counts."""

    def __init__(self):
        self.advanced = 0

    def add_task(self, *args, **options):
        return 0

    def update(self, *args, **options):
        pass

    def advance(self, task):
        self.advanced += 1


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def papers(load):
    return load("papers")


def experiment(papers, calls):
    def part(name):
        def measure():
            calls.append(name)
            if name == "breaks" and calls.count(name) == 1:
                raise KeyboardInterrupt
            return {"speed": 2.0}

        return measure

    names = ("one", "breaks", "three")
    return papers.Experiment("trial", lambda quick: {n: part(n) for n in names}, lambda found: f"| {len(found)} |")


def measured(papers, made, folder, quick=False, again=False):
    bar = NoBar()
    papers.measure(made, folder, Namespace(quick=quick, again=again), bar)
    return bar.advanced


def test_a_run_that_was_ended_goes_on_where_it_was(papers, tmp_path):
    calls = []
    made = experiment(papers, calls)
    with pytest.raises(KeyboardInterrupt):
        measured(papers, made, tmp_path, quick=True)
    assert measured(papers, made, tmp_path, quick=True) == 2
    assert calls == ["one", "breaks", "breaks", "three"]
    assert measured(papers, made, tmp_path, quick=True) == 0
    assert measured(papers, made, tmp_path) == 3  # what was quick does not count
    assert measured(papers, made, tmp_path, quick=True) == 0
    assert measured(papers, made, tmp_path, again=True) == 3
    result = json.loads((tmp_path / "trial.json").read_text())
    assert result["command"] == "python benchmarks/papers.py --only trial"
    assert list(result["parts"]) == ["one", "breaks", "three"]
    assert {"date", "seconds", "cpu_seconds", "load", "machine", "found"} == set(result["parts"]["one"])
    assert {"cpu", "cores", "ppsd_rt", "python"} <= set(result["parts"]["one"]["machine"])


def test_the_page_gets_the_tables_and_keeps_the_rest(papers, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- trial -->\nold\n<!-- end of trial -->\nafter\n")
    made = experiment(papers, ["breaks"])
    papers.publish([made], tmp_path, page, tmp_path)  # nothing has been measured
    assert "old" in page.read_text()
    measured(papers, made, tmp_path)
    for _ in range(2):
        papers.publish([made], tmp_path, page, tmp_path)
        assert page.read_text() == "before\n<!-- trial -->\n| 3 |\n<!-- end of trial -->\nafter\n"
    page.write_text("nothing")
    with pytest.raises(SystemExit, match="no place for trial"):
        papers.publish([made], tmp_path, page, tmp_path)


@pytest.mark.slow  # all figures are drawn
def test_the_page_is_that_of_the_kept_results(papers, tmp_path):
    """Nobody has edited a table or a figure by hand."""
    page = tmp_path / "papers.md"
    page.write_text(papers.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    papers.publish(papers.EXPERIMENTS, papers.RESULTS, page, tmp_path)
    assert page.read_text(encoding="utf-8") == papers.PAGE.read_text(encoding="utf-8")
    assert {path.name for path in tmp_path.glob("*.svg")} == {path.name for path in papers.IMAGES.glob("*.svg")}


# -- single experiments -----------------------------------------------------------------------------------------------
