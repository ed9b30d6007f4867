"""The backend of rank 0: it drafts, owns the scheduler, and gives an engine the rounds that the other ranks verify."""

import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict
from queue import Empty, Queue
from statistics import median
from threading import Event, RLock, Thread
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..backend import Cancellation, RunOptions, one_at_a_time
from ..cpu_backend import native_schedule, to_event
from ..errors import PpsdError, UsageError
from ..models.head_file import HeadFile, HeadInfo
from ..planner import prior
from ..protocol import Drafted, Limits, Round
from ..sampling import SamplingParams
from ..schedule import Auto, Schedule, copying
from .choose import RankChooser
from .control import Control, Kind, Words, numbers_of
from .costs import RankCosts, displacer, time_drafts
from .links import ROWS, VERDICTS, Receiver, Sender
from .report import report_of
from .slices import RankDrafter, Slices
from .stage import DEPTH, lengths
from .threads import start

_PATIENCE = 600.0  # seconds for the others to pack slices, to measure, to take rows; who dies or hangs ends it sooner
_PAUSE = 0.002  # between two messages whose way is measured: about a stage's pass


class RanksBackend:
    """Stages of this many layers each; `slices` has made `drafter`, which is what rank 0 holds of the model."""

    name = "ranks"
    copies, siblings = True, False

    def __init__(
        self,
        groups: dict[int, Any],
        control: Control,
        drafter: RankDrafter,
        slices: Slices,
        head: HeadInfo | None,
        sizes: Sequence[int],
        vocab_size: int,
        hidden: int,
        threads: int,
    ) -> None:
        self._control, self._drafter, self._slices, self._head = control, drafter, slices, head
        self.sizes, self._vocab_size, self._hidden, self._threads = tuple(sizes), vocab_size, hidden, threads
        world = control.world
        words = _native.wire_words(hidden)
        self._sender = Sender(groups[ROWS], 1, ROWS, words, _native.WIRE_MESSAGES)
        self._receiver = Receiver(groups[VERDICTS], world.last, VERDICTS, words, DEPTH, self._verdict, control.lost)
        self._epoch = 1  # on the wire: above all that earlier answers have used
        self._tokens: list[int] = []  # whose rows every rank holds
        self._active: tuple[_native.Remote, Event] | None = None  # and: its rows have all been sent
        self._chooser: RankChooser | None = None
        self._choosers: dict[float | None, RankChooser] = {}
        self._ending = RLock()  # the thread that iterates may end an answer while another one begins the next
        self._lookup = 0  # of the schedules that it chooses
        self._steps = 0, 0.0  # of one row and a draft: how many, and their seconds
        self._costs: tuple[RankCosts, RankCosts] | None = None
        self._answers: Queue[tuple[_native.Remote, Event]] = Queue()
        self._replies: Queue[tuple[int, list[float]]] = Queue()
        self._pongs: Queue[int] = Queue()
        for kind in (Kind.COSTS, Kind.REPORT):
            control.on(kind, lambda rank, value, message: self._replies.put((rank, numbers_of(message))))
        control.on(Kind.PONG, lambda rank, value, message: self._pongs.put(rank))

    def open(self) -> None:
        """Returns when all ranks are ready."""
        signal.signal(signal.SIGTERM, lambda *_: self._control.told_to_end())
        start(self._receiver)
        start(Thread(target=self._draft, name="draft", daemon=True))
        self._wait(lambda: len(self._control.ready) == self._control.world.last, _PATIENCE, "to load its slice")

    def close(self) -> None:
        self._end()
        self._control.stop()

    # -- what an engine asks -------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """Of rank 0."""
        return str(self._slices.facts().get("device", "cpu"))

    @property
    def dtype(self) -> str:
        return self._slices.dtype

    @property
    def threads(self) -> int:
        return self._threads

    @property
    def head(self) -> HeadInfo | None:
        return self._head

    def use_head(self, file: HeadFile | None) -> None:
        if (file.info if file else None) != self._head:
            raise UsageError("ranks get their exit head when they start: give --exit-head to all of them")

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        limits: Limits,
        options: RunOptions,
        cancellation: Cancellation,
    ) -> Generator[Round | Drafted, None, None]:
        if options.trace:
            raise UsageError("ranks record no timeline; `ppsd-run simulate --trace` draws one")
        self._end()
        self._control.check()
        oracle = options.oracle
        if isinstance(schedule, Auto):
            self._chooser = self._choose(oracle.acceptance if oracle else None)
            self._lookup = 0 if oracle else schedule.lookup
            schedule = copying(self._chooser.schedule, self._lookup)
        else:
            self._chooser = None
        same = next((i for i, (a, b) in enumerate(zip(self._tokens, prompt, strict=False)) if a != b), None)
        known = min(len(self._tokens), len(prompt)) if same is None else same
        keep = max(min(known, len(self._tokens) - 1, len(prompt) - 1, self._drafter.length()), 0)
        try:
            answer = self._drafter.start(
                list(prompt),
                keep,
                {**asdict(params), "top_k": min(params.top_k, self._vocab_size)},
                native_schedule(schedule),
                _native.Limits(limits.end, sorted(limits.stop_ids)),
                self._epoch,
                report_drafts=options.report_drafts,
                oracle=(list(oracle.truth), oracle.acceptance, oracle.seed) if oracle else None,
            )
        except MemoryError:
            raise PpsdError(f"no memory for a KV cache of {limits.end} tokens; lower --max-tokens") from None
        active = self._active = answer, Event()
        self._answers.put(active)
        whole = False
        try:
            while not cancellation.asked:
                self._control.check()
                try:
                    item = answer.next(50)
                except StopIteration:
                    break
                if item is None:
                    continue
                event = to_event(item, answer.seconds)
                if isinstance(event, Round):
                    whole = limits.reached_by(event)
                yield event
                one_at_a_time(whole or self._active is active, cancellation)
            one_at_a_time(whole or self._active is active, cancellation)
        finally:
            self._end(active)

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        raise PpsdError("logits stay on the last rank: run this in one process")

    def bytes_per_token(self, context: int) -> int:
        return 0  # not known here: the slices are elsewhere

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        return []

    def facts(self) -> dict[str, Any]:
        return {**self._slices.facts(), "ranks": self._control.world.size, "layers": list(self.sizes)}

    def explain(self) -> str:
        return self._chooser.explain() if self._chooser else ""

    # -- measuring -----------------------------------------------------------------------------------------------------

    def costs(self, again: bool = False) -> tuple[RankCosts, RankCosts]:
        """(each rank while the others wait, all at once)"""
        self._end()
        if self._costs is None or again:
            self._tokens = []  # measuring overwrites the rows
            others = range(1, self._control.world.size)
            link = self._link()
            neighbours = self._control.world.local_size - 1
            row, draft = time_drafts(self._drafter.time_step, displace=displacer(self._slices.bytes * neighbours))
            alone = []
            for rank in others:
                self._control.tell(rank, Kind.MEASURE, 0)
                alone.append(tuple(self._collect(1)[rank]))
            for rank in others:
                self._control.tell(rank, Kind.MEASURE, 1)
            row_beside, draft_beside = time_drafts(self._step_and_message)
            beside = self._collect(len(others))
            while not self._pongs.empty():
                self._pongs.get()
            self._costs = (
                RankCosts(row, draft, tuple(alone), link),
                RankCosts(row_beside, draft_beside, tuple(tuple(beside[rank]) for rank in others), link),
            )
            self._choosers.clear()
        return self._costs

    def report(self) -> list[list[float]]:
        """Of every rank: see report.py."""
        self._end()
        for rank in range(1, self._control.world.size):
            self._control.tell(rank, Kind.REPORT)
        others = self._collect(self._control.world.last)
        steps, seconds = self._steps
        return [report_of(self._slices.bytes, steps, steps, seconds), *(others[rank] for rank in sorted(others))]

    def _step_and_message(self, draw: bool, context: int) -> float:
        """A step beside the other ranks' passes, and messages, as come with it: their threads want the same cores."""
        for rank in range(1, self._control.world.size):
            self._control.tell(rank, Kind.PING)
        return self._drafter.time_step(draw, context)

    def _link(self) -> float:
        """Half of the way to rank 1 and back; the threads that take part have slept before, as in decoding."""
        times = []
        for _ in range(40):
            sleep(_PAUSE)
            begun = perf_counter()
            self._control.tell(1, Kind.PING)
            self._pong()
            times.append((perf_counter() - begun) / 2)
        return median(times)

    def _pong(self) -> int:
        """The next one, as soon as it is there."""
        while True:
            with suppress(Empty):
                return self._pongs.get(timeout=0.5)
            self._control.check()

    def _collect(self, count: int) -> dict[int, list[float]]:
        found: dict[int, list[float]] = {}

        def arrived() -> bool:
            while not self._replies.empty():
                rank, numbers = self._replies.get()
                found[rank] = numbers
            return len(found) == count

        self._wait(arrived, _PATIENCE, "to measure")
        return found

    def _choose(self, acceptance: float | None) -> RankChooser:
        """It goes on from answer to answer; what an oracle feigns stays apart."""
        assert self._head is not None
        alone, beside = self.costs()
        if acceptance not in self._choosers:
            known = prior(self._head) if acceptance is None else acceptance
            self._choosers[acceptance] = RankChooser(alone.simulated(beside), known)
        return self._choosers[acceptance]

    # -- threads -------------------------------------------------------------------------------------------------------

    def _draft(self) -> None:
        """Drafts, and sends what has been drafted, one answer after the other."""
        self._drafter.pin()
        _native.precise_waits()
        while True:
            answer, done = self._answers.get()
            try:
                while True:
                    out = self._sender.buffers()
                    written = answer.work(out)
                    if written < 0:
                        break
                    self._sender.send(lengths(out, written, self._hidden))
            except PpsdError as error:  # of its own stage
                self._control.fail(f"rank 0: {error}")
            except Exception as error:
                self._control.lost(1, error)
                self._control.fail(f"rank 0: {error}")
            done.set()

    def _verdict(self, message: Words) -> None:
        if self._control.delay:
            _native.sleep_until(int(message[8:10].view(np.int64)[0]) + int(self._control.delay * 1e9))
        if self._active is None:
            return
        answer, _ = self._active
        void, judged = answer.land(message)
        if void:
            self._control.tell_all(Kind.EPOCH, answer.epoch)
        if judged is not None and self._chooser is not None:
            changed = self._chooser.after(*judged)
            if changed is not None:
                answer.set_schedule(native_schedule(copying(changed, self._lookup)))

    # -- ending an answer ----------------------------------------------------------------------------------------------

    def _end(self, only: tuple[_native.Remote, Event] | None = None) -> None:
        """Of the answer in progress, if there is one: every rank drops what it has of it, but the committed rows.

        only: if it is this one.
        """
        with self._ending:
            if self._active is None or (only is not None and self._active is not only):
                return
            answer, sent = self._active
            answer.cancel()
            self._wait(sent.is_set, _PATIENCE, "to take rows", raises=False)
            self._active = None  # its thread sees why it ends
            self._epoch = answer.epoch + 1
            self._tokens = answer.tokens
            steps, seconds = answer.counts()
            self._steps = self._steps[0] + steps, self._steps[1] + seconds
            if self._control.failure is None:
                self._control.tell_all(Kind.EPOCH, self._epoch)

    def _wait(self, done: Callable[[], bool], seconds: float, what: str, raises: bool = True) -> None:
        end = monotonic() + seconds
        while not done():
            if self._control.failed.wait(0.002):
                break
            if monotonic() > end:
                self._control.fail(f"a rank took more than {seconds:g} s {what}")
        if raises:
            self._control.check()
