"""Charts: the same for the same lines, in the format that the file's ending says; what is refused before any work."""

import sys

import pytest

from ppsd_rt.bench.plot import Line, PlotFile
from ppsd_rt.errors import PpsdError, UsageError

POINTS = [(0, 1), (0.5, 2), (1, 2.5)]


def plotted(path, *lines):
    path.write_text("old")
    plot = PlotFile(str(path))
    assert path.read_text() == "old"
    plot.finish("title", "delay (ms)", "speed", lines)
    return path.read_bytes()


@pytest.mark.parametrize(("name", "start"), [("a.SVG", b"<?xml"), ("a.png", b"\x89PNG")])
def test_the_same_chart_gives_the_same_bytes(tmp_path, name, start, monkeypatch):
    lines = [Line("a", POINTS, dashed=True), Line("b", POINTS[:1])]
    first = plotted(tmp_path / name, *lines)
    assert first.startswith(start)
    assert b"date>" not in first
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")  # the date that matplotlib would write
    assert plotted(tmp_path / name, *lines) == first
    assert plotted(tmp_path / name, *lines[:1]) != first


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
