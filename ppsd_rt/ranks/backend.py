"""The backend of rank 0: it drafts, owns the schedulers, and gives an engine the rounds that the other ranks verify.

All answers are in the loop (csrc/loop/loop.h), whose passes are under way on all ranks at the same time.
"""

import signal
from collections.abc import Generator, Sequence
from itertools import count
from math import inf
from queue import SimpleQueue
from threading import Thread, current_thread, main_thread
from time import sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..backend import Request
from ..cpu.machine import no_memory
from ..errors import PpsdError, UsageError
from ..loop_backend import LoopBackend
from ..models.head_file import HeadFile, HeadInfo
from ..pipeline.rounds import Drafted, Round
from ..sampling.grammar import Grammar
from ..trace import Span
from .control import Control, Kind
from .links import PASSES, VERDICTS, LinkLost, Receiver, Sender
from .slices import CpuSlices
from .stage import DEPTH
from .threads import start

_LONGEST = 1 << 19  # tokens of a text in the loop, whose ids may have to fit into one message (csrc/stages/pass.h)
_ENDING = 0.1  # seconds between two looks for answers that nobody will work on any more


class RanksBackend(LoopBackend):
    """Stages of this many layers each; `slices` has packed what rank 0 drafts with.

    words: of the longest message. link_delay: see RankOptions.
    """

    name = "ranks"
    device = "cpu"  # rank 0's

    def __init__(
        self,
        groups: dict[int, Any],
        control: Control,
        slices: CpuSlices,
        head: HeadInfo | None,
        sizes: Sequence[int],
        words: int,
        link_delay: float,
    ) -> None:
        self._groups, self._control, self._slices, self._words = groups, control, slices, words
        self._link_delay = link_delay
        super().__init__()
        self._head, self.sizes, self._blocks = head, tuple(sizes), 0
        self.dtype, self.threads = slices.dtype, slices.threads
        self._numbers = count(1)  # of grammars, and by number what the last rank says of them
        self._replies: dict[int, SimpleQueue[str]] = {}
        control.on(Kind.GRAMMAR, lambda reply: self._replies[reply[0]].put(reply[1]))
        self._traced = False  # the newest answer has a trace, whose spans nobody has asked for
        self._timeline: list[Span] = []

    def open(self) -> None:
        """Waits until all ranks are ready."""
        if current_thread() is main_thread():  # which alone hears of signals
            signal.signal(signal.SIGTERM, lambda *_: self._control.told_to_end())
        others = range(1, self._control.world.size)
        self._blocks = min(self._slices.blocks, *(self._control.next(rank, Kind.READY) for rank in others))

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
        """Changes to a head of the same sizes, between answers: what was said stays known."""
        loop = self._answers.loop
        while not loop.draft_with(packed):  # until the round is over in which the last answer has ended
            self._control.failed.wait(0.002)
            self._control.check()
        self._head = file.info

    def rounds(self, *request: *Request) -> Generator[Round | Drafted, None, None]:
        _, params, _, limits, options, _ = request
        self._control.check()
        if limits.end > self.longest:
            raise no_memory(limits.end)
        number = self._tell(params.grammar) if params.grammar and options.masks else 0
        self._traced, self._timeline = options.trace, []
        try:
            yield from self._answers.decode(request, self._ngrams, number)
        except PpsdError:
            self._control.check()
            raise
        finally:
            if number and self._control.failure is None:
                self._control.tell(self._control.world.last, Kind.FORGET, number)

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        raise PpsdError("logits stay on the last rank: run this in one process")

    def bytes_per_token(self, context: int) -> int:
        return 0  # not known here: the slices are elsewhere

    def spans(self) -> list[Span]:
        """The newest answer's timeline. A track is a rank, by its host's clock: each host's first span begins at 0."""
        if self._traced and self._answers.last:
            self._traced = False
            world, tracks = self._control.world, [list(self._answers.last.spans())]
            tracks += [self._control.ask(rank, Kind.SPANS) for rank in range(1, world.size)]
            first = [min((begin for *_, begin, _ in spans), default=inf) for spans in tracks]
            if world.local_size == world.size:  # one clock
                first = [min(first)] * world.size
            self._timeline = [
                (name, rank, rows, begin - first[rank], end - first[rank])
                for rank, spans in enumerate(tracks)
                for name, _, rows, begin, end in spans
            ]
            self._timeline.sort(key=lambda span: span[3])
        return self._timeline

    def facts(self) -> dict[str, Any]:
        return {**self._slices.facts(), "ranks": self._control.world.size, "layers": list(self.sizes)}

    def _tell(self, grammar: Grammar) -> int:
        """Its number, once the last rank has compiled it. PpsdError where that rank cannot."""
        last, number, reply = self._control.world.last, next(self._numbers), SimpleQueue[str]()
        self._replies[number] = reply
        self._control.tell(last, Kind.GRAMMAR, [number, grammar.kind, grammar.text])
        wrong = self._control.wait(reply)
        del self._replies[number]
        if wrong:
            raise PpsdError(f"rank {last}: {wrong}")
        return number

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _make_loop(self) -> _native.Loop:
        """Which the ranks work for from now on, whenever it has answers."""
        world, words = self._control.world, self._words
        loop = self._slices.loop(world.size, self._blocks)
        sender = Sender(self._groups[PASSES], 1, PASSES, words)
        lost, delay = self._control.lost, self._link_delay
        start(Receiver(self._groups[VERDICTS], world.last, VERDICTS, words, DEPTH, loop.land, lost, delay))
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
