"""The carrier that launches one kernel after the other, in one order: no graphs, no second stream, no second thread.

It follows the same plan of launches as the carrier of captured stages (csrc/cuda/plan.h). It is what Triton's
interpreter runs on the CPU, so that tests can play every schedule without a GPU, and what remains where graphs cannot
be captured.

A pass in several stages is spread over the order: it ends only when the plan waits for its verdict, so that draft steps
come between its stages, as they do on a GPU.
"""

from collections import deque
from collections.abc import Generator, Sequence
from time import perf_counter

import torch

from .. import _native
from ..errors import PpsdError
from ..pipeline.rounds import Drafted, Round
from ..triton_kernels.state import DRAFT_CONFIDENCE, DRAFT_POSITION, DRAFT_SEQUENCE, DRAFT_TOKEN, RECORD_SEQUENCE
from .devices import Window
from .stages import DeviceStages


class EagerCarrier:
    def __init__(
        self, stages: DeviceStages, plan: _native.LaunchPlan, *, sequence: int, drawn: int, report_drafts: bool
    ) -> None:
        """sequence, drawn: the numbers of the last records in the rings."""
        self.stages, self.plan, self.report_drafts = stages, plan, report_drafts
        self._sequence, self._drawn = sequence, drawn
        self._unread: deque[int] = deque()  # draft launches whose records have not been read
        self._drafted: dict[int, tuple[int, int, float]] = {}  # launch -> position, token, confidence
        self._begun: deque[tuple[int, Window]] = deque()  # of each pass under way: its next leg, and its rows
        self._committed = perf_counter()

    def events(self, prompt: Sequence[int], keep: int, first: int) -> Generator[Round | Drafted, None, None]:
        yield self.plan.begin(list(prompt), keep, first)
        self._committed = perf_counter()
        while not self.plan.finished:
            step = self.plan.next(self.plan.drafts_launched)
            offer = self.plan.take_offer()
            if offer is not None:
                self._wait()  # launches are queued, and they read it when their turn has come
                self.stages.buffers.offer[:] = torch.tensor(offer, dtype=torch.int32)
            if step == "draft":
                self.stages.draft_step()
                self._unread.append(self.plan.drafts_launched - 1)
            elif step == "row":
                self.stages.early_step()
            elif step == "verify":
                self._finish_passes()  # one at a time is between two stages
                self.stages.verification(0, self.plan.window)
                self._begun.append((1, self.plan.window))
            else:
                yield from self._answer()

    def _answer(self) -> Generator[Round | Drafted, None, None]:
        """The plan waits: for a draft's confidence, or for a verdict."""
        for position, token in self._read_drafts():
            if self.report_drafts:
                yield Drafted(position, token)
        wanted = self.plan.wants_confidence()
        if wanted >= 0:
            self.plan.drafted(*self._drafted.get(wanted, (-1, -1, 0.0)))
            return
        if not self.plan.passes_in_flight:
            raise RuntimeError("the plan waits for nothing")
        self._finish_passes()
        self._wait()
        self._sequence += 1
        record = self.stages.buffers.ring[self._sequence % len(self.stages.buffers.ring)].tolist()
        if record[RECORD_SEQUENCE] != self._sequence:
            raise PpsdError(f"verdict {self._sequence} has not come from the device")
        now = perf_counter()
        event = self.plan.land(record, self.plan.drafts_launched, now - self._committed)
        self._committed = now
        if event is not None:
            yield event

    def _finish_passes(self) -> None:
        while self._begun:
            next_leg, window = self._begun.popleft()
            for leg in range(next_leg, len(self.stages.legs)):
                self.stages.verification(leg, window)

    def _read_drafts(self) -> list[tuple[int, int]]:
        """Position and token of those that were drawn since the last time."""
        if self._unread:
            self._wait()
        drawn = []
        while self._unread:
            self._drawn += 1
            record = self.stages.buffers.drafts[self._drawn % len(self.stages.buffers.drafts)]
            words = record.tolist()
            if words[DRAFT_SEQUENCE] != self._drawn:  # draft steps leave no records in this answer
                self._drawn += len(self._unread) - 1
                self._unread.clear()
                break
            confidence = float(record[DRAFT_CONFIDENCE].view(torch.float32))
            self._drafted[self._unread.popleft()] = words[DRAFT_POSITION], words[DRAFT_TOKEN], confidence
            if words[DRAFT_POSITION] >= 0:
                drawn.append((words[DRAFT_POSITION], words[DRAFT_TOKEN]))
        for old in list(self._drafted)[:-64]:
            del self._drafted[old]
        return drawn

    def _wait(self) -> None:
        if self.stages.home.type == "cuda":
            torch.cuda.current_stream(self.stages.home).synchronize()
