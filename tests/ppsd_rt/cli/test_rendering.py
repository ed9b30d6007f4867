"""An answer on a terminal: words stay whole, and Markdown is rendered when a block is."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from ppsd_rt.cli import rendering
from ppsd_rt.cli.rendering import show, whole_blocks, whole_lines

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


def test_blocks_are_whole_when_nothing_can_be_added():
    blocks, rest = [], ""
    for character in MARKDOWN:
        whole, rest = whole_blocks(rest + character)
        blocks += [whole] if whole else []
    assert [block.strip() for block in [*blocks, rest]] == [
        "# Title",
        "Some *words* that go on for longer than the terminal is wide.\nAnd a second line.",
        "1. one\n\n2. two\n\n   more of two",
        "```python\na = 1\n\nb = 2\n```",
        "The end",
    ]
    assert whole_lines("a\nb\nc") == ("a\nb\n", "c")


def test_markdown_is_rendered():
    screen, text = shown(Answer(MARKDOWN), True)
    assert "*words*" in screen  # while the block was not whole
    assert "*words*" not in text
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
