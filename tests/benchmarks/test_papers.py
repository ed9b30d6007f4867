"""benchmarks/papers.py: what is kept and measured again, and the page's tables."""

import importlib
import json
from argparse import Namespace
from pathlib import Path

import pytest
from support import write_model

from ppsd_rt import Engine
from ppsd_rt.cli.prompts import NamedPrompt

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


def test_it_says_how_long_each_part_took(papers, tmp_path):
    made = experiment(papers, ["breaks"])
    assert papers.times(made, tmp_path) == "trial: 0 s ()"
    parts = {"one": {"seconds": 60.4}, "two": {"seconds": 2.0}}
    (tmp_path / "trial.json").write_text(json.dumps({"parts": parts}))
    assert papers.times(made, tmp_path) == "trial: 62 s (one: 60 s, two: 2 s)"


def test_what_lacks_its_files_is_left_out_and_the_rest_is_measured(papers, monkeypatch, tmp_path, capsys):
    given = importlib.import_module("paper_experiments.experiment").given
    monkeypatch.delenv("PAPERS_TRIAL", raising=False)
    lacking = papers.Experiment("lacking", lambda quick: {"part": lambda: given("PAPERS_TRIAL", "it")}, str)
    monkeypatch.setattr(papers, "EXPERIMENTS", (lacking, experiment(papers, ["breaks"])))
    page = tmp_path / "page.md"
    page.write_text("<!-- trial -->\n<!-- end of trial -->\n")
    for name, place in {"RESULTS": tmp_path, "PAGE": page, "IMAGES": tmp_path}.items():
        monkeypatch.setattr(papers, name, place)
    assert papers.main([]) == 0
    assert "set PAPERS_TRIAL to it: lacking is left out" in capsys.readouterr().err
    assert "| 3 |" in page.read_text()
    with pytest.raises(SystemExit, match="set PAPERS_TRIAL"):
        papers.main(["--only", "lacking"])


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


def test_an_unknown_experiment_is_one_line(papers):
    with pytest.raises(SystemExit, match="'waist' is no experiment; there are lossless, prompts"):
        papers.main(["--only", "clock,waist"])


@pytest.mark.slow  # all figures are drawn
def test_the_page_is_that_of_the_kept_results(papers, tmp_path):
    """Nobody has edited a table or a figure by hand."""
    page = tmp_path / "papers.md"
    page.write_text(papers.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    papers.publish(papers.EXPERIMENTS, papers.RESULTS, page, tmp_path)
    assert page.read_text(encoding="utf-8") == papers.PAGE.read_text(encoding="utf-8")
    assert {path.name for path in tmp_path.glob("*.svg")} == {path.name for path in papers.IMAGES.glob("*.svg")}


# -- single experiments -----------------------------------------------------------------------------------------------


def test_campaigns_of_one_seed_count_once(load):
    module = load("paper_experiments.lossless")

    def campaign(seed, answers, tokens, differences=0):
        numbers = {"seed": seed, "answers": answers, "tokens": tokens, "differences": differences}
        return {"file": f"{seed}-{tokens}.json", "cpu": "a processor", **numbers}

    kept = [campaign(1, 10, 400), campaign(1, 30, 1200), campaign(2, 20, 800)]
    *_, total, bound = module.table({"campaigns": kept}).splitlines()
    assert total == "| **the longest of each seed** |  | 1, 2 | 50 | 2,000 | 0 |"
    assert bound == "| at 95 % confidence, fewer than |  |  | 6.0e-02 | 1.5e-03 |  |"
    different = module.table({"campaigns": [*kept, campaign(3, 1, 40, differences=1)]})
    assert different.endswith("| 1, 2, 3 | 51 | 2,040 | 1 |"), "the rule of three is for none"


def test_an_interval_is_of_the_figures_of_other_draws(load):
    interval = load("paper_experiments.experiment").interval
    assert interval([2.0], max) == "2.00 (2.00 to 2.00)"
    figure, low, high = (
        float(each.strip("()")) for each in interval(range(101), lambda e: sum(e) / len(e)).split() if each != "to"
    )
    assert figure == 50
    assert 42 < low < 46 and 54 < high < 58  # the standard error is 2.9


def test_parts_of_the_papers_prompts_are_one_sample(load, monkeypatch):
    module = load("paper_experiments.prompts")
    monkeypatch.setattr(module, "over_stages", lambda rows: float(len(rows)))
    assert len(module.parts(True)) == 4
    names = list(module.parts(False))
    assert len(names) == 4 * 16
    assert len(module.parts_large(False)) == 2 * 2 * 4
    assert names[0].startswith("SPD's 240, T = 0") and names[4].startswith(
        "SPD's 240, T = 0"
    )  # a bit of all, then more

    def row(family, speed, differs=False):
        way = {"speed": speed, "accepted": 6, "judged": 10, "tokens_per_round": 1.6, "differs": differs}
        return {"family": family, **dict.fromkeys(module.WAYS, way)}

    first, more = [row("gsm8k", 1.5), row("humaneval", 2.0)], [row("gsm8k", 1.7, differs=True), row("gsm8k", None)]
    table = module.table({names[0]: first, names[4]: more}).splitlines()
    assert [line.split(" | ")[1:4] for line in table[2:5]] == [
        ["gsm8k", "3", "0.60 (0.60 to 0.60)"],
        ["humaneval", "1", "0.60 (0.60 to 0.60)"],
        ["all", "4", "0.60 (0.60 to 0.60)"],
    ]
    assert table[2].split(" | ")[5] == "1.60 (1.50 to 1.70)"
    assert table[-1].startswith("3 of 12 answers differ from plain decoding's.") and " 0.0% are slower" in table[-1]
    slower = module.table({names[0]: [row("gsm8k", 0.95), row("gsm8k", 0.85), row("gsm8k", 1.1), row("gsm8k", 1.2)]})
    assert "50.0% are slower than plain decoding, and 25.0% have less than 0.9" in slower


def test_prompts_of_a_part_are_of_no_other(load, monkeypatch, tmp_path):
    module = load("paper_experiments.prompts")
    model = write_model(tmp_path / "model")
    engine = Engine.from_pretrained(model, backend="cpu", exit_head="norm:1", threads=1)
    asked = []
    monkeypatch.setattr(module.Engine, "from_pretrained", lambda *args, **options: engine)

    def encode(messages):
        if isinstance(messages[0], int):
            return messages
        asked.append(messages[0]["content"])
        return [5, 6, 7]

    monkeypatch.setattr(engine, "encode", encode)
    monkeypatch.setattr(module, "read_prompts", lambda path: [NamedPrompt(n, str(n), "ab"[n % 2]) for n in range(14)])
    monkeypatch.setattr(module, "given", lambda variable, what: tmp_path)
    monkeypatch.setattr(module, "TOKENS", 8)
    rows = module.measured(module.small, "a file", 0.0, 5, 5)
    assert asked == ["10", "11", "12", "13"]
    assert not any(row[name]["differs"] for row in rows for name in module.WAYS)
