"""An answer on a terminal: its end is redrawn as Markdown or as text; or, by `--show-drafts`, as it is drafted."""

from time import monotonic

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from ..engine import Engine
from ..generation import Committed, Generation

_REFRESH = 0.05  # seconds; and drawing takes a tenth of the time at most
STYLES = {"accepted": "green", "copied": "yellow", "corrected": "red", "bonus": "cyan", "plain": ""}
DRAFT = "magenta italic"
_WITHOUT_COLOUR = {
    "accepted": "underline",
    "copied": "italic underline",
    "corrected": "bold",
    "bonus": "bold italic",
    "plain": "",
}


class _End:
    """The end of a text: as many lines as the screen can redraw."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def show(generation: Generation, markdown: bool, console: Console | None = None) -> None:
    """Print the answer as it comes, and at the end all of it."""
    console = console or Console(highlight=False)
    text, next_time = "", 0.0

    def block() -> RenderableType:
        return Markdown(text, hyperlinks=False) if markdown else Text(text)

    try:
        with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible") as live:
            for token in generation:
                text += token.text
                if (begun := monotonic()) >= next_time:
                    live.update(_End(block()), refresh=True)
                    next_time = max(begun + _REFRESH, begun + 10 * (monotonic() - begun))
    except BaseException:
        generation.close()
        text = generation.completion.text
        raise
    finally:
        console.print(block())


def styles_of(console: Console) -> dict[str, str]:
    """The styles by origin; where there are no colours (NO_COLOR), such as differ without them."""
    return _WITHOUT_COLOUR if console.no_color else STYLES


def show_drafts(engine: Engine, generation: Generation, console: Console | None = None) -> None:
    """Print the answer: drafts in magenta until the verdict; then accepted ones green, copies yellow, others red.

    Only the unfinished line is redrawn; finished lines scroll away as they are. Where the answer breaks off, what had
    been held back of it follows, without colour.
    """
    console = console or Console()
    styles = styles_of(console)
    legend = [(name, style) for name, style in {"draft": DRAFT, **styles}.items()]
    console.print(Text("  ").join(Text(name, style) for name, style in legend))
    line, shown = Text(), 0  # characters of the answer that line, and those before it, have
    ids: list[int] = []  # the last committed id, then the draft tokens that stand
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        try:
            for event in generation.events():
                if isinstance(event, Committed):
                    ids = [] if event.round.corrected else ids[1 + len(event.tokens) :]
                    ids.insert(0, event.tokens[-1].id)
                    for token in event.tokens:
                        line.append(token.text, styles[token.origin])
                        shown += len(token.text)
                    line = _print_finished(live, line)
                else:
                    ids.append(event.token)
                live.update(line + Text(_draft_text(engine, ids), DRAFT), refresh=True)
        except BaseException:
            generation.close()
            line = _print_finished(live, line.append(generation.completion.text[shown:]))
            raise
        finally:
            live.update(line, refresh=True)


def _print_finished(live: Live, line: Text) -> Text:
    """Print all lines but the last, which may go on."""
    *finished, last = line.split("\n", allow_blank=True) or [Text()]
    for whole in finished:
        live.console.print(whole)
    return last


def _draft_text(engine: Engine, ids: list[int]) -> str:
    """The text of ids[1:], as it follows ids[0]; a character that is not whole yet is left out."""
    decode = engine.tokenizer.decode
    return decode(ids)[len(decode(ids[:1])) :].rstrip("\N{REPLACEMENT CHARACTER}").replace("\n", "⏎")
