"""Where the turns of `--chat` come from: typed on a terminal, or one for each line of standard input."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import cache as cache_file
from ..models.cache import cache_dir
from .common import not_readable
from .notes import complain

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

RESET = "/reset"
HELP = """/help   shows this
/reset  forgets the conversation
/exit   ends it, as Ctrl-D does
Enter sends a turn; Alt-Enter begins a new line in it, and text that is pasted stays one turn.
The arrow keys bring back earlier turns; Ctrl-R searches them. Ctrl-C stops an answer.
A space before a / sends the line to the model."""

MOST_TURNS = 1000
MOST_BYTES = 1 << 20  # of the file that keeps them
_COMMAND = re.compile(r"/[A-Za-z]+(?=[ \t]|$)[^\n]*")


def on_terminal() -> bool:
    """Is a person there to type, and a terminal to show it on?"""
    return sys.stdin.isatty() and any(stream and stream.isatty() for stream in (sys.stdout, sys.stderr))


def next_turn(typed: bool) -> Callable[[], str | None]:
    """What gives the next turn, or RESET; None at the end. UsageError for one that is not text: the next call goes on
    after it."""
    if not typed:
        return _read_line
    session = _session(history_path())
    return lambda: _typed(session)


def history_path() -> Path:
    return cache_dir() / "chat" / "history.json"


def _typed(session: "PromptSession[str]") -> str | None:
    while True:
        try:
            text = session.prompt("> ", enable_suspend=True, handle_sigint=False)  # signals are ours: see signals.py
        except EOFError:
            return None
        command = _COMMAND.fullmatch(text.rstrip())
        if command is None:
            return text.strip()
        word = command[0].split()[0]
        if word == "/help":
            print(HELP, flush=True)
        elif word == "/exit":
            return None
        elif word == RESET:
            return RESET
        else:
            complain(f"ppsd-run: there is no command {word}: see /help (a space before the / sends it to the model)")


def _session(path: Path) -> "PromptSession[str]":
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    class Kept(History):
        """Of earlier conversations too."""

        def load_history_strings(self) -> Iterator[str]:
            return reversed(read_history(path))

        def store_string(self, string: str) -> None:
            keep_turn(path, string)

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    # Answers may go to a file: the turns are then typed on standard error.
    output = create_output(always_prefer_tty=True)
    return PromptSession(history=Kept(), key_bindings=keys, output=output, reserve_space_for_menu=0)


def read_history(path: Path) -> list[str]:
    """The oldest turn first; nothing where the file is missing or damaged."""
    try:
        turns = json.loads(cache_file.read(path, MOST_BYTES))
    except (ValueError, RecursionError):
        return []
    return turns if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns) else []


def keep_turn(path: Path, turn: str) -> None:
    """For later conversations: the newest turns, MOST_TURNS and MOST_BYTES at most, for the user's eyes only."""
    turns = [*read_history(path), turn][-MOST_TURNS:]
    while len(content := json.dumps(turns, indent=0).encode()) > MOST_BYTES:
        turns = turns[len(turns) // 2 + 1 :]
    cache_file.write(path, content)  # which makes files that nobody else may read


def _read_line() -> str | None:
    # As bytes: a text stream that meets a bad byte loses all that it has read ahead.
    line = sys.stdin.buffer.readline()
    try:
        return line.decode(sys.stdin.encoding, sys.stdin.errors or "strict").strip() if line else None
    except UnicodeDecodeError as error:
        raise not_readable(error) from None
