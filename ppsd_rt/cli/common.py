"""What several commands need: an engine from options, prompts from files, a line of statistics."""

import argparse
import json
import os
import stat
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from ..arguments import check_unicode
from ..backends import most_threads
from ..engine import Engine
from ..errors import PpsdError, UsageError
from ..generation import Completion, Prompt
from ..models.files import read_bytes
from ..printable import printable, quoted
from ..sampling.grammar import Grammar
from ..sampling.params import SamplingParams
from .notes import note
from .progress import loading_bar

PATIENCE = 1.0  # seconds without the end of standard input, before that is said
ENGINE_OPTIONS = ("exit_head", "backend", "device", "dtype", "threads", "stages", "kv_dtype", "kv_memory")
MOST_BYTES = 1 << 28  # of a file of prompts, a text to measure with, or standard input


@dataclass(frozen=True)
class NamedPrompt:
    """A prompt of a file, whatever its format. id: as the file has it, or the number of the line. messages: a
    conversation, with `prompt` as its last turn."""

    id: str | int
    prompt: str
    family: str = ""
    messages: tuple[dict[str, str], ...] = ()


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def load_engine(args: argparse.Namespace) -> Engine:
    """Over ranks the engine is there already; `ppsd_rt.cli.ranks` has seen to it."""
    engine = getattr(args, "engine", None)
    engine = set_template(load_one_process(args) if engine is None else engine, args)
    if args.command in ("generate", "serve") and args.learn is not None:
        engine.learn(Path(args.learn), args.exit_head)
    return engine


def set_template(engine: Engine, args: argparse.Namespace) -> Engine:
    """Gives the chat template what --template-set says. Raises UsageError for what it does not read."""
    settings = getattr(args, "template_set", [])
    template = engine.tokenizer.chat_template
    for name, value in settings:
        if template is None:
            raise UsageError(f"--template-set needs a model with a chat template, and {engine.name} has none")
        template.set(name, value)
    return engine


def load_one_process(args: argparse.Namespace) -> Engine:
    """An engine in this process, also beside ranks, whose stages are theirs."""
    over_ranks = getattr(args, "engine", None) is not None
    if not over_ranks and not isinstance(args.stages, int) and "," not in args.device:
        raise UsageError(
            "--stages A,B,... says how many layers each rank or each device has: start ranks with --ranks, or name "
            "several devices"
        )
    return engine_of(args, stages=1 if over_ranks else args.stages)


def engine_of(args: argparse.Namespace, **changes: Any) -> Engine:
    """The engine that the options of a command ask for, with these changes."""
    given = {name: getattr(args, name) for name in ENGINE_OPTIONS if hasattr(args, name)}
    shown = not getattr(args, "quiet", False) and sys.stderr is not None and sys.stderr.isatty()
    return Engine.from_pretrained(args.model, progress=loading_bar if shown else nullcontext, **given | changes)


@contextmanager
def kept_prompts(engine: Engine, file: Path | None, most: int | None = None) -> Iterator[None]:
    """Reads the file of `--prompt-cache`, and writes it in the end; most: bytes of it."""
    if file is not None:
        engine.load_prompts(file)
    yield
    if file is not None:
        engine.save_prompts(file, most)


def note_threads(given: int | list[int]) -> None:
    """Says so where --threads are more than the cores that this process may use."""
    threads = given if isinstance(given, int) else max(given)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < threads <= most_threads():
        note(f"--threads {threads} on {cores} core{'s' * (cores != 1)}: they take turns, which is slower than {cores}")


HOT = 1.5
_OFF_WHEN_GREEDY = (("top_k", (0,)), ("top_p", (1.0,)), ("min_p", (0.0,)), ("seed", (None,)))


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    if args.temperature == 0 and (idle := [name for name, off in _OFF_WHEN_GREEDY if getattr(args, name) not in off]):
        given = " and ".join(f"--{name.replace('_', '-')}" for name in idle)
        note(f"greedy decoding leaves {given} without effect: add --temperature, such as 0.8")
    if args.temperature > HOT:
        note(f"-t {args.temperature:g} is a temperature, at which text falls apart; CPU threads are --threads")
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    same = ("max_tokens", "temperature", "top_k", "top_p", "min_p", *penalties, "seed")
    return SamplingParams(
        **{name: getattr(args, name) for name in same},
        logprobs=getattr(args, "logprobs", None),
        grammar=grammar_of(getattr(args, "grammar", None)),
        stop=tuple(args.stop),
    )


def grammar_of(option: str | None) -> Grammar | None:
    """The grammar that `--grammar` names. UsageError for another kind."""
    if option is None:
        return None
    kind, _, value = option.partition("=")
    if option == "json":
        return Grammar.json()
    if kind == "regex" and value:
        return Grammar.regex(value)
    if kind == "schema" and value:
        return Grammar.json_schema(value if value.lstrip().startswith("{") else given_text(value))
    if kind == "lark" and value:
        return Grammar.lark(given_text(value))
    kinds = "json, schema=FILE, schema={...}, regex=PATTERN or lark=FILE"
    raise UsageError(f"--grammar is {kinds}, not {quoted(option)}")


def as_chat(engine: Engine, given: str | NamedPrompt, raw: bool, system: str | None = None) -> Prompt:
    """The prompt as the model wants it: as a user's turn where the model has a chat template, unless `raw`; or the
    messages of a conversation."""
    text = given if isinstance(given, str) else given.prompt
    if isinstance(given, NamedPrompt) and given.messages and not raw:
        if system is not None:
            raise UsageError("--system does not go with messages, which have one of their own")
        return list(given.messages)
    if not text.strip():
        raise UsageError("the prompt is empty")
    check_text(text)
    if raw or engine.tokenizer.chat_template is None:
        if system is not None:
            raise UsageError("--system needs a model with a chat template, and no --raw")
        return text
    messages = [{"role": "user", "content": text}]
    if system is not None:
        check_text(system, "--system")
        messages = [{"role": "system", "content": system}, *messages]
    return messages


def note_plain(engine: Engine, raw: bool) -> None:
    """Says that prompts are not put as a user's turn, which `raw` did not ask for."""
    if not raw and engine.tokenizer.chat_template is None:
        note(f"{engine.name} has no chat template: the prompt is continued as plain text (--raw: the same, unsaid)")


def check_text(text: str, name: str = "the text") -> None:
    """UsageError for text with bytes that Python could not read, which may be the locale's fault and not the text's."""
    encoding = sys.getfilesystemencoding()
    if encoding != "utf-8" and any("\udc80" <= character <= "\udcff" for character in text):
        raise UsageError(f"{name} is not {encoding}, which your locale asks for: for UTF-8 set LC_ALL=C.UTF-8")
    check_unicode(text, name)


def decoded(content: bytes, name: str) -> str:
    """What people bring as text: UTF-8, or UTF-16 where a mark at its head says so. UsageError for what is neither."""
    encoding = "utf-16" if content.startswith((BOM_UTF16_BE, BOM_UTF16_LE)) else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not text in {encoding[:6].upper()} ({error.reason}); give it as UTF-8") from None


def given_text(path: str) -> str:
    """A file that the user names, which may be a pipe. UsageError where it cannot be read."""
    try:
        return decoded(read_bytes(Path(path), MOST_BYTES, pipe_ok=True), path)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist") from None
    except PpsdError as error:
        raise UsageError(str(error)) from None


def only_prompt(given: str | None, paths: Sequence[str] = (), command: str = "ppsd-run") -> str:
    """The texts of the files, what is piped into standard input and, last, the argument, with blank lines between them:
    so two questions about one text begin alike. given: `-` or None: standard input must have something."""
    asked = [] if given in (None, "-") else [given]
    parts = [*map(given_text, paths), *asked]
    if given == "-" or (_piped() if parts else sys.stdin is not None and not sys.stdin.isatty()):
        parts.insert(len(parts) - len(asked), standard_input())
    elif not parts:
        raise UsageError(f'no prompt; write {command} "Why is the sky blue?", or see {command} --help')
    return "\n\n".join(part.strip("\n") if len(parts) > 1 else part for part in parts if part.strip()) or parts[0]


def _piped() -> bool:
    """Is standard input a pipe or a file? What else it may be (a terminal, nothing) has no text for this command."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def standard_input() -> str:
    """All of it, as a file is read; after a second it says what it waits for."""
    if sys.stdin is None:
        raise UsageError("standard input is closed: there is nothing to read")
    telling = Timer(PATIENCE, note, ["reading standard input to its end; < /dev/null leaves it out"])
    telling.daemon = True
    telling.start()
    try:
        content = sys.stdin.buffer.read(MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror}") from None
    finally:
        telling.cancel()
    if len(content) > MOST_BYTES:
        raise UsageError("standard input does not end: no prompt is that long")
    return decoded(content, "standard input")


def may_delete(what: str, yes: bool) -> bool:
    """Everything that deletes asks like this, but for --yes. UsageError where nobody is there to be asked."""
    if not yes and (sys.stdin is None or not sys.stdin.isatty()):
        raise UsageError(f"{what} would be removed; --yes does so without a question")
    return yes or agreed(f"Remove {what}? [y/N] ")


def agreed(question: str, otherwise: bool = False) -> bool:
    """Yes or no on the terminal; `otherwise` where something else is typed."""
    print(printable(question), end="", file=sys.stderr, flush=True)
    said = sys.stdin.readline().strip().lower()
    return not said.startswith("n") if otherwise else said in ("y", "yes")


def counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


REASONS = {  # what the statistics say of a `finish_reason`
    "eos": "finished",
    "stop": "stopped",
    "length": "cut by -n",
    "context": "cut by the context",
    "cancelled": "interrupted",
}


def statistics_line(completion: Completion, compared: str = "", short: bool = False) -> str:
    """tokens/s, acceptance, copies, tokens per pass; compared: with plain decoding. short: the first of these."""
    s = completion.statistics
    rate = s.decode_tokens_per_second
    parts = [f"{counted(s.tokens, 'token')}, {REASONS[completion.finish_reason]}"]
    parts.append(f"{rate:.{0 if short else 1}f} tokens/s" if rate else f"{s.seconds:.2f} s")
    if not short:
        parts.append(f"first after {s.ttft_seconds * 1000:.0f} ms")
    if s.acceptance is not None:
        parts.append(f"acceptance {s.acceptance:.2f}")
    if short:
        return " | ".join(parts)
    if s.copied_accepted:
        parts.append(f"{s.copied_accepted / s.tokens:.0%} copied")
    if (s.judged or s.copied_judged) and s.tokens_per_round is not None:
        parts.append(f"{s.tokens_per_round:.2f} tokens per pass")
    parts.append(f"{s.schedule}, {s.backend} {s.dtype}, {counted(s.threads, 'thread')}")
    return " | ".join(parts + [compared] * bool(compared))


def print_json(value: Any) -> None:
    """Prints a line, in ASCII where standard output cannot hold the characters: its own escapes would be no JSON."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value)
    print(text, flush=True)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on standard output."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        grid.add_column(column, justify="left" if place == 0 else "right")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))  # a Text: brackets are no markup
    console = Console()
    console.print(grid) if console.is_terminal else Console(width=160).print(grid)
