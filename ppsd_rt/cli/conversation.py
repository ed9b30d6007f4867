"""`ppsd-run --chat`: a conversation. The history is sent with every turn; the KV cache keeps what has not changed."""

import argparse
import os
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..backend import RunOptions
from ..engine import Engine
from ..errors import ContextFull, PpsdError, UsageError
from ..generation import Completion, Generation
from ..models.cache import cache_dir
from ..pipeline.schedule import Auto, Schedule
from ..sampling.params import SamplingParams
from . import signals
from .common import agreed, check_text, counted, given_text, statistics_line
from .notes import complain, note, wrapped

Messages = list[dict[str, str]]

ROOM = 0.25  # of the context, that is free after the oldest turns were dropped
COMMANDS = {  # what is typed on a terminal: what it does
    "help": "shows this",
    "system TEXT": "gives the model other instructions",
    "regenerate": "answers the last turn again",
    "undo": "forgets the last turn and its answer",
    "file FILE": "sends the file's text with the next turn",
    "stats": "shows all statistics of the last answer",
    "reset": "forgets the conversation",
    "exit": "ends it, as Ctrl-D does",
}
HELP = (
    "\n".join(f"/{name:<12} {effect}" for name, effect in COMMANDS.items())
    + """
Enter sends a turn; Alt-Enter begins a new line in it, and text that is pasted stays one turn.
The arrow keys bring back earlier turns; Ctrl-R searches them.
Ctrl-C stops an answer; at the prompt it clears the line, and a second one ends.
A space before a / sends the line to the model."""
)


def converse(
    engine: Engine,
    params: SamplingParams,
    schedule: Schedule | Auto,
    args: argparse.Namespace,
    options: Callable[[], RunOptions],
    answer: Callable[[Generation], bool],
) -> int:
    """options: of each answer. answer: prints one; False when it was interrupted."""
    if engine.tokenizer.chat_template is None:
        raise PpsdError(f"{args.model} has no chat template; --chat needs one")
    if args.system is not None:
        check_text(args.system, "--system")
    typed = on_terminal()
    conversation = _Conversation(engine, params, schedule, args.system, options, answer, typed)
    if typed:
        note("/help shows what can be typed; Ctrl-C stops an answer; Ctrl-D ends")
    names = {name.split()[0] for name in COMMANDS} if typed else {"reset"}
    whole = True
    for text in _typed_turns() if typed else _lines():
        asked = False
        try:
            name, _, rest = text.removeprefix("/").partition(" ")
            if text.startswith("/") and name in names and "\n" not in text:
                if name == "exit":
                    break
                getattr(conversation, f"do_{name}")(rest.strip())
            elif typed and text.startswith("/") and name.isalpha():
                raise UsageError(f"there is no command /{name}: see /help (a space before the / sends it to the model)")
            elif text := text.strip():
                check_text(text)
                asked = True
                conversation.ask(text)
        except PpsdError as error:
            complain(f"ppsd-run: {error}" + " (this turn was dropped; /reset forgets the conversation)" * asked)
            whole = False
        if conversation.ended:
            return signals.status()
    return 0 if whole or typed else 2


def on_terminal() -> bool:
    """Is a person there to type, and a terminal to show it on?"""
    return sys.stdin.isatty() and any(stream and stream.isatty() for stream in (sys.stdout, sys.stderr))


def _lines() -> Iterator[str]:
    """The lines of standard input, as a file is read. One that is no text is refused as that turn; the others count."""
    marked = sys.stdin.buffer.peek(2)[:2] in (BOM_UTF16_BE, BOM_UTF16_LE)  # type: ignore[union-attr]
    encoding, errors = ("utf-16", "replace") if marked else ("utf-8-sig", "surrogateescape")
    sys.stdin.reconfigure(encoding=encoding, errors=errors)  # type: ignore[union-attr]
    yield from map(str.strip, sys.stdin)


def _typed_turns() -> Iterator[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    path = cache_dir() / "chat" / "history.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        history: History = FileHistory(path)
    except OSError:  # a cache that cannot be written to keeps nobody from talking
        history = InMemoryHistory()
    # Answers may go to a file: the turns are then typed on standard error.
    session: PromptSession[str] = PromptSession(
        history=history, key_bindings=keys, output=create_output(always_prefer_tty=True), reserve_space_for_menu=0
    )
    leaving = False
    while True:
        try:
            # Signals are ours: see signals.py. At the prompt Ctrl-C is a key.
            text = session.prompt("> ", enable_suspend=True, handle_sigint=False)
            leaving = False
            yield text.rstrip()
        except (KeyboardInterrupt, EOFError) as typed:
            if leaving or isinstance(typed, EOFError):
                return
            leaving = True
            note("Ctrl-C again ends")


@dataclass
class _Conversation:
    engine: Engine
    params: SamplingParams
    schedule: Schedule | Auto
    system: str | None
    options: Callable[[], RunOptions]
    show: Callable[[Generation], bool]
    typed: bool
    turns: Messages = field(default_factory=list)
    file: str = ""  # for the next turn
    last: Completion | None = None
    ended: bool = False  # by a signal that ends the command

    def ask(self, text: str) -> None:
        text = f"{self.file}\n\n{text}" if self.file else text
        self._answer([*self.turns, {"role": "user", "content": text}])
        self.file = ""

    def _answer(self, turns: Messages) -> None:
        """turns: the last is the user's. PpsdError: nothing is answered, and the conversation stays as it is."""

        def begin() -> Generation:
            return self.engine.generate(self._messages(turns), self.params, self.schedule, self.options())

        try:
            generation = begin()
        except ContextFull:
            turns = self._shortened(turns)
            generation = begin()
        whole = self.show(generation)
        self.last = generation.completion
        self.turns = [*turns, {"role": "assistant", "content": self.last.text}]
        self.ended = not whole and not signals.resume()

    def _messages(self, turns: Messages) -> Messages:
        return turns if self.system is None else [{"role": "system", "content": self.system}, *turns]

    def _shortened(self, turns: Messages) -> Messages:
        """The turns without the oldest, if that helps and the user agrees. ContextFull if not."""
        context = self.engine.config.max_position_embeddings
        for place in range(2, len(turns), 2):
            try:
                fits = len(self.engine.encode(self._messages(turns[place:]))) <= context * (1 - ROOM)
            except ContextFull:
                continue
            if fits or place == len(turns) - 1:
                what, oldest = f"the context of {context} tokens is full", counted(place // 2, "turn")
                if not self.typed:
                    note(f"{what}: the oldest {oldest} dropped")
                elif not agreed(f"{what}: drop the oldest {oldest}? [Y/n] ", otherwise=True):
                    break
                return turns[place:]
        raise ContextFull(f"the conversation does not fit the context of {context} tokens")

    def do_help(self, _: str) -> None:
        print(wrapped(HELP, sys.stdout), flush=True)

    def do_reset(self, _: str) -> None:
        self.turns, self.file, self.last = [], "", None

    def do_system(self, text: str) -> None:
        if text:
            check_text(text, "the system message")
            self.system = text
        print(f"system: {self.system or 'as the model has it'}", flush=True)

    def do_regenerate(self, _: str) -> None:
        if not self.turns:
            raise UsageError("there is no answer to regenerate")
        if self.params.temperature == 0:
            note("greedy decoding gives the same answer again: with --temperature 0.8 it varies")
        self.params = replace(self.params, index=self.params.index + 1)  # another answer, of the same seed too
        self._answer(self.turns[:-1])

    def do_undo(self, _: str) -> None:
        if not self.turns:
            raise UsageError("there is no turn to undo")
        self.turns, self.last = self.turns[:-2], None
        note(f"the last turn and its answer are forgotten; {counted(len(self.turns) // 2, 'turn')} left")

    def do_file(self, path: str) -> None:
        if not path:
            raise UsageError("/file needs the name of a file")
        text = given_text(str(Path(path).expanduser()))
        check_text(text, path)
        self.file = f"{self.file}\n\n{text}" if self.file else text
        note(f"{path} ({len(text)} characters) goes with the next turn")

    def do_stats(self, _: str) -> None:
        if self.last is None:
            raise UsageError("there is no answer yet")
        print(wrapped(statistics_line(self.last), sys.stdout), flush=True)
