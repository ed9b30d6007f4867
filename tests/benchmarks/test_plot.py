"""benchmarks/plot.py: a chart of every kind of result that is kept and has one; others are one line."""

import importlib
import json
from pathlib import Path

import pytest

from ppsd_rt.lab.bench.plot import Chart

FOLDER = Path(__file__).parents[2] / "benchmarks"
RESULTS = FOLDER / "results"


@pytest.fixture
def plot(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("plot")


def test_every_kept_result_of_a_known_kind_has_a_chart(plot):
    seen = set()
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        if kind := plot.kind_of(result):
            seen.add(kind)
            chart = plot.KNOWN[kind](result)
            assert isinstance(chart, Chart)
            assert all(line.points for panel in chart.panels for line in panel.lines)
    assert seen == {"generate", "kernels", "peers", "peers-prompts", "ranks"}


def test_decode_speeds_by_schedule(plot):
    spread = {"median": 300, "least": 290, "most": 320}
    row = {"schedule": "plain", "dtype": "int8", "threads": 1, "workload": "64", "max_tokens": 128}
    rows = [
        {**row, "decode_tokens_per_second": 100.0},
        {**row, "schedule": "auto", "oracle": 0.8, "decode_tokens_per_second": spread},
        {**row, "threads": 2, "decode_tokens_per_second": 150.0},
    ]
    chart = plot.generate({"rows": rows})
    assert chart.categories == ["plain", "auto, oracle 0.8"]
    [panel] = chart.panels
    one, two = panel.lines
    assert (panel.title, one.name, two.name) == (
        "64 prompt tokens, up to 128 tokens",
        "int8, 1 thread",
        "int8, 2 threads",
    )
    assert (one.points, one.ranges) == ([(100, 0), (300, 1)], [(100, 100), (290, 320)])
    assert two.points == [(150, 0)]


def test_ranks_beside_simulator_and_formula(plot):
    rows = [
        {"schedule": "plain", "acceptance": 0.8, "speedup": 1.0, "simulated": 200.0, "closed_form": 1.0},
        {"schedule": "ppsd", "acceptance": 0.8, "speedup": 1.5, "simulated": 320.0, "closed_form": 1.7},
        {"schedule": "auto", "acceptance": 0.8, "speedup": 1.4},
    ]
    chart = plot.ranks({"stages": [17, 13], "results": [{"link_ms": 1, "rows": rows}]})
    measured, simulated = chart.panels
    found = [(line.name, line.dashed, line.points[0][1]) for line in measured.lines]
    assert found == [
        ("plain", True, 1),
        ("plain", False, 1),
        ("ppsd", True, 1.7),
        ("ppsd", False, 1.5),
        ("auto", False, 1.4),
    ]
    assert [line.points[0][1] for line in simulated.lines] == [1, 1, 1.7, 1.6]


def test_command(plot, tmp_path, capsys):
    source, target = tmp_path / "result.json", tmp_path / "chart.svg"
    row = {"stages": 2, "link_ms": 0, "acceptance": 0.8, "schedule": "ppsd", "speedup": 1.5, "closed_form": 1.4}
    source.write_text(json.dumps({"measurement": "simulate", "rows": [row]}))
    assert plot.main([str(source), str(target)]) == 0
    assert ">closed form<" in target.read_text()
    for text in ('{"measurement": "eval"}', "no JSON"):
        source.write_text(text)
        assert plot.main([str(source), str(target)]) == 1
    assert plot.main([str(source), str(tmp_path / "chart.pdf")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 3
