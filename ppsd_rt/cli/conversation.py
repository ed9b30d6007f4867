"""`ppsd-run --chat`: a conversation. The history is sent with every turn; the KV cache keeps what has not changed."""

import argparse
import base64
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..backend import RunOptions
from ..engine import Engine
from ..errors import ContextFull, PpsdError, UsageError
from ..generation import Completion, Generation
from ..models.files import parse_json
from ..pipeline.schedule import Auto, Schedule, describe, parse_schedule
from ..sampling.params import SamplingParams
from . import chat, signals
from .common import agreed, check_text, counted, given_text, is_message, statistics_line
from .notes import complain, note, wrapped
from .values import length, number, whole

Messages = list[dict[str, str]]

ROOM = 0.25  # of the context, that is free after the oldest turns were dropped
SETTINGS: dict[str, tuple[str, Callable[[str], object]]] = {  # what /set changes: the field, and how its value is read
    "temperature": ("temperature", number),
    "length": ("max_tokens", length),
    "top-k": ("top_k", whole),
    "top-p": ("top_p", number),
    "min-p": ("min_p", number),
    "repetition-penalty": ("repetition_penalty", number),
    "seed": ("seed", whole),
}


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
    typed = chat.on_terminal()
    if args.system is not None:
        check_text(args.system, "--system")
    conversation = _Conversation(engine, params, schedule, args.system, options, answer, typed)
    if typed:
        note("/help shows what can be typed; Ctrl-C stops an answer; Ctrl-D ends")
    turn = chat.next_turn(typed)
    whole = True
    while True:
        try:
            given = turn()
            if given is None or given == chat.Command("exit"):
                break
            if isinstance(given, chat.Command):
                conversation.obey(given)
            elif given:
                check_text(given)
                conversation.ask(given)
        except PpsdError as error:
            dropped = isinstance(given, str) and bool(given)
            complain(f"ppsd-run: {error}" + " (this turn was dropped; /reset forgets the conversation)" * dropped)
            whole = False
        except _Ended:
            return signals.status()
    return 0 if whole or typed else 2


class _Ended(Exception):
    """By a signal that ends the command."""


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

    def ask(self, text: str) -> None:
        text = f"{text}\n\n{self.file}" if self.file else text
        self._answer([*self.turns, {"role": "user", "content": text}])
        self.file = ""

    def _answer(self, turns: Messages) -> None:
        """turns: the last is the user's. PpsdError: nothing is answered, and the conversation stays as it is."""
        try:
            generation = self._begin(turns)
        except ContextFull:
            turns = self._shortened(turns)
            generation = self._begin(turns)
        finished = self.show(generation)
        self.last = generation.completion
        self.turns = [*turns, {"role": "assistant", "content": self.last.text}]
        if not finished and not signals.resume():
            raise _Ended

    def _begin(self, turns: Messages) -> Generation:
        return self.engine.generate(self._messages(turns), self.params, self.schedule, self.options())

    def _messages(self, turns: Messages) -> Messages:
        return turns if self.system is None else [{"role": "system", "content": self.system}, *turns]

    def _shortened(self, turns: Messages) -> Messages:
        """Without the oldest turns, if that helps and the user agrees. ContextFull if not."""
        context = self.engine.config.max_position_embeddings
        users = [place for place, turn in enumerate(turns) if turn["role"] == "user"]
        for place in users[1:]:
            try:
                fits = len(self.engine.encode(self._messages(turns[place:]))) <= context * (1 - ROOM)
            except ContextFull:
                continue
            if fits or place == users[-1]:
                what, oldest = f"the context of {context} tokens is full", counted(users.index(place), "turn")
                if not self.typed:
                    note(f"{what}: the oldest {oldest} dropped")
                elif not agreed(f"{what}: drop the oldest {oldest}? [Y/n] ", otherwise=True):
                    break
                return turns[place:]
        raise ContextFull(f"the conversation does not fit the context of {context} tokens")

    def obey(self, command: chat.Command) -> None:
        """UsageError, PpsdError: the command could not be obeyed, and nothing has changed."""
        getattr(self, f"do_{command.name}")(command.rest)

    def do_reset(self, _: str) -> None:
        self.turns, self.file, self.last = [], "", None

    def do_system(self, text: str) -> None:
        if text:
            check_text(text, "the system message")
            self.system = text
        print(f"system: {self.system or 'as the model has it'}", flush=True)

    def do_set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name == "schedule" and value:
            self.schedule = parse_schedule(value.strip())
        elif name in SETTINGS and value:
            field, read = SETTINGS[name]
            try:
                changed = replace(self.params, **{field: read(value.strip())})  # type: ignore[arg-type]
            except argparse.ArgumentTypeError as error:
                raise UsageError(f"/set {name}: {error}") from None
            self.engine.check(changed)
            self.params = changed
        elif rest:
            raise UsageError(f"/set takes one of {', '.join([*SETTINGS, 'schedule'])}, and a value")
        shown = {name: getattr(self.params, field) for name, (field, _) in SETTINGS.items()}
        shown["length"] = "no limit" if shown["length"] is None else shown["length"]
        settings = [f"{name} {value}" for name, value in shown.items()]
        print(wrapped(" | ".join([*settings, f"schedule {describe(self.schedule)}"]), sys.stdout), flush=True)

    def do_regenerate(self, _: str) -> None:
        if not self.turns:
            raise UsageError("there is no answer to regenerate")
        if self.params.temperature == 0:
            note("greedy decoding gives the same answer again: /set temperature 0.8 lets it vary")
        self.params = replace(self.params, index=self.params.index + 1)  # another answer, of the same seed too
        self._answer(self.turns[:-1])

    def do_undo(self, _: str) -> None:
        if not self.turns:
            raise UsageError("there is no turn to undo")
        self.turns = self.turns[:-2]
        self.last = None
        note(f"the last turn and its answer are forgotten; {counted(len(self.turns) // 2, 'turn')} left")

    def do_save(self, path: str) -> None:
        text = json.dumps(self._messages(self.turns), ensure_ascii=False, indent=1)
        try:
            with Path(_named(path, "save")).expanduser().open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise PpsdError(f"cannot write {path}: {error.strerror}") from None
        note(f"saved as {path}")

    def do_load(self, path: str) -> None:
        try:
            messages = parse_json(given_text(str(Path(_named(path, "load")).expanduser())))
        except ValueError:
            messages = None
        if not isinstance(messages, list) or not all(map(is_message, messages)):
            raise UsageError(f"{path} is no conversation: it needs a list of messages with role and content")
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        turns = messages[system is not None :]
        if [turn["role"] for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
            raise UsageError(f"{path} is no conversation: user and assistant must take turns")
        self.system, self.turns, self.last = system, turns, None
        note(f"{counted(len(turns) // 2, 'turn')} loaded")

    def do_file(self, path: str) -> None:
        text = given_text(str(Path(_named(path, "file")).expanduser()))
        check_text(text, path)
        self.file = f"{self.file}\n\n{text}" if self.file else text
        note(f"{path} ({len(text)} characters) goes with the next turn")

    def do_stats(self, _: str) -> None:
        if self.last is None:
            raise UsageError("there is no answer yet")
        print(wrapped(statistics_line(self.last), sys.stdout), flush=True)

    def do_copy(self, _: str) -> None:
        """By OSC 52, which the terminal obeys: it works over ssh, and needs no other program."""
        if not self.turns:
            raise UsageError("there is no answer to copy")
        text = base64.b64encode(self.turns[-1]["content"].encode()).decode()
        stream = sys.stdout if sys.stdout.isatty() else sys.stderr
        print(f"\x1b]52;c;{text}\x07", end="", file=stream, flush=True)
        note("copied, where the terminal allows it")


def _named(path: str, command: str) -> str:
    if not path:
        raise UsageError(f"/{command} needs the name of a file")
    return path
