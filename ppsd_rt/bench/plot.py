"""Line charts as SVG, written by hand: a grid of panels with common axes. No plotting library is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log10
from xml.sax.saxutils import escape

_COLOURS = ("#4c566a", "#d08770", "#5e81ac", "#2e8b57", "#b48ead", "#bf616a", "#a38a00", "#00868b")
_WIDTH, _HEIGHT = 250, 190  # of a panel's plotting area, in pixels
_LEFT, _TOP, _GAP = 54, 64, 46  # room for the numbers of an axis, for title and legend, between panels
_LEGEND = 150  # pixels of one entry


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
    width = max(_LEFT + columns * (_WIDTH + _GAP), _LEFT + len(names) * _LEGEND)
    height = _TOP + rows * (_HEIGHT + _GAP + 22) + 6
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14">{escape(title)}</text>',
    ]
    for i, name in enumerate(names):
        x = _LEFT + i * _LEGEND
        parts.append(f'<path d="M{x} 36h18" stroke="{colours[name]}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 24}" y="40">{escape(name)}</text>')
    for i, panel in enumerate(panels):
        x0, y0 = _LEFT + i % columns * (_WIDTH + _GAP), _TOP + 12 + i // columns * (_HEIGHT + _GAP + 22)

        def at_x(x: float, x0: int = x0) -> float:
            return x0 + (_WIDTH * (x - left) / (right - left) if right > left else _WIDTH / 2)

        def at_y(y: float, y0: int = y0) -> float:
            return y0 + _HEIGHT * (1 - y / top)

        parts.append(f'<text x="{x0}" y="{y0 - 5}">{escape(panel.title)}</text>')
        parts.append(f'<path d="M{x0} {y0}v{_HEIGHT}h{_WIDTH}" fill="none" stroke="#888"/>')
        for x in ticks(left, right):
            parts.append(f'<text x="{at_x(x):.1f}" y="{y0 + _HEIGHT + 14}" text-anchor="middle">{x:g}</text>')
        for y in ticks(0.0, top):
            parts.append(f'<path d="M{x0} {at_y(y):.1f}h{_WIDTH}" stroke="#e5e5e5"/>')
            parts.append(f'<text x="{x0 - 6}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
        parts.append(
            f'<text x="{x0 + _WIDTH / 2}" y="{y0 + _HEIGHT + 29}" text-anchor="middle">{escape(x_name)}</text>'
        )
        if i % columns == 0:
            middle = y0 + _HEIGHT / 2
            parts.append(
                f'<text transform="translate({x0 - 36} {middle}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>'
            )
        for line in panel.lines:
            path = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in sorted(line.points))
            style = ' stroke-dasharray="4 3" opacity="0.8"' if line.dashed else ""
            parts.append(f'<path d="M{path}" fill="none" stroke="{colours[line.name]}" stroke-width="2"{style}/>')
            if not line.dashed:
                parts += [
                    f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.5" fill="{colours[line.name]}"/>'
                    for x, y in line.points
                ]
    return "\n".join([*parts, "</svg>", ""])
