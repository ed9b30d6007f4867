"""Grammars are tried out in processes of their own, which limits of time and memory end: see grammar_worker.py."""

import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

from ..errors import PpsdError, UsageError
from ..forks import hears_of_forks
from .grammar_worker import Unheld

SECONDS = 2.0  # of processor time for one grammar: a hundred times what those of programs take
MEMORY = 256 << 20  # bytes
_MOST_AT_ONCE = 8  # processes
_MOST_IDLE = 2

Tried = tuple[str | None, int, str, Unheld]
Cancel = Callable[[Callable[[], None]], None]


class GrammarTrials:
    """Processes that are started when they are needed, and end with this one."""

    def __init__(self, vocabulary: tuple[Any, ...], seconds: float = SECONDS, memory: int = MEMORY) -> None:
        """vocabulary: the arguments of `grammar_worker.Vocabulary`."""
        self._vocabulary, self._seconds, self._memory = vocabulary, seconds, memory
        self.forked()
        hears_of_forks(self)

    def forked(self) -> None:
        """Processes of the parent are not ours."""
        self._places = Semaphore(_MOST_AT_ONCE)
        self._idle: list[subprocess.Popen[bytes]] = []

    def run(self, kind: str, text: str, cancel: Cancel | None = None) -> Tried:
        """What is wrong with a grammar, a limit that it hits included, or None; the bytes that it takes; and what
        `grammar_worker.prepare` makes of it.

        cancel: gets a function that ends the trial; UsageError then. PpsdError where no process can be started.
        """
        with self._places:
            process = self._process()
            turn, state = Lock(), "running"

            def end() -> None:
                nonlocal state
                with turn:
                    if state == "running":
                        state = "cancelled"
                        process.kill()

            try:
                if cancel is not None:
                    cancel(end)
                found = self._ask(process, (self._seconds, self._memory, kind, text))
                with turn:
                    if state == "cancelled":
                        raise UsageError("nobody waits for this grammar any more")
                    state = "done"
            except BaseException:
                _end(process)
                raise
            if process.returncode is None:
                self._idle.append(process)
                if len(self._idle) > _MOST_IDLE:
                    _end(self._idle.pop())
            return found

    def _ask(self, process: "subprocess.Popen[bytes]", job: tuple[Any, ...]) -> Tried:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            found: Tried = pickle.load(process.stdout)
            return found
        except (EOFError, OSError, pickle.UnpicklingError):
            status = _end(process)
        if status == -signal.SIGPROF:
            return f"compiling it takes more than {self._seconds:g} s of processor time", 0, "", ()
        if status < 0:
            return f"compiling it takes more than {self._memory >> 20} MiB of memory, or it nests too deep", 0, "", ()
        raise PpsdError(f"{sys.executable} cannot compile grammars: it ended with status {status}")

    def _process(self) -> "subprocess.Popen[bytes]":
        try:
            return self._idle.pop()
        except IndexError:
            return self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-I", str(Path(__file__).with_name("grammar_worker.py"))]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, start_new_session=True)
        except OSError as error:
            raise PpsdError(f"no process can be started to compile the grammar: {error.strerror or error}") from None
        assert process.stdin is not None
        try:
            pickle.dump((sys.path, self._vocabulary), process.stdin)
        except OSError:
            raise PpsdError(f"{sys.executable} cannot compile grammars: status {_end(process)}") from None
        return process


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.kill()
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # it would write what is left
            pipe.close()
    return status
