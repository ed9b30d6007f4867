"""The backend of rank 0: it drafts, owns the schedulers, and gives an engine the rounds that the other ranks verify.

All answers are in the loop (csrc/loop/loop.h), whose passes are under way on all ranks at the same time.
"""

import json
import signal
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from queue import Empty, Queue
from statistics import median
from threading import Lock, Thread, current_thread, main_thread
from time import monotonic, perf_counter, sleep
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .. import _native
from ..backend import Asked
from ..cpu.machine import no_memory
from ..errors import PpsdError, UsageError
from ..loop_backend import LoopBackend
from ..models.head_file import HeadFile, HeadInfo
from ..pipeline.rounds import Drafted, Round
from ..sampling.grammar import Grammar
from ..trace import Span
from .control import Control, Kind, Words, numbers_of, text_of
from .costs import displacer, time_drafts
from .grammars import pack_grammar
from .links import PASSES, VERDICTS, LinkLost, Receiver, Sender
from .slices import CpuSlices
from .stage import DEPTH, report_of
from .threads import start

_PATIENCE = 600.0  # seconds for the others to pack slices, to measure, to take rows; who dies or hangs ends it sooner
_LONGEST = 1 << 19  # tokens of a text in the loop, whose ids may have to fit into one message (csrc/stages/pass.h)
_ENDING = 0.1  # seconds between two looks for answers that nobody will work on any more
_ASKED = "to answer"
_PAUSE = 0.002  # between two messages whose way is measured: about a stage's pass

T = TypeVar("T")


class RanksBackend(LoopBackend):
    """Stages of this many layers each; `slices` has made `drafter`, which is what rank 0 holds of the model.

    words: of the longest message.
    """

    name = "ranks"
    device = "cpu"  # rank 0's

    def __init__(
        self,
        groups: dict[int, Any],
        control: Control,
        drafter: _native.Drafter,
        slices: CpuSlices,
        head: HeadInfo | None,
        sizes: Sequence[int],
        words: int,
    ) -> None:
        self._groups, self._control, self._drafter, self._slices, self._words = groups, control, drafter, slices, words
        super().__init__()
        self._head, self.sizes, self._blocks = head, tuple(sizes), 0
        self.dtype, self.threads = slices.dtype, slices.threads
        self._loop: _native.Loop | None = None
        self._grammar = 0  # the number of the newest
        self._telling = Lock()  # one grammar after the other
        self._grammar_says: dict[int, str] = {}  # by number: what is wrong, if anything is
        self._replies: Queue[tuple[int, list[float]]] = Queue()
        self._pongs: Queue[int] = Queue()
        self._station_spans: Queue[list[Span]] = Queue()
        self._traced = False  # the newest answer has a trace, whose spans nobody has asked for
        self._timeline: list[Span] = []
        for kind in (Kind.COSTS, Kind.REPORT):
            control.on(kind, lambda rank, value, message: self._replies.put((rank, numbers_of(message))))
        control.on(Kind.PONG, lambda rank, value, message: self._pongs.put(rank))
        control.on(Kind.SPANS, self._told_spans)
        control.on(Kind.GRAMMAR, lambda rank, number, message: self._grammar_said(number, text_of(message)))

    def open(self) -> None:
        """Returns when all ranks are ready."""
        if current_thread() is main_thread():  # which alone hears of signals
            signal.signal(signal.SIGTERM, lambda *_: self._control.told_to_end())
        self._wait(lambda: len(self._control.ready) == self._control.world.last, "to load its slice")
        self._blocks = min(self._slices.blocks, *self._control.ready.values())

    def close(self) -> None:
        self._answers.end_all()
        self._control.stop()

    @property
    def longest(self) -> int:
        return min(64 * self._blocks, _LONGEST)

    # -- what an engine asks -------------------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """The line that all ranks end with; None: all is well."""
        return self._control.failure

    @property
    def head(self) -> HeadInfo | None:
        return self._head

    def use_head(self, file: HeadFile | None) -> None:
        if (file.info if file else None) != self.head:
            raise UsageError("ranks get their exit head when they start: give --exit-head to all of them")

    def pack_head(self, file: HeadFile) -> _native.Model:
        """Rank 0's layers with this head, which no other rank needs. Nothing else changes."""
        return self._slices.with_head(file)

    def swap_head(self, file: HeadFile, packed: _native.Model) -> None:
        """To a head of the same sizes, between answers: what was said stays known, and what drafts cost."""
        loop = self._answers.loop
        # Until the round is over in which the last answer has ended.
        self._wait(lambda: loop.draft_with(packed), "to end an answer")
        self._head = file.info

    def rounds(self, *asked: *Asked) -> Generator[Round | Drafted, None, None]:
        _, params, _, limits, options, _ = asked
        self._control.check()
        if limits.end > self.longest:
            raise no_memory(limits.end)
        grammar = self._tell(params.grammar) if params.grammar and options.masks else 0

        self._traced, self._timeline = options.trace, []
        try:
            yield from self._answers.decode(asked, self._ngrams, grammar)
        except PpsdError:
            self._control.check()
            raise
        finally:
            if grammar and self._control.failure is None:
                self._grammar_says.pop(grammar, None)
                self._control.tell(self._control.world.last, Kind.FORGET, grammar)

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        raise PpsdError("logits stay on the last rank: run this in one process")

    def bytes_per_token(self, context: int) -> int:
        return 0  # not known here: the slices are elsewhere

    def spans(self) -> list[Span]:
        """As every backend's; the track is the rank, by its host's clock: each host's first span begins at 0."""
        if self._traced and self._answers.last:
            self._traced = False
            world, tracks = self._control.world, {0: list(self._answers.last.spans())}
            for rank in range(1, world.size):
                self._control.tell(rank, Kind.TRACE)
                tracks[rank] = self._next(self._station_spans, "to tell its timeline")
            first = {rank: min((span[3] for span in spans), default=0.0) for rank, spans in tracks.items()}
            if world.local_size == world.size:  # one clock
                first = dict.fromkeys(first, min(begin for rank, begin in first.items() if tracks[rank]))
            spans = [
                (*span[:3], span[3] - first[span[1]], span[4] - first[span[1]])
                for one in tracks.values()
                for span in one
            ]
            self._timeline = sorted(spans, key=lambda span: span[3])
        return self._timeline

    def facts(self) -> dict[str, Any]:
        return {**self._slices.facts(), "ranks": self._control.world.size, "layers": list(self.sizes)}

    # -- measuring -----------------------------------------------------------------------------------------------------

    def measure(self) -> tuple[_native.StageCosts, _native.StageCosts]:
        """(each rank while the others wait, all at once)"""
        self._answers.end_all()
        others = range(1, self._control.world.size)
        link = self._link()
        neighbours = self._control.world.local_size - 1
        row, draft = time_drafts(self._drafter.time_step, displace=displacer(self._slices.bytes * neighbours))
        alone = []
        for rank in others:
            self._control.tell(rank, Kind.MEASURE, 0)
            alone.append(self._collect(1)[rank])
        for rank in others:
            self._control.tell(rank, Kind.MEASURE, 1)
        row_beside, draft_beside = time_drafts(self._step_and_message)
        beside = self._collect(len(others))
        while not self._pongs.empty():
            self._pongs.get()
        return (
            _native.StageCosts(row, draft, alone, links=link),
            _native.StageCosts(row_beside, draft_beside, [beside[rank] for rank in others], links=link),
        )

    def report(self) -> list[list[float]]:
        """Of every rank: see `report_of`."""
        self._answers.end_all()
        for rank in range(1, self._control.world.size):
            self._control.tell(rank, Kind.REPORT)
        others = self._collect(self._control.world.last)
        counts = self._answers.loop.counts
        own = report_of(self._slices.bytes, counts["draft_steps"], counts["draft_steps"], counts["draft_seconds"])
        return [own, *(others[rank] for rank in sorted(others))]

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
            self._next(self._pongs, _ASKED)
            times.append((perf_counter() - begun) / 2)
        return median(times)

    def _next(self, queue: Queue[T], what: str) -> T:
        """As soon as it is there. what: a rank does, for a message of one that takes too long."""
        end = monotonic() + _PATIENCE
        while True:
            with suppress(Empty):
                return queue.get(timeout=0.1)
            if monotonic() > end:
                self._too_long(what)
            self._control.check()

    # -- grammars ------------------------------------------------------------------------------------------------------

    def _tell(self, grammar: Grammar) -> int:
        """Its number, once the last rank has compiled it. PpsdError where that rank cannot."""
        with self._telling:
            self._grammar += 1
            number = self._grammar
            self._control.tell(self._control.world.last, Kind.GRAMMAR, number, pack_grammar(grammar))
        self._wait(lambda: number in self._grammar_says, "to compile a grammar")
        if wrong := self._grammar_says.pop(number):
            raise PpsdError(f"rank {self._control.world.last}: {wrong}")
        return number

    def _grammar_said(self, number: int, wrong: str) -> None:
        self._grammar_says[number] = wrong

    def _told_spans(self, rank: int, value: int, message: Words) -> None:
        told = json.loads(text_of(message))
        self._station_spans.put([(str(name), rank, int(rows), float(a), float(b)) for name, _, rows, a, b in told])

    def _collect(self, count: int) -> dict[int, list[float]]:
        return dict(self._next(self._replies, "to measure") for _ in range(count))

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _make_loop(self) -> _native.Loop:
        """Which the ranks work for from now on, whenever it has answers."""
        world, words = self._control.world, self._words
        loop = self._loop = self._slices.loop(world.size, self._blocks)
        sender = Sender(self._groups[PASSES], 1, PASSES, words)
        start(Receiver(self._groups[VERDICTS], world.last, VERDICTS, words, DEPTH, self._land, self._control.lost))
        start(Thread(target=self._work, args=(loop, sender), name="loop", daemon=True))
        return loop

    def _work(self, loop: _native.Loop, sender: Sender) -> None:
        """Sends the loop's passes, until the pipeline fails or this process ends."""
        _native.precise_waits()
        try:
            while not self._control.failed.is_set():
                if words := loop.work(sender.buffer(), 50):
                    sender.send(words)
        except Exception as error:
            if isinstance(error, LinkLost):
                self._control.lost(1, error)
            self._control.fail(f"rank 0: {error}")
        while True:  # also what is asked for while this process ends
            # Else somebody is telling the other ranks of a failure; its line comes after that.
            if self._control.failed.is_set() or self._control.stopping.is_set():
                loop.fail(self._control.failure or "the ranks have ended")
            sleep(_ENDING)

    def _land(self, verdict: Words) -> None:
        if self._control.delay:
            _native.sleep_until(int(verdict[8:10].view(np.int64)[0]) + int(self._control.delay * 1e9))
        assert self._loop is not None
        self._loop.land(verdict)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        end = monotonic() + _PATIENCE
        while not done():
            if self._control.failed.wait(0.002):
                break
            if monotonic() > end:
                self._too_long(what)
        self._control.check()

    def _too_long(self, what: str) -> None:
        self._control.fail(f"a rank took more than {_PATIENCE:g} s {what}")
