"""Charts: what they show, how lines differ, and what is refused before any work."""

import sys

import pytest

from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.lab.bench.plot import Chart, Line, Panel, PlotFile, _figure, drawn

POINTS = [(0, 1), (1, 2.5), (0.5, 2)]


def chart_of(*lines, **options):
    return Chart("title", "delay (ms)", "speed", [Panel("panel", lines)], **options)


@pytest.mark.parametrize("format", ["svg", "png"])
def test_the_same_chart_gives_the_same_bytes(format, monkeypatch):
    chart = chart_of(Line("a", POINTS), Line("b", POINTS[:1]))
    first = drawn(chart, format)
    assert first.startswith({"svg": b"<?xml", "png": b"\x89PNG"}[format])
    assert b"date>" not in first
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")  # the date that matplotlib would write
    assert drawn(chart, format) == first
    assert drawn(chart_of(Line("a", POINTS)), format) != first


def test_categories_and_ranges():
    line = Line("2 threads", [(350, 1), (180, 0)], ranges=[(340, 400), (170, 184)])
    figure = _figure(chart_of(line, categories=["plain", "auto"]))
    [axes] = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["plain", "auto"]
    spans = [[tuple(point) for point in segment] for segment in axes.collections[0].get_segments()]
    assert spans == [[(170, 0), (184, 0)], [(340, 1), (400, 1)]]
    assert axes.get_xlim() == (0, pytest.approx(420))
    assert axes.get_lines()[0].get_linestyle() == "None"


@pytest.mark.parametrize("name", ["plot", "plot.pdf", "plot.svg.gz", ".svg"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match="must end in .svg or .png"):
        PlotFile(str(tmp_path / name))
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_command_is_named_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(PpsdError) as error:
        PlotFile(str(tmp_path / "plot.svg"))
    assert str(error.value) == 'a plot needs matplotlib: pip install "ppsd-rt[plot]"'


def test_the_ending_decides(tmp_path):
    for name, start in (("a.SVG", b"<?xml"), ("a.png", b"\x89PNG")):
        path = tmp_path / name
        path.write_text("old")
        plot = PlotFile(str(path))
        assert path.read_text() == "old"
        plot.finish(chart_of(Line("a", POINTS)))
        assert path.read_bytes().startswith(start)
