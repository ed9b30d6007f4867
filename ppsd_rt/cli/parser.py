"""Command lines: which command, its parser and help, and what slips may have been meant for."""

import argparse
import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import NoReturn

from .. import __version__
from ..errors import UsageError
from ..printable import quoted
from .commands import COMMANDS
from .values import option


class Parser(argparse.ArgumentParser):
    """argparse, with errors as one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:  # type: ignore[override]
        found, others = self.parse_known_args(args, namespace)
        if others:
            self.error(self._not_understood(others))
        return found

    def _not_understood(self, others: Sequence[str]) -> str:
        option = next((text.partition("=")[0] for text in others if len(text.strip("-")) < len(text) > 2), None)
        if option is None:
            return f"{quoted(others[0])} is one argument too many; put a text of several words in quotes"
        closest = get_close_matches(option, self._options(), n=1)
        if option in closest:
            return f"the option {option} must come before --"
        return f"unknown option {quoted(option)}" + f"; did you mean {''.join(closest)}?" * bool(closest)

    def _options(self) -> list[str]:
        """Those of its commands too."""
        names = [name for action in self._actions for name in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                names += [name for command in action.choices.values() for name in command._options()]
        return names

    def _print_message(self, message: str, file: object = None) -> None:
        """Help and version, on standard output: argparse itself takes no notice of a disk that is full."""
        print(message, end="", flush=True)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows defaults where there are some to show."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        shown = action.default not in (None, False, argparse.SUPPRESS, "", 0) and "%(default)" not in text
        # Of lists, and of what ends in brackets, the help says it in its own words.
        shown = shown and not isinstance(action.default, list) and not text.endswith("]")
        return f"{text} [%(default)s]" if shown and action.option_strings else text


_MOST_SHOWN = 20  # options of a command whose `--help` shows all
_NEEDED = {  # those that it shows of commands that have more; `--help-all` has the others
    *("help", "help_all", "model", "threads", "schedule"),
    *("file", "prompts", "chat", "system", "raw", "json", "grammar", "quiet", "compare"),
    *("max_tokens", "temperature", "seed"),
    *("host", "port", "api_key", "model_name", "cors"),
    *("out", "kind", "tokens", "hours", "resume", "limit", "slow", "svg"),
}

_LAB = [name.removeprefix("lab ") for name in COMMANDS if name.startswith("lab ")]
_ELSEWHERE = {  # what other programs have commands for
    "chat": "ppsd-run --chat",
    "run": "ppsd-run PROMPT",
    "help": "ppsd-run --help",
    "version": "ppsd-run --version",
    "train": "ppsd-run distill",
    "ls": "ppsd-run list",
    "models": "ppsd-run list",
    "show": "ppsd-run info",
    "remove": "ppsd-run rm",
    "ps": "ppsd-run list for the models that are here (none stays loaded: a server is a process of its own)",
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of the command that `argv` begins with; without one it is `generate`."""
    if argv and argv[0] == "help":
        argv = [*argv[1:], "--help"]
    if argv and argv[0] in _LAB:  # their names of earlier days, which scripts and results have
        argv = ["lab", *argv]
    if argv and argv[0] == "lab":
        if len(argv) > 1 and argv[1] in ("--help", "-h"):
            print("usage: ppsd-run lab COMMAND ...\n\n" + _listed(name for name in COMMANDS if name.startswith("lab ")))
            raise SystemExit(0)
        argv = [" ".join(argv[:2]), *argv[2:]]
        if argv[0] not in COMMANDS:
            raise UsageError(f"lab is followed by one of {', '.join(_LAB)}: see ppsd-run lab --help")
    named = bool(argv) and argv[0] in COMMANDS
    name = argv[0] if named else "generate"
    if not named and argv and not argv[0].startswith("-") and "--" not in argv:
        _refuse_slip(argv[0])
    args = _build(name, "--help-all" in argv).parse_args(argv[1:] if named else argv)
    args.command = name
    if not named and args.prompt is not None and "--" not in argv:
        _refuse_slip(args.prompt)
    return args


def complete() -> None:
    """Answers a shell that asks how a command line goes on, and ends; see `--completion`."""
    import argcomplete

    parser = Parser(prog="ppsd-run", allow_abbrev=False)
    commands = parser.add_subparsers()
    lab = commands.add_parser("lab", allow_abbrev=False).add_subparsers()
    for name, command in COMMANDS.items():
        group = lab if name.startswith("lab ") else commands
        command.options(group.add_parser(name.removeprefix("lab "), help=command.summary, allow_abbrev=False))
    COMMANDS["generate"].options(parser)
    parser._actions = [action for action in parser._actions if action.option_strings or action is commands]
    argcomplete.autocomplete(parser)


def _refuse_slip(word: str) -> None:
    """UsageError for a prompt that must have been meant for a command: a letter or two away from one."""
    known = [*COMMANDS, *_LAB, *_ELSEWHERE]
    twisted = [name for name in known if sorted(name) == sorted(word)]
    for closest in twisted or get_close_matches(word, known, n=1, cutoff=0.8):
        meant = _ELSEWHERE.get(closest, f"ppsd-run {closest}")
        said = f"the command {word} comes first" if word in COMMANDS else f"{quoted(word)} is not a command"
        raise UsageError(f"{said}: write {meant} (as a prompt it goes after --: ppsd-run -- {shlex.quote(word)})")


def _build(name: str, all: bool = True) -> Parser:
    """all: `--help` is to show all options."""
    command = COMMANDS[name]
    default = name == "generate"
    parser = Parser(
        prog="ppsd-run" if default else f"ppsd-run {name}",
        description=_OVERVIEW if default else command.summary[0].upper() + command.summary[1:] + ".",
        epilog="examples:\n" + "\n".join(f"  {example}" for example in command.examples),
        formatter_class=_Help,
        allow_abbrev=False,
    )
    if default:
        parser.add_argument("--version", action="version", version=f"ppsd-rt {__version__}")
        shells = ("bash", "zsh", "fish")
        option(
            parser, "--completion", "print what completes commands and options in this shell, and end", choices=shells
        )
    command.options(parser)
    if len(parser._actions) >= _MOST_SHOWN:
        parser.add_argument("--help-all", action="help", help="show all options")
        for action in parser._actions:
            if action.option_strings and action.dest not in _NEEDED and not all:
                action.help = argparse.SUPPRESS
    return parser


def _listed(names: Iterable[str]) -> str:
    return "\n".join(f"  {name:<{max(map(len, COMMANDS))}}  {COMMANDS[name].summary}" for name in names)


_OVERVIEW = """Answers from a Llama-family model, drafted by its own early layers: faster, and token for token the same.

commands (each has its own --help; a prompt that is one of these words goes after --):
""" + _listed(COMMANDS)
