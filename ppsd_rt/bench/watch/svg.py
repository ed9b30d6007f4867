"""A recording as one SVG file that plays by itself, again and again: lanes run past, drafts change colour when judged.

Styles do it all (CSS animations), so that it plays inside an `<img>`. Where motion is not wanted it stands still, and
shows the beginning as it was judged.
"""

from collections.abc import Iterator
from html import escape

from ...printable import printable, shortened
from .record import DraftToken, Recording, Verdict

_LEFT, _RIGHT, _TOP = 190, 884, 50  # pixels: where the lanes are
_LANE, _BLOCK = 52, 30
_STEP = 46.0  # pixels of a usual draft step
_LETTER = 6.6  # pixels of a character of 11 pixels, in a font where all are as wide
_LINE = 17
_HOLD = 3.0  # seconds at the end
_STYLE = """
svg { --page: #fff; --text: #1f2328; --line: #d1d9e0; --dim: #59636e; --ok: #1a7f37; --ok-fill: #dafbe1;
      --no: #cf222e; --no-fill: #ffebe9; --fly: #8250df; --fly-fill: #fbefff; --pass: #0969da; --pass-fill: #ddf4ff }
@media (prefers-color-scheme: dark) {
  svg { --page: #0d1117; --text: #e6edf3; --line: #3d444d; --dim: #9198a1; --ok: #3fb950; --ok-fill: #12261e;
        --no: #f85149; --no-fill: #25171c; --fly: #a371f7; --fly-fill: #1c1530; --pass: #4493f8; --pass-fill: #121d2f }
}
.page { fill: var(--page) } text { fill: var(--text); white-space: pre } .dim { fill: var(--dim) }
.mono { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: 11px }
.line { stroke: var(--line); stroke-dasharray: 3 3 } .now { stroke: var(--text) } rect { rx: 4px }
.drafted { fill: var(--ok) } .own { fill: var(--no) } .plain { fill: var(--text) }
"""
_SOLID = "stroke-dasharray: none"
_LOOKS = {  # of blocks, by their classes; all say how their edges are, for an animation may change one into another
    "accepted": f"fill: var(--ok-fill); stroke: var(--ok); {_SOLID}",
    "rejected": f"fill: var(--no-fill); stroke: var(--no); {_SOLID}",
    "dropped": "fill: none; stroke: var(--dim); stroke-dasharray: 4px 3px",
    "row": f"fill: none; stroke: var(--dim); {_SOLID}",
    "flying": f"fill: var(--fly-fill); stroke: var(--fly); {_SOLID}",
    "verify": f"fill: var(--pass-fill); stroke: var(--pass); {_SOLID}",
}
_STYLE += "".join(f".{name} {{ {look} }}\n" for name, look in _LOOKS.items())


class _Animation:
    """Keyframes of a loop: the places in it are microseconds of the recording."""

    def __init__(self, end: float, slow: float) -> None:
        self.seconds = end * slow / 1e6 + _HOLD
        self._slow, self._rules = slow, list[str]()

    def place(self, at: float) -> float:
        """Percent of the loop."""
        return round(100 * at * self._slow / 1e6 / self.seconds, 3)

    def until(self, at: float, style: str, after: str) -> str:
        """An attribute: `style` before `at`, then `after`."""
        name = f"k{len(self._rules)}"
        self._rules.append(f"@keyframes {name} {{ 0% {{ {style} }} {self.place(at)}%, to {{ {after} }} }}")
        return f' style="animation: {name} {self.seconds:.2f}s step-end infinite"'

    def rules(self, length: float, end: float) -> str:
        """Of all, and of the lanes, which run `length` pixels until `end`."""
        run = f"{self.place(end)}%, to {{ transform: translateX({-length:.1f}px) }}"
        return "\n".join(
            [
                *self._rules,
                f"@keyframes go {{ 0% {{ transform: translateX(0) }} {run} }}",
                f".go {{ transform: translateX({_LEFT - _RIGHT}px); "
                f"animation: go {self.seconds:.2f}s linear infinite }}",
                "@media (prefers-reduced-motion: reduce) { * { animation: none !important } }",
            ]
        )


def draw(recording: Recording, prompt: str, slow: float) -> str:
    """The file's text. The right edge of the lanes is now; `slow` times slower than it was."""
    scale = _STEP / recording.step()  # pixels of a microsecond
    animation = _Animation(recording.end, slow)
    lanes = [f'<text x="16" y="{_middle(track)}">{escape(name)}</text>' for track, name in enumerate(recording.stages)]
    verdict_lane = len(recording.stages)
    lanes.append(f'<text x="16" y="{_middle(verdict_lane)}">verdicts: committed</text>')
    moving = [
        *_ticks(recording, scale, verdict_lane),
        *_drafts(recording, scale, animation),
        *_passes(recording, scale, animation),
        *_verdicts(recording, scale, animation, verdict_lane),
    ]
    top = _TOP + _LANE * (verdict_lane + 1) + 20
    answer, bottom = _answer(recording, animation, top)
    heading = f"“{shortened(printable(prompt), 60)}”  {recording.title}: recorded, then shown {slow:g} times slower"
    height = bottom + 12
    edge = f'<path class="now" d="M{_RIGHT} {_TOP - 14}V{top - 18}"/>'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" width="900" height="{height}" '
            'role="img" font-family="system-ui, sans-serif" font-size="12">',
            "<title>Draft tokens are drawn while others are being verified</title>",
            f"<style>{_STYLE}{animation.rules(recording.end * scale, recording.end)}\n</style>",
            f'<clipPath id="lanes"><rect x="{_LEFT}" y="0" width="{_RIGHT - _LEFT}" height="{height}"/></clipPath>',
            f'<rect class="page" width="900" height="{height}"/>',
            f'<text class="dim" x="16" y="20">{escape(heading)}</text>',
            *lanes,
            '<g clip-path="url(#lanes)"><g class="go">',
            *moving,
            "</g></g>",
            edge,
            *answer,
            "</svg>\n",
        ]
    )


def _middle(lane: int) -> int:
    return _TOP + _LANE * lane + _BLOCK // 2 + 4


def _ticks(recording: Recording, scale: float, lanes: int) -> Iterator[str]:
    """Vertical lines at round times, at most seven of them to be seen at once."""
    window = (_RIGHT - _LEFT) / scale
    every = next(unit * 10**power for power in range(12) for unit in (1, 2, 5) if 7 * unit * 10**power > window)
    for number in range(int(recording.end / every) + 1):
        x = _RIGHT + number * every * scale
        yield f'<path class="line" d="M{x:.1f} {_TOP - 8}V{_TOP + _LANE * (lanes + 1)}"/>'
        yield f'<text class="dim" x="{x + 3:.1f}" y="{_TOP - 4}" font-size="10">{number * every / 1000:g} ms</text>'


def _block(track: int, begin: float, end: float, scale: float, kind: str, label: str, more: str = "") -> Iterator[str]:
    x, width = _RIGHT + begin * scale, max((end - begin) * scale - 1, 1.0)
    y = _TOP + _LANE * track
    yield f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BLOCK}"{more}/>'
    room = int((width - 4) / _LETTER)
    label = printable(label)
    label = label if len(label) <= room else label[: max(room - 1, 0)] + "…" * (room > 0)
    if label.strip():
        yield f'<text class="mono" x="{x + 3:.1f}" y="{_middle(track)}">{escape(label)}</text>'


def _drafts(recording: Recording, scale: float, animation: _Animation) -> Iterator[str]:
    waiting = list(recording.drafts)
    for name, track, _, begin, end in recording.spans:
        if track:
            continue
        drawn: list[DraftToken] = []
        if name == "draft":
            while waiting and waiting[0].drawn <= end:
                drawn.append(waiting.pop(0))
        kind, more = "dropped" if name.startswith("dropped") else "row", ""
        if drawn:
            kind = drawn[-1].fate
            more = animation.until(drawn[-1].judged, _LOOKS["flying"], _LOOKS[kind])
        yield from _block(track, begin, end, scale, kind, "".join(draft.text for draft in drawn), more)


def _passes(recording: Recording, scale: float, animation: _Animation) -> Iterator[str]:
    for name, track, rows, begin, end in recording.spans:
        if not track:
            continue
        dropped = name.startswith("dropped")
        more = animation.until(end, _LOOKS["verify"], _LOOKS["dropped"]) if dropped else ""
        label = f"{rows} token{'s' * (rows != 1)}"
        yield from _block(track, begin, end, scale, "dropped" if dropped else "verify", label, more)


def _verdicts(recording: Recording, scale: float, animation: _Animation, lane: int) -> Iterator[str]:
    """What each committed, left of its moment, as far as there is room after the one before."""
    before = 0.0
    for verdict in recording.verdicts:
        x = _RIGHT + verdict.at * scale
        room = int((verdict.at - before) * scale / _LETTER) - 1
        before = verdict.at
        words = _words(verdict, room)
        shown = animation.until(verdict.at, "opacity: 0", "opacity: 1")
        spans = "".join(f'<tspan class="{_ink(kind)}">{escape(text)}</tspan>' for kind, text in words)
        yield f'<text class="mono" text-anchor="end" x="{x:.1f}" y="{_middle(lane)}"{shown}>{spans}</text>'


def _ink(origin: str) -> str:
    """Of a committed token: foreseen by a draft, the model's own instead of one, or without one."""
    return {"plain": "plain", "bonus": "plain", "corrected": "own", "back": "own"}.get(origin, "drafted")


def _words(verdict: Verdict, room: int) -> list[tuple[str, str]]:
    """(origin, text), the last ones where there is no room for all."""
    words = [(origin, printable(text)) for text, origin in verdict.tokens]
    if verdict.rolled_back:
        words.append(("back", " ↺ roll back"))
    while len(words) > 1 and sum(len(text) for _, text in words) > room:
        words.pop(0 if not verdict.rolled_back or len(words) > 2 else -1)
    return words


def _answer(recording: Recording, animation: _Animation, top: int) -> tuple[list[str], int]:
    """The committed text, each token from its moment on, in lines; and where the last one is."""
    parts: list[str] = []
    column, y, most = 0, top + 4, int((_RIGHT - 16) / _LETTER)
    for verdict in recording.verdicts:
        shown = animation.until(verdict.at, "opacity: 0", "opacity: 1")
        for text, origin in verdict.tokens:
            for number, piece in enumerate(text.split("\n")):
                if number or column + len(piece) > most:
                    column, y = 0, y + _LINE
                piece = printable(piece)
                if piece.strip():
                    x, length = 16 + column * _LETTER, len(piece) * _LETTER
                    parts.append(
                        f'<text class="mono {_ink(origin)}" x="{x:.1f}" y="{y}" textLength="{length:.1f}"{shown}>'
                        f"{escape(piece)}</text>"
                    )
                column += len(piece)
    return parts, y
