"""What `ppsd-run` says besides the answer: the records of the logger "ppsd_rt", on standard error."""

import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from ..printable import printable, shortened

_LONGEST = 1000  # characters of a line; an answer's statistics have 150
_LOG = logging.getLogger("ppsd_rt")


class _Lines(logging.Handler):
    """One line for each record, without its level; nobody need be there to read it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(wrapped(shortened(printable(record.getMessage()), _LONGEST), sys.stderr), file=sys.stderr, flush=True)
        except OSError:  # full, or its reader has gone: what is still buffered must not be tried again at the end
            sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the rest of the process)


def wrapped(text: str, stream: TextIO) -> str:
    """Lines whose words are whole on a terminal of this width; elsewhere the text as it is."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in text.split("\n"))


_LINES = _Lines()


@contextmanager
def printed() -> Iterator[None]:
    """Notes, warnings and errors of the whole package go to standard error, as those of a command do."""
    level = _LOG.level
    _LINES.setLevel(logging.INFO)
    _LOG.setLevel(logging.INFO)
    _LOG.addHandler(_LINES)
    try:
        yield
    finally:
        _LOG.removeHandler(_LINES)
        _LOG.setLevel(level)


def quiet() -> None:
    """Leaves out all but errors, for the rest of the command."""
    _LINES.setLevel(logging.ERROR)


def note(text: str) -> None:
    """A line that `--quiet` leaves out."""
    _LOG.info("%s", text)


def complain(text: str) -> None:
    """A line that says what went wrong."""
    _LOG.error("%s", text)
