"""Curves and points over common axes, with a legend, as SVG or PNG. matplotlib draws; only a plot imports it."""

import io
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import UsageError
from ..extras import need
from ..files import OutputFile
from ..printable import printable, quoted, shortened

ENDINGS = (".svg", ".png")

# Okabe and Ito's colours, which colour-blind readers can tell apart, without the yellow that white paper swallows.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_MARKERS = ("o", "s", "^", "D", "v", "X", "P", "<", "*", ">")
_WIDTH, _HEIGHT, _LEGEND_ROW = 3.5, 2.6, 0.17  # inches: a figure in one column of a paper
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
    """points: (x, y) by x. dashed: a formula, not a result; wider and paler, as results may lie on it."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


class PlotFile:
    """Tried at once, so that a bad ending, a bad path or no matplotlib is told before the work; see OutputFile."""

    def __init__(self, path: str, inputs: Iterable[str | Path | None] = ()) -> None:
        self._ending = Path(path).suffix.lower()
        if self._ending not in ENDINGS:
            raise UsageError(f"cannot write the plot to {quoted(path)}: its name must end in {' or '.join(ENDINGS)}")
        need("matplotlib", "plot", "a plot")
        self._file = OutputFile(path, "plot", inputs)

    def finish(self, title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> None:
        """y begins at 0. PpsdError where it cannot be written."""
        self._file.finish(_drawn(self._ending.removeprefix("."), title, x_name, y_name, lines))


def _drawn(format: str, title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> bytes:
    """The file's content, the same for the same lines. format: svg or png."""
    from matplotlib import colormaps, style
    from matplotlib.figure import Figure

    names = [shortened(printable(line.name), _LONGEST_NAME) for line in lines]
    legend_columns = max(1, int(_WIDTH / (0.5 + 0.06 * max(map(len, names)))))
    colours = (*_COLOURS, *colormaps["tab20"].colors)  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    with style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # SVG's readers have other fonts
        height = _HEIGHT + _LEGEND_ROW * (1 + len(names) // legend_columns)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        axes = figure.subplots()
        for number, (line, name) in enumerate(zip(lines, names, strict=True)):
            x, y, colour = *zip(*line.points, strict=True), colours[number % len(colours)]
            if line.dashed:  # neighbours in the legend have dashes of other lengths
                dashes = (0, (1.0 + number % 5, 1.0))
                axes.plot(x, y, color=colour, label=name, linestyle=dashes, linewidth=2.4, alpha=0.45)
            else:
                axes.plot(x, y, color=colour, label=name, marker=_MARKERS[number % len(_MARKERS)], markersize=4)
        axes.set(title=title, xlabel=x_name, ylabel=y_name, ylim=(0, None))
        figure.legend(loc="outside lower center", ncols=legend_columns)
        unwanted = dict.fromkeys(("Creator", "Date") if format == "svg" else ("Software",))
        figure.savefig(buffer, format=format, dpi=300, bbox_inches="tight", metadata=unwanted)
    return buffer.getvalue()
