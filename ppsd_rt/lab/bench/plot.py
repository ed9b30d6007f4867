"""Charts as SVG or PNG: a grid of panels with common axes and one legend. matplotlib draws; only a plot imports it."""

import io
import warnings
from collections.abc import Iterable, Sequence
from colorsys import hsv_to_rgb
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...extras import need
from ...files.output import OutputFile
from ...printable import printable, quoted, shortened

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png")
MOST_PANELS = 36

# Okabe and Ito's colours, which colour-blind readers can tell apart, without the yellow that white paper swallows.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "X", "P", "<", "*", ">")
_ONE_COLUMN, _TWO_COLUMNS = 3.5, 7.0  # inches: a figure in one column of a paper, or across both
_PANEL_WIDTH, _PANEL_HEIGHT, _CATEGORY, _LEGEND_ROW = 2.33, 2.1, 0.22, 0.17  # inches
_LONGEST_NAME = 40  # characters
_STYLE = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "legend.fontsize": 7.5,
    "legend.frameon": False,
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ppsd-rt",  # the same chart gives the same bytes
}


@dataclass(frozen=True)
class Line:
    """points: (x, y), drawn in the order of x; ranges: of each point's x, (least, most), where repeats differ.

    dashed: a formula, not a result. Lines of one name share a colour and a place in the legend.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    ranges: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]


@dataclass(frozen=True)
class Chart:
    """columns: panels in a row. y begins at 0. dashed: what dashed lines are that have the name of a solid one.

    categories: names of the places 0, 1, ... on the y axis; points are not joined then, and x begins at 0.
    """

    title: str
    x_name: str
    y_name: str
    panels: Sequence[Panel]
    columns: int = 1
    dashed: str = ""
    categories: Sequence[str] = ()


class PlotFile:
    """Tried at once, so that a bad ending, a bad path or a missing matplotlib is told before the work; see OutputFile.

    panels: how many the chart will have, at most.
    """

    def __init__(self, path: str, inputs: Iterable[str | Path | None] = (), panels: int = 1) -> None:
        self._ending = Path(path).suffix.lower()
        if self._ending not in ENDINGS:
            raise UsageError(f"cannot write the plot to {quoted(path)}: its name must end in {' or '.join(ENDINGS)}")
        if panels > MOST_PANELS:
            raise UsageError(f"a plot of {panels} panels cannot be read: at most {MOST_PANELS}, by giving fewer values")
        need("matplotlib", "plot", "a plot")
        self._file = OutputFile(path, "plot", inputs)

    def finish(self, chart: Chart) -> None:
        """PpsdError where it cannot be written."""
        self._file.finish(drawn(chart, self._ending.removeprefix(".")))


def drawn(chart: Chart, format: str) -> bytes:
    """The file's content, the same for the same chart. format: svg or png."""
    from matplotlib import style

    buffer = io.BytesIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # SVG's readers have other fonts
        unwanted = dict.fromkeys(("Creator", "Date") if format == "svg" else ("Software",))
        _figure(chart).savefig(buffer, format=format, dpi=300, bbox_inches="tight", metadata=unwanted)
    return buffer.getvalue()


def _figure(chart: Chart) -> "Figure":
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(line.name for panel in chart.panels for line in panel.lines))
    labels = [_text(name) for name in names]
    rows = -(-len(chart.panels) // chart.columns)
    width = _ONE_COLUMN if chart.columns == 1 else max(_TWO_COLUMNS, _PANEL_WIDTH * chart.columns)
    legend_columns = max(1, int(width / (0.5 + 0.06 * max(map(len, labels)))))
    panel_height = 0.7 + _CATEGORY * len(chart.categories) if chart.categories else _PANEL_HEIGHT
    height = 0.3 + panel_height * rows + _LEGEND_ROW * (1 + len(names) // legend_columns)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(_text(chart.title), fontsize=9)
    handles: dict[str, Artist] = {}
    grid = figure.subplots(rows, chart.columns, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(chart.panels):
            axes.remove()
            continue
        panel = chart.panels[place]
        for line in sorted(panel.lines, key=lambda line: not line.dashed):  # results over formulas
            artist = _draw(axes, line, names.index(line.name), joined=not chart.categories)
            if not line.dashed or line.name not in handles:
                handles[line.name] = artist
        axes.set_title(_text(panel.title))
        axes.set_xlabel(_text(chart.x_name))
        if place % chart.columns == 0:
            axes.set_ylabel(_text(chart.y_name))
        _scale(axes, chart)
    shown = [handles[name] for name in names]
    if chart.dashed:
        from matplotlib.lines import Line2D

        shown.append(Line2D([], [], color="#888888", **_formula(1)))
        labels.append(_text(chart.dashed))
    figure.legend(shown, labels, loc="outside lower center", ncols=legend_columns)
    return figure


def _draw(axes: "Axes", line: Line, number: int, joined: bool) -> "Artist":
    """number: of the line's name in the legend."""
    colour, points = _colour(number), sorted(line.points)
    x, y = [x for x, _ in points], [y for _, y in points]
    if line.dashed:
        return axes.plot(x, y, color=colour, **_formula(number))[0]
    if line.ranges:
        least, most = zip(*(span for _, span in sorted(zip(line.points, line.ranges, strict=True))), strict=True)
        axes.hlines(y, least, most, color=colour, linewidth=1)
    marker, linestyle = _MARKERS[number % len(_MARKERS)], "-" if joined else "none"
    return axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.2, linestyle=linestyle)[0]


def _colour(number: int) -> str:
    """Another one for every number: where the safe ones are used up, hues a golden section apart."""
    if number < len(_COLOURS):
        return _COLOURS[number]
    from matplotlib.colors import to_hex

    return to_hex(hsv_to_rgb(0.618034 * number % 1, 0.75, 0.4 + 0.2 * (number % 3)))


def _formula(number: int) -> dict[str, Any]:
    """Wider and paler than a result, which may lie on it; neighbours in the legend have dashes of other lengths."""
    return {"linestyle": (0, (1.0 + number % 5, 1.0)), "linewidth": 2.4, "alpha": 0.45}


def _scale(axes: "Axes", chart: Chart) -> None:
    from matplotlib.ticker import MaxNLocator

    lines = [line for panel in chart.panels for line in panel.lines]
    xs = [x for line in lines for x, _ in line.points] + [x for line in lines for span in line.ranges for x in span]
    if chart.categories:
        axes.set_xlim(0, max(xs) * 1.05 or 1.0)
        axes.set_yticks(range(len(chart.categories)), [_text(name) for name in chart.categories])
        axes.set_ylim(len(chart.categories) - 0.5, -0.5)
        return
    margin = 0.05 * (max(xs) - min(xs)) or 0.5
    axes.set_xlim(min(xs) - margin, max(xs) + margin)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=all(float(x).is_integer() for x in xs)))
    axes.set_ylim(0, max(y for line in lines for _, y in line.points) * 1.05 or 1.0)


def _text(text: str) -> str:
    return shortened(printable(text), _LONGEST_NAME)
