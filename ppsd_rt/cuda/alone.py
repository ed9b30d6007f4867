"""One answer that has the device to itself: captured stages (stages.py, graphs.py) and the C++ carrier (csrc/cuda/)."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import get_ident
from time import perf_counter

import numpy as np
import numpy.typing as npt

from .. import _native
from ..backend import NO_NUMBER, RunOptions, common_prefix
from ..errors import PpsdError
from ..pipeline.rounds import Limits
from ..pipeline.schedule import MAX_CHUNK, Auto, Schedule
from ..pipeline.stop_rules import BetaThompson, FixedLength
from ..sampling.params import SamplingParams
from ..triton_kernels.state import DRAWN, RECORD_COMMITTED, RECORD_IDS, RECORD_SEQUENCE, REPORT, SEQUENCE
from . import errors
from .buffers import cache_bytes
from .devices import synchronise
from .graphs import CaptureFailed, StageGraphs
from .stages import DeviceStages
from .weights import DeviceWeights

_LOG = logging.getLogger(__name__)

LEAST_CAPACITY = 1024  # positions that buffers are made for


class AloneEngine:
    """Stages of the longest text so far, captured. eager: they cannot be, or are not to be: answers go by the loop.
    serial: without overlap, whatever schedules say."""

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
    ) -> "AloneAnswer | None":
        """Run the prompt and the pass that gives the first token; then the carrier's work begins. None: eager."""
        begun = perf_counter()
        stages = self._ready(limits.end)
        self._capture(stages, _drafts_of_a_round(schedule, self.serial))
        if (graphs := self._graphs) is None:
            return None
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
        graphs.plain_step((len(prompt) - 1, 1))
        synchronise(stages.devices)
        sequence, drawn = (int(stages.buffers.state[place]) for place in (SEQUENCE, DRAWN))
        record = stages.buffers.ring[sequence % len(stages.buffers.ring)].tolist()
        if record[RECORD_SEQUENCE] != sequence or record[RECORD_COMMITTED] != 1:
            raise PpsdError("the prompt's verdict has not come from the device")
        if record[RECORD_IDS] < 0:
            raise PpsdError(NO_NUMBER)
        steering = schedule if isinstance(schedule, Schedule) else policy
        assert steering is not None
        session = _native.GraphSession(
            lanes=graphs.lanes,
            graphs=graphs.native(draft_records=records, sequence=sequence, drawn=drawn),
            prompt=list(prompt),
            keep=kept,
            first=record[RECORD_IDS],
            schedule=steering,
            limits=limits,
            seed=params.seed or 0,
            in_turns=self.serial,
            report_drafts=options.report_drafts,
            trace=options.trace,
            before=perf_counter() - begun,
            ngrams=ngrams,
        )
        return AloneAnswer(session)

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
            needed = cache_bytes(weights, capacity)
            with errors.out_of_memory(f"a KV cache of {capacity} tokens", needed, weights.format):
                self.stages = DeviceStages(weights, capacity, cuts, pdl=self.pdl)
        return self.stages

    def _capture(self, stages: DeviceStages, drafts: int | None) -> None:
        """The stages, and rounds of so many drafts."""
        if self.eager:
            return
        try:
            self._graphs = self._graphs or StageGraphs(stages)
            if drafts is not None:
                self._graphs.prepare_round(drafts)
        except CaptureFailed as error:
            self._graphs, self.eager = None, True  # so it is said once
            _LOG.warning("ppsd-rt: the stages cannot be captured (%s): kernels go one by one", error)


@dataclass(eq=False)
class AloneAnswer:
    """handed_over: it goes on in the loop. thread: which would wait for itself, see CudaBackend._waited."""

    session: _native.GraphSession
    handed_over: bool = False
    thread: int = field(default_factory=get_ident)


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
