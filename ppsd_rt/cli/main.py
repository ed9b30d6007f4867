"""`ppsd-run`: finds the command, runs it, and turns errors into one line and an exit status."""

import errno
import os
import sys
from typing import TYPE_CHECKING

from ..errors import PpsdError, UsageError
from . import notes, signals

# Everything else is imported by `_start`: Ctrl-C is answered in one line there, and here with a traceback.
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from ..ranks.world import World


def main(argv: "Sequence[str] | None" = None) -> int:
    """Exit status: 0 success, 1 failure, 2 wrong usage, 128 + the signal that interrupted it (130: Ctrl-C).

    Without `argv` this is the process's own command: its signals and standard streams are seen to.
    """
    if sys.stderr is None:  # closed; print would write to standard output instead
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (for the rest of the process)
    # Before torch is loaded. A waiting OpenMP thread that spins takes the core that another one needs: a parallel
    # region took 8 ms instead of 0.1 ms on a machine with two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A half-used tokenizers thread pool would only print a warning when a subprocess (pip) is started.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with notes.printed():
        if argv is not None:
            return _status_of(lambda: _start(argv))
        signals.listen()
        return _status_of(lambda: _start_process(sys.argv[1:]))


def _start_process(argv: "Sequence[str]") -> int:
    for number in (0, 1, 2):  # one that is closed would be given to the next file that is opened, and be written to
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
    return _start(argv)


def _start(argv: "Sequence[str]") -> int:
    import io

    if "_ARGCOMPLETE" in os.environ:  # a shell asks, see `--completion`
        from .parser import complete

        complete()
    from ..ranks.world import find_world
    from .parser import parse

    if sys.stdout is None:
        raise UsageError("standard output is closed: there is nowhere to write to")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that is not UTF-8 must not end an answer
    status = _run(parse(argv), argv, find_world())
    sys.stdout.flush()  # on Python's own way out, a full disk would change no status
    return status


def _run(args: "argparse.Namespace", argv: "Sequence[str]", world: "World | None") -> int:
    from .commands import COMMANDS
    from .ranks import start_ranks

    args.engine = None
    if getattr(args, "quiet", False):
        notes.quiet()
    world, children = start_ranks(args, argv, world)
    if world is None:
        if getattr(args, "threads", None) is not None:
            from .common import note_threads

            note_threads(args.threads)
        return COMMANDS[args.command].load()(args) or 0
    from ..ranks.launch import leave
    from .ranks import join_ranks

    status = 1
    try:
        status = _status_of(lambda: (COMMANDS[args.command].load()(args) or 0) if join_ranks(args, world) else 0)
    except Exception:  # a bug; the other ranks see this one leave
        import traceback

        traceback.print_exc()
    return leave(args.engine, status, children)


def _status_of(work: "Callable[[], int]") -> int:
    try:
        try:
            return work()
        finally:
            signals.close()
    except KeyboardInterrupt:
        notes.complain("")  # ends the line that it was on
        notes.complain(f"ppsd-run: {signals.said()}")
        return signals.status()
    except PpsdError as error:
        notes.complain(f"ppsd-run: {error}")
        return 2 if isinstance(error, UsageError) else 1
    except BrokenPipeError:
        # The reader of our output has gone (`ppsd-run ... | head`): nobody is left to tell.
        _abandon_output()
        return 1
    except OSError as error:  # such as a full disk behind standard output
        place = error.filename or ("standard output" if error.errno == errno.ENOSPC else "")
        notes.complain(f"ppsd-run: {place}{': ' * bool(place)}{error.strerror or error}")
        _abandon_output()
        return signals.status(otherwise=1)  # the terminal goes away as SIGHUP comes


def _abandon_output() -> None:
    """What is still buffered cannot be written; let Python not try it again on its way out."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, AttributeError):  # not a real file, or none at all
        sys.stdout = None


if __name__ == "__main__":
    sys.exit(main())
