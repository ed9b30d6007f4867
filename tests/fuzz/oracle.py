"""What must hold whatever comes in: it is accepted, or refused with one clear line; and nothing else happens."""

import contextlib
import re
import resource
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MOST_CALLS = 5_000_000  # seconds; what a chat template may do before it is ended lies below
MOST_MEMORY = 1 << 30  # bytes of address space beyond what the process has
LONGEST_LINE = 1500  # characters of an error; a path may be long
ROOT = Path(__file__).parents[2]


class Fault(AssertionError):
    """The product did what it must not do."""


class TooMuchWork(BaseException):
    """Not an Exception: no handler of the product may take it for one of its own."""


@contextlib.contextmanager
def bounded_work(most: int = MOST_CALLS) -> Iterator[None]:
    """Raises Fault where more functions are called: a count, and not a time, so that it is the same on any machine."""
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += 1
        if calls == most:
            raise TooMuchWork

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    except TooMuchWork:
        pass
    finally:
        sys.setprofile(before)
    if calls >= most:
        raise Fault(f"more than {most} calls: work without bound")


@contextlib.contextmanager
def bounded_memory(most: int = MOST_MEMORY) -> Iterator[None]:
    """What goes beyond it gets a MemoryError, or whatever the libraries make of one."""
    if not sys.platform.startswith("linux"):
        yield
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + most
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Raises Fault where Python or numpy warns: users would see it."""
    quiet = (DeprecationWarning, PendingDeprecationWarning, ResourceWarning)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if not issubclass(warning.category, quiet):
            raise Fault(f"{warning.category.__name__}: {warning.message}")


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file below it: which one, how large, when written."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_ino, status.st_size, status.st_mtime_ns)
        if path.is_dir():
            found[str(path.relative_to(folder))] = (status.st_ino, 0, 0)
    return found


@contextlib.contextmanager
def files_untouched(folder: Path) -> Iterator[None]:
    before = snapshot(folder)
    yield
    changed = sorted(name for name, _ in before.items() ^ snapshot(folder).items())
    if changed:
        raise Fault(f"a file was left behind, changed or destroyed: {changed[0]}")


def unclean(text: str) -> str | None:
    """The first character that must not reach a terminal: controls, ends of line, and marks that turn its direction."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Zl", "Zp") or character in "\u202a\u202b\u202d\u202e\u2066\u2067":
            return character
    return None


def check_line(line: str) -> str:
    """An error's one line; returns it with what varies taken out, to count kinds of outcomes by."""
    if not line.strip():
        raise Fault("an error without a word")
    character = unclean(line)
    if character is not None:
        raise Fault(f"an error with the raw character {character!r}: {normal(line)!r}")
    if len(line) > LONGEST_LINE:
        raise Fault(f"an error of more than {LONGEST_LINE} characters: {normal(line)!r}")
    return normal(line)


def normal(line: str) -> str:
    line = re.sub(r"/[^\s:'\"]*", "PATH", line[:4000])
    line = re.sub(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", "TEXT", line)
    return " ".join(re.sub(r"[-+]?\d[\d.e+-]*|\b(?:nan|inf|infinity)\b", "N", line, flags=re.IGNORECASE).split())[:160]


def judge(
    folder: Path, work: Callable[[], Any], refusals: tuple[type[BaseException], ...], calls: int | None = MOST_CALLS
) -> str:
    """The outcome of `work`: "accepted", or the kind of its refusal. Raises Fault, or whatever else `work` raises.

    folder: holds all files that it may reach; none may change.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(files_untouched(folder))
        stack.enter_context(no_warnings())
        stack.enter_context(bounded_memory())
        if calls is not None:
            stack.enter_context(bounded_work(calls))
        try:
            work()
        except refusals as error:
            return f"{type(error).__name__}: {check_line(str(error))}"
    return "accepted"
