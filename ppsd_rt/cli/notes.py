"""What `ppsd-run` says besides the answer."""

import os
import sys

from ..printable import printable, shortened

_LONGEST = 1000  # characters of a line; an answer's statistics have 150


def note(text: str) -> None:
    """A line for people on standard error, kept apart from the answer; nobody need be there to read it."""
    try:
        print(shortened(printable(text), _LONGEST), file=sys.stderr, flush=True)
    except OSError:  # full, or its reader has gone: what is still buffered must not be tried again at the end
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the rest of the process)
