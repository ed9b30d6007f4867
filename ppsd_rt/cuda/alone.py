"""One answer that has the device to itself: captured stages (stages.py, graphs.py) and the C++ carrier (csrc/cuda/), or
where they cannot be captured the same plan of launches one by one (eager.py)."""

import logging
from collections.abc import Generator, Iterator, Sequence
from threading import RLock, get_ident
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..backend import NO_NUMBER, RunOptions, common_prefix
from ..errors import PpsdError
from ..pipeline.rounds import Drafted, Limits, Round
from ..pipeline.schedule import MAX_CHUNK, Auto, Schedule
from ..pipeline.stop_rules import BetaThompson, FixedLength
from ..sampling.params import SamplingParams
from ..triton_kernels.state import DRAWN, RECORD_COMMITTED, RECORD_IDS, RECORD_SEQUENCE, REPORT, SEQUENCE
from . import errors
from .buffers import needed_bytes
from .devices import synchronise
from .eager import EagerCarrier
from .graphs import CaptureFailed, StageGraphs
from .stages import DeviceStages
from .weights import DeviceWeights

_LOG = logging.getLogger(__name__)

LEAST_CAPACITY = 1024  # positions that buffers are made for


class AloneEngine:
    """Stages of the longest text so far, captured unless `eager`. serial: without overlap, whatever schedules say."""

    def __init__(self, *, pdl: bool, eager: bool, serial: bool) -> None:
        self.pdl, self.eager, self.serial = pdl, eager, serial
        self.stages: DeviceStages | None = None
        self._graphs: StageGraphs | None = None
        self._tokens: list[int] = []  # the prompt whose rows the stages hold

    def use(self, weights: DeviceWeights, cuts: Sequence[int]) -> None:
        """From now on; cuts: of verification, into stages."""
        self.drop()
        self._weights, self._cuts = weights, cuts

    def drop(self) -> None:
        """The memory of stages and graphs."""
        if self._graphs is not None and self.stages is not None:
            synchronise(self.stages.devices)
            self._graphs.close()
        self._graphs = self.stages = None
        self._tokens = []

    def begin(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        policy: _native.AlonePolicy | None,
        limits: Limits,
        options: RunOptions,
        ngrams: _native.Ngrams | None,
    ) -> "AloneAnswer":
        """Run the prompt and the pass that gives the first token; then the carrier's work begins."""
        begun = perf_counter()
        stages = self._ready(limits.end)
        if self._graphs is not None:
            self._capture(stages, _drafts_of_a_round(schedule, self.serial))
        keep = common_prefix(self._tokens, prompt[:-1])
        self._tokens = []
        most, lookahead = (
            (MAX_CHUNK, MAX_CHUNK) if isinstance(schedule, Auto) else (schedule.max_chunk, schedule.lookahead)
        )
        stages.begin(
            prompt, params, keep, end=limits.end, most=most, lookahead=lookahead, oracle=options.oracle,
            copies=schedule.copies and not (policy and options.oracle),
        )  # fmt: skip
        self._tokens = list(prompt)
        kept = min(keep, len(prompt) - 1)
        records = options.report_drafts or isinstance(schedule, Auto) or _by_confidence(schedule)
        stages.buffers.state[REPORT] = int(records)
        synchronise(stages.devices)
        (stages if self._graphs is None else self._graphs).plain_step((len(prompt) - 1, 1))
        synchronise(stages.devices)
        sequence, drawn = (int(stages.buffers.state[place]) for place in (SEQUENCE, DRAWN))
        record = stages.buffers.ring[sequence % len(stages.buffers.ring)].tolist()
        if record[RECORD_SEQUENCE] != sequence or record[RECORD_COMMITTED] != 1:
            raise PpsdError("the prompt's verdict has not come from the device")
        if record[RECORD_IDS] < 0:
            raise PpsdError(NO_NUMBER)
        arguments: dict[str, Any] = {
            "schedule": policy if policy is not None else schedule,
            "limits": limits,
            "seed": params.seed or 0,
            "in_turns": self.serial,
            "ngrams": ngrams,
        }
        if self._graphs is None:
            plan = _native.LaunchPlan(stages=len(stages.slices), **arguments)
            carrier = EagerCarrier(stages, plan, sequence=sequence, drawn=drawn, report_drafts=options.report_drafts)
            return AloneAnswer(carrier.events(prompt, kept, record[RECORD_IDS]))
        session = _native.GraphSession(
            lanes=self._graphs.lanes,
            graphs=self._graphs.native(draft_records=records, sequence=sequence, drawn=drawn),
            prompt=list(prompt),
            keep=kept,
            first=record[RECORD_IDS],
            report_drafts=options.report_drafts,
            trace=options.trace,
            before=perf_counter() - begun,
            **arguments,
        )
        return AloneAnswer(session, session)

    def logits(self, ids: Sequence[int], last: int) -> npt.NDArray[np.float32]:
        self._tokens = []
        return self._ready(len(ids) + 1).logits(ids, last).cpu().numpy()

    def _ready(self, end: int) -> DeviceStages:
        """Stages for texts that end before this position."""
        if self.stages is None or self.stages.capacity < end:
            weights, cuts = self._weights, self._cuts
            longest = weights.config.max_position_embeddings
            capacity = max(end, min(max(LEAST_CAPACITY, 1 << (end - 1).bit_length()), longest))
            self.drop()
            needed = needed_bytes(weights, capacity, cuts)
            with errors.out_of_memory(f"a KV cache of {capacity} tokens", needed, weights.format):
                self.stages = DeviceStages(weights, capacity, cuts, pdl=self.pdl)
            if not self.eager:
                self._capture(self.stages, 0)
        return self.stages

    def _capture(self, stages: DeviceStages, drafts: int | None) -> None:
        """The stages, and rounds of so many drafts."""
        try:
            self._graphs = self._graphs or StageGraphs(stages)
            if drafts is not None:
                self._graphs.prepare_round(drafts)
        except CaptureFailed as error:
            self._graphs, self.eager = None, True  # so it is said once
            _LOG.warning("ppsd-rt: the stages cannot be captured (%s); they are launched one by one", error)


class AloneAnswer:
    """The events of one answer, whichever carrier makes them."""

    def __init__(self, events: Iterator[Round | Drafted], session: "_native.GraphSession | None" = None) -> None:
        self._events, self._session = events, session
        self._turn = RLock()  # of the thread that launches, where Python does
        self.handed_over = False
        self.thread = get_ident()  # which would wait for itself, see CudaBackend._waited

    def events(self) -> Generator[Round | Drafted, None, None]:
        while True:
            with self._turn:
                event = next(self._events, None)
            if event is None:
                return
            yield event

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        return self._session.spans() if self._session is not None else []

    def cancel(self) -> None:
        if self._session is not None:  # launches one by one go on to the end of their round
            self._session.cancel()

    def hand_over(self) -> None:
        """Returns when nothing works on it; what has been committed is still there."""
        self.handed_over = True
        if self._session is not None:
            self._session.end()
        else:
            self.close()

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        elif isinstance(self._events, Generator):
            with self._turn:
                self._events.close()


def _drafts_of_a_round(schedule: Schedule | Auto, in_turns: bool) -> int | None:
    """If all rounds but the last ones have as many: as csrc/cuda/plan.cpp counts them."""
    if isinstance(schedule, Auto) or not isinstance(schedule.stop_rule, FixedLength):
        return None
    waits = schedule.first_chunk > 0 or (in_turns and schedule.overlap)
    return (
        min(max(1, schedule.first_chunk), schedule.lookahead) if waits and (in_turns or not schedule.overlap) else None
    )


def _by_confidence(schedule: Schedule) -> bool:
    return not isinstance(schedule.stop_rule, (FixedLength, BetaThompson))
