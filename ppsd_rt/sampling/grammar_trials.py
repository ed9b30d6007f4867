"""Grammars are tried out in processes of their own, which limits of time and memory end: see grammar_worker.py."""

import pickle
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Semaphore
from typing import Any

from ..errors import PpsdError
from .grammar_worker import MEMORY, SECONDS, Unheld

_MOST_AT_ONCE = 4  # processes; one of them stays for the next grammar

Tried = tuple[str | None, int, str, Unheld]


class GrammarTrials:
    """Processes that are started when they are needed, and end with this one."""

    def __init__(self, vocabulary: tuple[Any, ...], seconds: float = SECONDS, memory: int = MEMORY) -> None:
        """vocabulary: the arguments of `grammar_worker.Vocabulary`."""
        self._vocabulary, self._seconds, self._memory = vocabulary, seconds, memory
        self._places = Semaphore(_MOST_AT_ONCE)
        self._idle: list[subprocess.Popen[bytes]] = []

    def run(self, kind: str, text: str) -> Tried:
        """What is wrong with a grammar, a limit that it hits included, or None; the bytes that it takes; and what
        `grammar_worker.prepare` makes of it. PpsdError where no process can be started.
        """
        with self._places:
            try:
                process = self._idle.pop()
            except IndexError:
                process = self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                pickle.dump((self._seconds, kind, text), process.stdin)
                process.stdin.flush()
                found: Tried = pickle.load(process.stdout)
            except (EOFError, OSError, pickle.UnpicklingError):
                return self._limit(_end(process)), 0, "", ()
            except BaseException:
                _end(process)
                raise
            self._idle.append(process)
            if len(self._idle) > 1:
                _end(self._idle.pop())
            return found

    def _limit(self, status: int) -> str:
        """Which one has ended the process."""
        if status == -signal.SIGPROF:
            return f"compiling it takes more than {self._seconds:g} s of processor time"
        if status < 0:
            return f"compiling it takes more than {self._memory >> 20} MiB of memory, or it nests too deep"
        raise PpsdError(f"{sys.executable} cannot compile grammars: it ended with status {status}")

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-I", str(Path(__file__).with_name("grammar_worker.py"))]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, start_new_session=True)
        except OSError as error:
            raise PpsdError(f"no process can be started to compile the grammar: {error.strerror or error}") from None
        assert process.stdin is not None
        with suppress(OSError):  # it has ended; the first grammar says so
            pickle.dump((sys.path, self._vocabulary, self._memory), process.stdin)
        return process


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.kill()
    status = process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # it would write what is left
            pipe.close()
    return status
