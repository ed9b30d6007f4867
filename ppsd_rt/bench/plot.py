"""Line charts as SVG, written by hand: a grid of panels with common axes. No plotting library is needed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, log10
from xml.sax import saxutils

from ..printable import printable

_COLOURS = ("#4c566a", "#d08770", "#5e81ac", "#2e8b57", "#b48ead", "#bf616a", "#a38a00", "#00868b")
_WIDTH, _HEIGHT = 250, 190  # of a panel's plotting area, in pixels
_LEFT, _TOP, _GAP = 54, 64, 46  # room for the numbers of an axis, for title and legend, between panels
_SIGN, _LETTER = 42, 6.2  # pixels of a legend entry: its stroke and gaps, each letter of its name


@dataclass(frozen=True)
class Line:
    """points: (x, y), drawn in the order of x; dashed: a formula, not a result. Lines of one name share a colour."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    lines: Sequence[Line]


def escape(text: str) -> str:
    """As XML holds it, which has no place for most control characters."""
    return saxutils.escape(printable(text))


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, about five of them."""
    if high <= low:
        return [low]
    rough = (high - low) / 4
    unit = 10.0 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first = -floor(-low / step + 1e-9)
    return [round(step * i, 12) for i in range(first, floor(high / step + 1e-9) + 1)]


def svg(title: str, x_name: str, y_name: str, panels: Sequence[Panel], columns: int) -> str:
    """The chart; `columns`: panels in a row. y begins at 0."""
    points = [point for panel in panels for line in panel.lines for point in line.points]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) * 1.05 or 1.0
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    rows = -(-len(panels) // columns)
    starts = [0, *accumulate(round(_SIGN + _LETTER * len(name)) for name in names)]
    width = _LEFT + max(columns * (_WIDTH + _GAP), starts[-1])
    height = _TOP + rows * (_HEIGHT + _GAP + 22) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    for name, start in zip(names, starts, strict=False):
        x = _LEFT + start
        parts.append(f'<path d="M{x} 36h18" stroke="{colours[name]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 24}" y="40">{escape(name)}</text>')
    for i, panel in enumerate(panels):
        corner = (_LEFT + i % columns * (_WIDTH + _GAP), _TOP + 12 + i // columns * (_HEIGHT + _GAP + 22))
        area = _Area(*corner, left, right, top)
        parts += [*_axes(area, panel.title, x_name, y_name if i % columns == 0 else ""), *_curves(area, panel, colours)]
    return "\n".join([*parts, "</svg>", ""])


@dataclass(frozen=True)
class _Area:
    """Where a panel lies, in pixels, and which values its edges stand for."""

    x0: int
    y0: int
    left: float
    right: float
    top: float

    def x(self, value: float) -> float:
        width = self.right - self.left
        return self.x0 + (_WIDTH * (value - self.left) / width if width > 0 else _WIDTH / 2)

    def y(self, value: float) -> float:
        return self.y0 + _HEIGHT * (1 - value / self.top)


def _axes(area: _Area, title: str, x_name: str, y_name: str) -> Iterator[str]:
    x0, y0, bottom = area.x0, area.y0, area.y0 + _HEIGHT
    middle = f'y="{bottom + 29}" text-anchor="middle"'
    yield f'<text x="{x0}" y="{y0 - 5}">{escape(title)}</text>'
    yield f'<path d="M{x0} {y0}v{_HEIGHT}h{_WIDTH}" fill="none" stroke="#888"/>'
    yield f'<text x="{x0 + _WIDTH / 2}" {middle}>{escape(x_name)}</text>'
    yield (
        f'<text transform="translate({x0 - 36} {y0 + _HEIGHT / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_name)}</text>"
    )
    for value in ticks(area.left, area.right):
        yield f'<text x="{area.x(value):.1f}" y="{bottom + 14}" text-anchor="middle">{value:g}</text>'
    for value in ticks(0.0, area.top):
        y = area.y(value)
        yield f'<path d="M{x0} {y:.1f}h{_WIDTH}" stroke="#e5e5e5"/>'
        yield f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'


def _curves(area: _Area, panel: Panel, colours: Mapping[str, str]) -> Iterator[str]:
    for line in panel.lines:
        colour, points = colours[line.name], [(area.x(x), area.y(y)) for x, y in sorted(line.points)]
        style = ' stroke-dasharray="4 3" opacity="0.8"' if line.dashed else ""
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{style}/>'
        for x, y in [] if line.dashed else points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>'
