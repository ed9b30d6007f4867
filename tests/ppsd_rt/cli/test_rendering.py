"""An answer on a terminal: words stay whole, and Markdown is rendered as it comes."""

import io
from itertools import pairwise
from types import SimpleNamespace

import pytest
from rich.console import Console

from ppsd_rt.cli import rendering
from ppsd_rt.cli.rendering import show

MARKDOWN = """# Title

Some *words* that go on for longer than the terminal is wide.
And a second line.

1. one

2. two

   more of two

```python
a = 1

b = 2
```
The end"""


class Answer:
    """As of a Generation, in pieces of three characters."""

    def __init__(self, text, fails_after=10**9):
        self.text, self.fails_after = text, fails_after
        self.completion = SimpleNamespace(text=text)

    def __iter__(self):
        for place in range(0, len(self.text), 3):
            if place > self.fails_after:
                raise KeyboardInterrupt
            yield SimpleNamespace(text=self.text[place : place + 3])

    def close(self):
        pass


@pytest.fixture(autouse=True)
def always_redrawn(monkeypatch):
    monkeypatch.setattr(rendering, "_REFRESH", 0.0)


def shown(answer, markdown, width=40):
    """Everything that was written to a terminal, and what scrolled by as finished."""
    screen = io.StringIO()
    console = Console(file=screen, width=width, height=10, force_terminal=True, color_system=None, highlight=False)
    finished, live = [], console.print
    console.print = lambda *things, **options: (finished.append(things), live(*things, **options))[1]
    show(answer, markdown, console)
    text = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    for things in finished:
        text.print(*things)
    return screen.getvalue(), text.file.getvalue()


@pytest.mark.parametrize("width", [40, 60, 100])
def test_words_wrap_whole_at_any_width(width):
    words = [f"word{number}" for number in range(60)]
    _, text = shown(Answer(" ".join(words) + "\n\nend"), False, width)
    assert text.split() == [*words, "end"]
    assert max(map(len, text.splitlines())) <= width
    assert "\n\n" in text


def test_markdown_is_rendered():
    screen, text = shown(Answer(MARKDOWN), True)
    assert "Some words" in screen and "*words*" not in text
    assert "Some words that" in text
    assert "1 one" in text
    assert "2 two" in text
    assert "```" not in text
    assert "a = 1" in text
    assert text.rstrip().endswith("The end")


def test_what_was_held_back_follows_an_interruption():
    screen = io.StringIO()
    console = Console(file=screen, width=40, force_terminal=True, color_system=None)
    with pytest.raises(KeyboardInterrupt):
        show(Answer("one two three four five", fails_after=6), False, console)
    assert screen.getvalue().rstrip("\x1b[?25h\n").endswith("one two three four five")


def test_a_long_answer_is_redrawn_by_its_end_only():
    """More than a screen of it could not be wiped out again; all of it stands there at the end."""
    screen, text = shown(Answer("\n\n".join(f"part{number}" for number in range(30))), True)
    assert text.split() == [f"part{number}" for number in range(30)]
    drawn = max(len(piece.split("\n")) for piece in screen.rpartition("\x1b[2K")[0].split("\x1b[2K"))
    assert drawn <= 10


def test_drawing_takes_a_small_share_of_the_time(monkeypatch):
    now, drawn = [0.0], []

    class Slow(rendering._End):
        def __init__(self, whole):
            drawn.append(now[0])
            now[0] += 0.2  # to draw

    monkeypatch.setattr(rendering, "_End", Slow)
    monkeypatch.setattr(Slow, "__rich_console__", lambda *_: iter(()), raising=False)
    monkeypatch.setattr(rendering, "monotonic", lambda: now.__setitem__(0, now[0] + 0.01) or now[0])
    shown(Answer("x" * 3000), True)
    assert len(drawn) > 3 and min(b - a for a, b in pairwise(drawn)) > 2.0
