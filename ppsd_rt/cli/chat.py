"""Where the turns of `--chat` come from: typed on a terminal, or one for each line of standard input."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..files import cache as cache_file
from ..models.cache import cache_dir
from .common import not_readable
from .notes import complain, wrapped

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

COMMANDS = {  # what is typed: what it does
    "help": "shows this",
    "system TEXT": "gives the model other instructions",
    "set NAME VALUE": "changes temperature, length, top-k, top-p, min-p, repetition-penalty, seed or schedule",
    "regenerate": "answers the last turn again",
    "undo": "forgets the last turn and its answer",
    "file FILE": "sends the file's text with the next turn",
    "save FILE": "keeps the conversation, as JSON",
    "load FILE": "goes on with one that was saved",
    "stats": "shows all statistics of the last answer",
    "copy": "puts the last answer on the clipboard",
    "reset": "forgets the conversation",
    "exit": "ends it, as Ctrl-D does",
}
HELP = (
    "\n".join(f"/{name:<15} {effect}" for name, effect in COMMANDS.items())
    + """
Enter sends a turn; Alt-Enter begins a new line in it, and text that is pasted stays one turn.
The arrow keys bring back earlier turns; Ctrl-R searches them.
Ctrl-C stops an answer; at the prompt it clears the line, and a second one ends.
A space before a / sends the line to the model."""
)

MOST_TURNS = 1000
MOST_BYTES = 1 << 20  # of the file that keeps them
_COMMAND = re.compile(r"/[A-Za-z]+(?=[ \t]|$)[^\n]*")


@dataclass(frozen=True)
class Command:
    """One of COMMANDS, without the slash, and what follows it."""

    name: str
    rest: str = ""


def on_terminal() -> bool:
    """Is a person there to type, and a terminal to show it on?"""
    return sys.stdin.isatty() and any(stream and stream.isatty() for stream in (sys.stdout, sys.stderr))


def next_turn(typed: bool) -> Callable[[], str | Command | None]:
    """What gives the next turn or command; None at the end. UsageError for one that is not text: the next call goes on
    after it."""
    if not typed:
        return _read_line
    session = _session(history_path())
    return lambda: _typed(session)


def history_path() -> Path:
    return cache_dir() / "chat" / "history.json"


def _typed(session: "PromptSession[str]") -> str | Command | None:
    names = {name.split()[0] for name in COMMANDS}
    while True:
        try:
            text = session.prompt("> ", enable_suspend=True, handle_sigint=False)  # signals are ours: see signals.py
        except EOFError:
            return None
        command = _COMMAND.fullmatch(text.rstrip())
        if command is None:
            return text.strip()
        name, _, rest = command[0][1:].partition(" ")
        if name == "help":
            print(wrapped(HELP, sys.stdout), flush=True)
        elif name in names:
            return Command(name, rest.strip())
        else:
            complain(f"ppsd-run: there is no command /{name}: see /help (a space before the / sends it to the model)")


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
    leaving = False

    @keys.add("c-c")
    def _(event: KeyPressEvent) -> None:
        nonlocal leaving
        if leaving and not event.current_buffer.text:
            event.app.exit(exception=EOFError)
        event.current_buffer.reset()
        leaving = True

    def typing(_: object) -> None:
        nonlocal leaving
        leaving = False

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    # Answers may go to a file: the turns are then typed on standard error.
    output = create_output(always_prefer_tty=True)
    session: PromptSession[str] = PromptSession(
        history=Kept(),
        key_bindings=keys,
        output=output,
        reserve_space_for_menu=0,
        rprompt=lambda: "Ctrl-C again ends" if leaving else "",
    )
    session.default_buffer.on_text_insert += typing
    return session


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


def _read_line() -> str | Command | None:
    # As bytes: a text stream that meets a bad byte loses all that it has read ahead.
    line = sys.stdin.buffer.readline()
    try:
        text = line.decode(sys.stdin.encoding, sys.stdin.errors or "strict").strip() if line else None
        return Command("reset") if text == "/reset" else text
    except UnicodeDecodeError as error:
        raise not_readable(error) from None
