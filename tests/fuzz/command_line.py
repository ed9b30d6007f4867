"""Targets: whole command lines, run in this process."""

import io
import shlex
import sys
from collections.abc import Sequence
from contextlib import contextmanager

from hypothesis import strategies as st

from ppsd_rt.cli.commands import COMMANDS
from ppsd_rt.cli.main import main
from ppsd_rt.cli.parser import Parser

from .corpus import COMMAND_LINES
from .mutations import command_lines
from .oracle import Fault, bounded_memory, check_line, no_warnings, normal, snapshot, unclean
from .place import Place

# In front of the rest, which may say otherwise: what a command measures by default takes minutes.
CHEAP = {
    "check": ["--limit", "1", "-n", "4", "--sampling", "greedy", "--schedule", "plain", "--schedule", "eesd"],
    "heads": ["--limit", "1", "-n", "4"],
}


def seeds() -> list[list[str]]:
    return [shlex.split(line) for line in COMMAND_LINES]


def options() -> list[str]:
    """All that any command knows."""
    found: dict[str, None] = {}
    for command in COMMANDS.values():
        parser = Parser()
        command.options(parser)
        found |= dict.fromkeys(option for action in parser._actions for option in action.option_strings)
    return list(found)


def inputs(place: Place) -> st.SearchStrategy[list[str]]:
    return command_lines(seeds(), options())


def command_line(place: Place, words: Sequence[str]) -> str:
    with place.restored():
        return run_main(place, [*words[:1], *CHEAP.get(words[0] if words else "", []), *words[1:]])


def run_main(place: Place, words: Sequence[str], clean_output: bool = False) -> str:
    """`ppsd-run` with these words, in which {model} and the like are the files of `place`.

    Raises Fault for a status that is none of 0, 1, 2 and 130, for an error that is not one clear line at the end of
    standard error, and where a run that failed has changed a file.
    """
    paths = {
        "{model}": place.model,
        "{head}": place.head,
        "{gguf}": place.gguf,
        "{prompts}": place.case / "prompts.jsonl",
        "{existing}": place.case / "existing",
        "{out}": place.case / "out",
        "{missing}": place.case / "missing" / "file",
    }
    argv = [_expanded(word, {name: str(path) for name, path in paths.items()}) for word in words]
    before = snapshot(place.case)
    with no_warnings(), bounded_memory(), _streams(b"Hello\nAnd now?\n") as (out, errors):
        try:
            status = main(argv)
        except SystemExit as left:  # --help and --version
            status = left.code or 0
    output, error = out.getvalue().decode("utf-8"), errors.getvalue().decode("utf-8", "surrogateescape")
    if status not in (0, 1, 2, 130):
        raise Fault(f"status {status!r}")
    if clean_output and (character := unclean(output.replace("\n", ""))):
        raise Fault(f"the raw character {character!r} on standard output")
    *notes, last = error.removesuffix("\n").split("\n")
    for note in notes:
        if unclean(note) or (note.startswith("ppsd-run:") and "this turn was dropped" not in note):
            raise Fault(f"more than one line for an error: {normal(error)}")
    if status == 0 or last.endswith("(this turn was dropped; /reset forgets the conversation)"):
        return f"status {status}"
    if not last.startswith("ppsd-run: "):
        raise Fault(f"status {status}, and standard error ends with {normal(last)!r}")
    outcome = f"status {status}: {check_line(last.removeprefix('ppsd-run: '))}"
    changed = sorted(name for name, _ in before.items() ^ snapshot(place.case).items())
    if changed:
        raise Fault(f"a run that failed left behind, changed or destroyed a file: {changed[0]} ({outcome})")
    return outcome


def _expanded(word: str, paths: dict[str, str]) -> str:
    for name, path in paths.items():
        word = word.replace(name, path)
    return word


@contextmanager
def _streams(text: bytes):
    """(standard output, standard error), each a BytesIO, while `text` is on standard input."""
    before = sys.stdin, sys.stdout, sys.stderr
    kept = io.BytesIO(), io.BytesIO()
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(text)), "utf-8")
    sys.stdout = out = io.TextIOWrapper(_Open(kept[0]), "utf-8")
    sys.stderr = errors = io.TextIOWrapper(_Open(kept[1]), "utf-8", errors="backslashreplace")
    try:
        yield kept
        out.flush()
        errors.flush()
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


class _Open(io.BufferedIOBase):
    """Writes through, and leaves the bytes there when the text stream around it is closed."""

    def __init__(self, kept: io.BytesIO) -> None:
        self._kept = kept

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        return self._kept.write(data)


TARGETS = {"command-line": (inputs, command_line)}
