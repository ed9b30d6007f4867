"""An answer on a terminal as it comes: its end is redrawn as Markdown or as text; at the end all of it is printed."""

from time import monotonic

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from ..generation import Generation

_REFRESH = 0.05  # seconds; and drawing takes a tenth of the time at most


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
    """Print the answer."""
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
