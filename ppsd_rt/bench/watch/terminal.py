"""A recording on the terminal: one lane for each stage, the draft tokens in flight, the newest verdict, the answer."""

from collections.abc import Callable, Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ...cli.rendering import STYLES, styles_of
from ...printable import printable
from ...ranks.threads import CLOCK, Clock
from .record import Recording, Verdict

FRAMES = 12.0  # a second
IN_FLIGHT = "magenta reverse"
_WORK = {"draft": "magenta", "verify": "blue", "dropped draft": "dim red", "dropped verify": "dim red"}
_COUNTS = "0123456789abcdefghijklmnopqrstuvwxyz"
_LEGEND = (
    "a digit begins a piece of work and counts its tokens; x: a verdict made it void; "
    "verdicts: tokens committed, !: roll back"
)
_STEP_COLUMNS = 4  # of a usual draft step
_LEAST = 20  # columns of a lane


def frame(recording: Recording, at: float, width: int, pace: str = "", styles: Mapping[str, str] = STYLES) -> Group:
    """What is to be seen `at` microseconds, `width` columns wide; the right edge of the lanes is now."""
    names = [*recording.stages, "verdicts"]
    if max(map(len, names)) + 2 + _LEAST > width:
        names = [name.partition(":")[0] for name in names]
    label = max(map(len, names))
    columns = max(width - label - 2, _LEAST)
    column = recording.step() / _STEP_COLUMNS
    seen = [verdict for verdict in recording.verdicts if verdict.at <= at]
    lines = [Text(f"{at / 1000:8.2f} ms of {recording.end / 1000:.2f} ms  {recording.title}{pace}", "bold"), Text()]
    for track, name in enumerate(names[:-1]):
        lines.append(Text(f"{name:<{label}} |") + _lane(recording, track, at, column, columns))
    lines.append(Text(f"{'verdicts':<{label}} |") + _landed(seen, at, column, columns))
    flying = [draft for draft in recording.drafts if draft.drawn <= at < draft.judged]
    texts = [Text(_shown(draft.text), IN_FLIGHT) for draft in flying]
    lines += [Text(), Text("drafts in flight: ") + Text(" ").join(texts)]
    lines.append(Text("newest verdict:   ") + (_verdict(seen[-1], styles) if seen else Text()))
    lines += [Text(), Text.assemble(*((text, styles[origin]) for verdict in seen for text, origin in verdict.tokens))]
    legend = Text("  ").join([Text(name, style) for name, style in styles.items() if style])
    return Group(*lines, Text(), legend + Text("  ") + Text("draft in flight", IN_FLIGHT), Text(_LEGEND, "dim"))


def _lane(recording: Recording, track: int, at: float, column: float, columns: int) -> Text:
    cells: list[tuple[str, str]] = [(" ", "")] * columns
    left = at - columns * column
    for name, on, rows, begin, end in recording.spans:
        if on != track or begin > at or end < left:
            continue
        first = round((begin - left) / column)
        last = max(round((min(end, at) - left) / column), first + 1)
        going_on = end > at
        void = name.startswith("dropped") and not going_on  # nobody knows before it ends
        text = _COUNTS[min(rows, len(_COUNTS) - 1)] + ("x" if void else "=") * (last - first - 1)
        text = "x" if void and last - first == 1 else text
        style = _WORK["draft" if track == 0 else "verify"] if going_on else _WORK[name]
        for place in range(max(first, 0), min(last, columns)):
            cells[place] = (text[place - first], style)
    return Text.assemble(*cells)


def _landed(verdicts: list[Verdict], at: float, column: float, columns: int) -> Text:
    cells: list[tuple[str, str]] = [(" ", "")] * columns
    for verdict in verdicts:
        place = round((verdict.at - at) / column) + columns - 2
        mark = _COUNTS[min(len(verdict.tokens), len(_COUNTS) - 1)] + "!" * verdict.rolled_back
        for character, where in zip(mark, range(place, columns), strict=False):
            if where >= 0:
                cells[where] = (character, "red" if verdict.rolled_back else "green")
    return Text.assemble(*cells)


def _verdict(verdict: Verdict, styles: Mapping[str, str]) -> Text:
    words = [Text(f"{_shown(text)} {origin}", styles[origin]) for text, origin in verdict.tokens]
    if verdict.rolled_back:
        words.append(Text(f"roll back: {verdict.dropped} later draft{'s' * (verdict.dropped != 1)} dropped", "red"))
    return Text(", ").join(words)


def _shown(text: str) -> str:
    return f"“{printable(text)}”"


def play(
    recording: Recording, slow: float, console: Console, clock: Clock = CLOCK, step: Callable[[], bool] | None = None
) -> None:
    """Show it, `slow` times slower than it was. step: waits for the user before each moment; False: enough."""
    pace = "" if step else f", shown {slow:g} times slower"

    def picture(at: float) -> Group:
        return frame(recording, at, console.width, pace, styles_of(console))

    with Live(picture(0.0), console=console, screen=True, auto_refresh=False) as live:
        if step is not None:
            for at in recording.moments():
                live.update(picture(at), refresh=True)
                if not step():
                    break
        else:
            begun = clock.now()
            while (at := (clock.now() - begun) * 1e6 / slow) < recording.end:
                live.update(picture(at), refresh=True)
                clock.sleep(1 / FRAMES)
    console.print(picture(recording.end))
