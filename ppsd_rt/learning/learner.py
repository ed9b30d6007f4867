"""Beside an engine: what it answers is kept, and a child learns from it while nothing is asked.

The child is a process of the lowest priority. It is stopped at once when a request comes, goes on when none has come
for a while, and ends with this process. A head that it has found better comes into use between two answers.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from logging import getLogger
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol
from weakref import finalize, ref

from ..errors import PpsdError
from ..generation import Generation
from ..models.checkpoint import Checkpoint
from ..models.config import LlamaConfig
from ..models.head_file import HeadFile
from ..processes import OWN
from ..ranks.threads import start
from .heads import LearnedHeads
from .kept import Kept, newest, read_days, read_records

LOOK = 1.0  # seconds between looks at the time
BEGIN_AFTER = 60.0  # seconds without a request, until a training begins
GO_ON_AFTER = 2.0  # or one that was stopped goes on
LET_GO_AFTER = 600.0  # seconds that a stopped training keeps its memory; then it begins anew some day
FRESH = 8192  # tokens of answers that are new, until the next training
GROWTH, MOST_FRESH = 0.25, 50_000  # or more: so much of all that are kept, but no more than that
AGAIN_AFTER = 600.0  # seconds until a head that could not come into use is tried again
MOST_WAITING = 1000  # answers that have ended and are not kept yet, where a disk hangs: more are not kept at all
RECALLED = 300_000  # ids, the newest: more does the memory of answers not hold
_LOG = getLogger(__name__)


class Learns(Protocol):
    """An engine."""

    checkpoint: Checkpoint
    config: LlamaConfig

    @property
    def backend(self) -> Any: ...
    def swap_head(self, file: HeadFile) -> bool: ...


class Child:
    """`ppsd-run learn FOLDER --background`: a training in a process of its own, which runs or is stopped."""

    def __init__(self, folder: Path) -> None:
        command = [*OWN, "learn", str(folder), "--background", str(os.getpid())]
        alone = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}  # no rank of rank 0's world
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, env=alone)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()  # all that it writes is written whole
        self._process.wait()

    def status(self) -> int | None:
        """None: it has not ended."""
        return self._process.poll()


def on_battery(supplies: Path = Path("/sys/class/power_supply")) -> bool:
    """Does this machine live on its battery?"""

    def says(path: Path) -> str:
        with suppress(OSError):
            return path.read_text().strip()
        return ""

    return any(
        says(path / "status") == "Discharging" and says(path / "scope") != "Device" for path in supplies.glob("*")
    )


class Learner:
    """Keeps from when it is made. Raises PpsdError as `Kept` does."""

    def __init__(
        self,
        engine: Learns,
        folder: Path,
        exit_head: str = "auto",
        begin: Callable[[Path], Child] = Child,
        resting: Callable[[], bool] = on_battery,
        clock: Callable[[], float] = time.monotonic,
        threaded: bool = True,
    ) -> None:
        """threaded: else `work` and `look` are the caller's to call, as tests do."""
        self.heads = LearnedHeads(folder, exit_head, engine.checkpoint)
        found = exit_head != "auto" and self.heads.root
        told = {
            "hash": engine.checkpoint.hash,
            "name": str(engine.checkpoint.folder.absolute()),
            "dtype": engine.backend.dtype,
            "head": str(found.absolute()) if found else exit_head,
        }
        self.kept = Kept(folder, told, engine.config.vocab_size, self.heads.state.learned)
        self._engine, self._begin, self._resting, self._clock = ref(engine), begin, resting, clock
        self._process = os.getpid()
        self._ended: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()  # its `put` may interrupt itself
        self._lock = threading.Lock()  # of what follows
        self._running, self._idle_since, self._closed = 0, clock(), False
        self._training: Child | None = None
        self._stopped_since: float | None = None  # None: it runs
        self._before = 0  # tokens that were new when the last training began, unless it has learned from them
        # Those of the head that the engine drafts with. None: not known, as engines may outlive a front.
        self._names: list[str] | None = None if getattr(engine.backend, "outlived", False) else []
        self._refused_until = 0.0  # a head that could not come into use
        self._learns = self.heads.load() is not None
        if not self._learns:
            _LOG.info("there is no head to learn with: what %s keeps is copied from, and nothing else", folder)
        try:
            self._try_swap()
            self._recall()
        except BaseException:
            self.kept.close()
            raise
        self._thread: threading.Thread | None = None
        self.close = finalize(engine, self._close)
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="ppsd-rt learner", daemon=True)
            start(self._thread)

    @property
    def days(self) -> dict[str, list[int]]:
        return read_days(self.kept.folder)

    def begun(self) -> None:
        """An answer begins: what trains is stopped first."""
        with self._lock:
            self._running += 1
            if self._training and self._stopped_since is None:
                self._training.stop()
                self._stopped_since = self._clock()

    def ended(self, answer: Generation) -> None:
        if self._closed:
            return
        if self._ended.qsize() >= MOST_WAITING:
            self._ended.put(())
            return
        done, s, params = answer.completion, answer.statistics, answer.params
        free = not (params.looks_back or params.logit_bias)
        kept = answer.options.kept and done.finish_reason != "cancelled"
        self._ended.put(
            (done.prompt_ids, done.ids if kept else (), free, answer.options.copied_by, s.judged, s.accepted)
        )

    def work(self, seconds: float | None = 0.0) -> bool:
        """Keep the next answer that has ended; waits for one for so long. False: none has."""
        try:
            item = self._ended.get(timeout=seconds) if seconds else self._ended.get_nowait()
        except Empty:
            return False
        if item is not None:
            with self._lock:
                self._running -= 1
                self._idle_since = self._clock()
        if item:
            self.kept.add(*item)
        return True

    def look(self) -> None:
        """Begin a training, let it go on, or use what it has brought, as far as the engine is idle."""
        now, status, gone = self._clock(), None, None
        with self._lock:
            idle = 0.0 if self._running else now - self._idle_since
            training = self._training
            if training is not None and (status := training.status()) is not None:
                self._training = None
            elif training is not None and self._stopped_since is not None:
                if idle >= GO_ON_AFTER and not self._resting():
                    training.go_on()
                    self._stopped_since = None
                elif now - self._stopped_since >= LET_GO_AFTER:
                    gone, self._training = training, None
            elif training is not None and self._resting():
                training.stop()
                self._stopped_since = now
            elif training is None and idle >= BEGIN_AFTER and self._due() and not self._resting():
                self._before, self._stopped_since = (
                    self.kept.fresh,
                    None,
                )  # what fails is tried again with more
                self._training = self._begin(self.kept.folder)
        if gone is not None:
            gone.end()  # which takes longer than a request may wait
            self._before = 0
        if status == 0:
            self.kept.fresh -= self._before
            self._before = 0
            for outcome in self.heads.state.outcomes[-1:]:  # none where they cannot be read just now
                _LOG.info("learned from %s", outcome)
        elif status is not None and status < 0:  # else it has said why
            _LOG.warning("learning was ended by signal %d", -status)
        if idle >= LOOK:
            self._try_swap()

    def _due(self) -> bool:
        wanted = max(FRESH, min(MOST_FRESH, GROWTH * self.kept.tokens))
        return self._learns and self.kept.fresh - self._before >= wanted

    def _try_swap(self) -> None:
        names, engine, now = self.heads.state.names, self._engine(), self._clock()
        if names == self._names or engine is None or now < self._refused_until:
            return
        self._refused_until = now + AGAIN_AFTER  # unless nothing is wrong
        file = self.heads.load()
        if file is None or engine.swap_head(file):
            self._names = names  # else an answer has begun meanwhile
        self._refused_until = 0.0

    def _recall(self) -> None:
        """Fill the memory of answers."""
        engine = self._engine()
        if engine is None:
            return
        records = [record for record, _ in read_records(self.kept.folder, engine.config.vocab_size)]
        for record in records[newest([len(record.ids) for record in records], RECALLED) :]:
            if record.owner is not None:
                engine.backend.recall(record.ids, record.owner)

    def _loop(self) -> None:
        said = ""
        while not self._closed:
            try:
                self.work(LOOK)
                self.look()
                said = ""
            except Exception as error:  # whatever it is, answers in progress are counted, and others kept
                if said != (said := repr(error)):  # once, not once a second
                    _LOG.warning("learning: %s", error, exc_info=not isinstance(error, PpsdError | OSError))

    def _close(self) -> None:
        """All that has been answered is kept when this returns; but after a fork the folder is the other process's."""
        if self._process != os.getpid():
            return
        self._closed = True
        self._ended.put(None)
        if self._thread not in (None, threading.current_thread()):  # which may have let go of the engine last
            self._thread.join()
        while self.work():
            pass
        if self._training is not None:
            self._training.end()
        self.kept.close()
