"""An answer on a terminal as it comes: Markdown block by block, or lines whose words wrap whole."""

import re
from time import monotonic

from rich.console import Console, RenderableType
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from ..generation import Generation

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)])[ \t]")
_BEGIN_OF_ITEM = re.compile(r" {0,3}([-*+]|\d{1,9}[.)]?)")  # of which more may come
_REFRESH = 0.03  # seconds: redrawing for each token would slow fast answers down


def show(generation: Generation, markdown: bool, console: Console | None = None) -> None:
    """Print the answer. What is not whole yet (a block, or a line) is shown as plain text until it is."""
    console = console or Console(highlight=False)
    split = whole_blocks if markdown else whole_lines
    text, shown, drawn, first = "", 0, 0.0, True

    def finish(piece: str) -> None:
        nonlocal first
        if markdown and not first:
            console.print()
        if piece.strip() or not markdown:
            console.print(_block(piece, markdown))
            first = False

    with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="visible") as live:
        try:
            for token in generation:
                shown += len(token.text)
                whole, text = split(text + token.text)
                if whole:
                    live.update(Text(), refresh=True)
                    finish(whole)
                if whole or monotonic() - drawn >= _REFRESH:
                    drawn = monotonic()
                    live.update(_end_of(text, console), refresh=True)
        except BaseException:
            generation.close()
            text += generation.completion.text[shown:]
            raise
        finally:
            live.update(Text(), refresh=True)
            live.stop()
            if text:
                finish(text)


def whole_lines(text: str) -> tuple[str, str]:
    """The lines that are whole, and the rest."""
    end = text.rfind("\n") + 1
    return text[:end], text[end:]


def whole_blocks(text: str) -> tuple[str, str]:
    """The blocks of Markdown that nothing can be added to any more, and the rest. A list goes on after blank lines."""
    fence, end, gap, listing, place = "", 0, 0, False, 0
    for line in text.splitlines(keepends=True):
        place += len(line)
        mark = _FENCE.match(line)
        if fence:
            if mark and mark[1].startswith(fence) and line.strip() == mark[1] and line.endswith("\n"):
                fence, end = "", 0 if listing else place
            continue
        if not line.strip():
            gap = place if line.endswith("\n") else gap
            continue
        goes_on = line[0] in " \t" or (listing and (_ITEM.match(line) or _BEGIN_OF_ITEM.fullmatch(line)))
        if gap and not goes_on:
            end, listing = gap, False
        gap = 0
        listing = listing or bool(_ITEM.match(line))
        fence = mark[1] if mark else ""
    return text[:end], text[end:]


def _block(piece: str, markdown: bool) -> RenderableType:
    return Markdown(piece, hyperlinks=False) if markdown else Text(piece.removesuffix("\n"))


def _end_of(text: str, console: Console) -> Text:
    """As much of the end as the screen can redraw."""
    lines = Text(text).wrap(console, console.width)
    return Text("\n").join(lines[-max(1, console.height - 2) :])
