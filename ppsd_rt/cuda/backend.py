"""The CUDA backend: fused Triton kernels, captured stages, overlapped launches.

The stages (stages.py) are captured once (graphs.py) and launched by the C++ carrier (csrc/cuda/), which knows of the
text only what verdicts tell. Where they cannot be captured, and in Triton's interpreter, the same plan launches them
one kernel after the other (eager.py): slower, and the same answer.
"""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Condition, RLock, get_ident
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from triton.errors import TritonError

from .. import _native
from ..backend import (
    ENDED,
    NO_NUMBER,
    Cancellation,
    Oracle,
    Request,
    RunOptions,
    check_ids,
    common_prefix,
)
from ..cpu.answers import MOST_ANSWERS, PROMPT_ROWS
from ..cpu.machine import SHARE, kv_memory_of
from ..errors import PpsdError
from ..loop_backend import LoopBackend
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from ..models.head_file import HeadFile, HeadInfo, refuse_eagle3
from ..pipeline.rounds import Drafted, Limits, Round
from ..pipeline.schedule import MAX_CHUNK, Auto, Schedule, copying
from ..pipeline.stop_rules import BetaThompson, FixedLength
from ..planning import learned
from ..planning.split import cut_layers
from ..sampling.params import SamplingParams
from ..trace import occupancy
from ..triton_kernels.state import DRAWN, RECORD_COMMITTED, RECORD_IDS, RECORD_SEQUENCE, REPORT, SEQUENCE
from . import errors
from .buffers import needed_bytes
from .devices import synchronise
from .eager import EagerCarrier
from .eagle import Eagle
from .graphs import CaptureFailed, Recorder, StageGraphs, StepGraphs
from .passes import PAGE, CudaPasses
from .placement import Measured, Placement, best_sizes, given_sizes, measure
from .stages import DeviceStages
from .weights import DeviceWeights, check_runs

_LOG = logging.getLogger(__name__)

LEAST_CAPACITY = 1024  # positions that buffers are made for


class CudaBackend(LoopBackend):
    name = "cuda"
    threads = 1  # that launches

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        device: str,
        threads: int | None,
        stages: int | Sequence[int] = 1,
        kv_memory: int | str | None = None,
    ) -> None:
        super().__init__()
        devices = errors.pick_devices(device)
        self._device = devices[0]  # that drafts
        on_gpu = self._device.type == "cuda"
        self._dtype = ("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype
        check_runs(checkpoint.config, self._dtype)
        errors.check_format(self._dtype, devices)
        self._config, self._cuts = checkpoint.config, stages
        self._checkpoint = checkpoint
        self._serial = errors.switch("PPSD_CUDA_SERIAL")
        self._eager = not on_gpu or errors.switch("PPSD_CUDA_EAGER")
        self._pdl = errors.launches_dependently(devices)
        self._told = False
        self._measured: list[Measured] = []  # of each device, where the best split is to be found
        self._placement: Placement | None = None
        if len(devices) > 1:
            self._placement = self._first_placement(devices)
            needed = errors.check_parts(self._config, self._dtype, devices, self._placement.sizes)
        else:
            cut_layers(0, self._config.num_hidden_layers, stages)  # before the weights are loaded
            needed = errors.check_memory(self._config, self._dtype, self._device)
        places = self._placement.places if self._placement else ()
        with errors.out_of_memory(f"the weights as {self._dtype}", needed, self._dtype):
            self._base = DeviceWeights.from_checkpoint(checkpoint, self._dtype, self._device, places)
        self._starting = RLock()
        self._over = Condition(self._starting)  # told when the answer that is alone is over
        if kv_memory is None and on_gpu:
            kv_memory = int(torch.cuda.mem_get_info(self._device)[0] * SHARE)
        self._kv_memory = kv_memory_of(kv_memory)
        self._beside: set[object] = set()  # answers that go by the loop
        self._answer: _Answer | None = None  # the one that is alone
        self._last: _Answer | None = None
        self._lost: str | None = None
        self._tokens: list[int] = []  # the prompt whose rows the stages hold
        self._stages: DeviceStages | None = None
        self._graphs: StageGraphs | None = None
        self._eagle: Eagle | None = None
        self.use_head(None)

    @property
    def concurrency(self) -> int:
        """The loop's passes run on one device: over several there is one answer, in their captured stages."""
        return 1 if len(self._devices()) > 1 else super().concurrency

    @property
    def extras(self) -> frozenset[str]:
        return frozenset() if len(self._devices()) > 1 else super().extras

    @property
    def _page_bytes(self) -> int:
        layers = [*self._weights.layers, *(self._weights.head.layers if self._weights.head else ())]
        config = self._config
        row = 2 * config.num_key_value_heads * config.head_dim * self._weights.dtype.itemsize
        return PAGE * row * len(layers) + (self._eagle.own.page_bytes if self._eagle else 0)

    @property
    def longest(self) -> int:
        return min(PAGE * self._pages, 1 << 15)  # one alone takes memory for all of its text when it begins

    @property
    def device(self) -> str:
        return ",".join(map(str, self._placement.devices)) if self._placement else str(self._device)

    @property
    def dtype(self) -> str:
        return self._dtype

    @property
    def weights(self) -> DeviceWeights:
        return self._weights

    @property
    def head(self) -> HeadInfo | None:
        head = self._eagle.head if self._eagle else self._weights.head
        return head.info if head else None

    def use_head(self, file: HeadFile | None) -> None:
        if len(self._devices()) > 1:
            refuse_eagle3(file.info if file else None, "on several GPUs")
        if file is not None and file.info.tap:
            _LOG.info("the cuda backend drafts without what this exit head hears of layer %d", file.info.tap)
        draft_vocabulary = 0 if file is None or file.draft_ids is None else len(file.draft_ids)
        placement = self._placement_for(file.info if file else None, draft_vocabulary)
        self._stage_cuts(file.info.exit_layer if file else 0, placement)
        self._end()
        self._answers.forget_loop()
        self._drop_stages()
        with errors.out_of_memory("the exit head", dict.fromkeys(self._devices(), 0), self._dtype):
            if placement is not None:
                self._weights = self._base
                self._placement, self._base = placement, self._base.placed(placement.places)
            eagle = file if isinstance(file, Eagle3File) else None
            self._weights = self._base.with_head(None if eagle else file)
            self._eagle = Eagle(eagle, self._weights) if eagle else None
        self._pages = max(self._kv_memory // self._page_bytes, 1)
        self._draft_vocabulary = draft_vocabulary
        self._policy: _native.AlonePolicy | None = None

    def rounds(self, *request: *Request) -> Generator[Round | Drafted, None, None]:
        """One answer alone has the captured stages, whose launches are queued ahead. When another one comes, it goes on
        in the loop, from what its consumer has of it; so do answers that want what those stages do not have."""
        prompt, params, schedule, limits, options, cancellation = request
        said: list[int] = []
        seconds = 0.0
        if (answer := self._begin_alone(*request)) is not None:
            for event in self._alone(answer, cancellation):
                if isinstance(event, Round):
                    said += event.committed
                    seconds = event.seconds or 0.0
                yield event
            if cancellation.asked or (said and (len(prompt) + len(said) >= limits.end or said[-1] in limits.stop_ids)):
                return
            if not answer.handed_over:
                raise PpsdError(ENDED)
        elif self.concurrency == 1:
            return  # cancelled before its turn came
        limits = replace(limits, own=limits.own + len(said))
        place = object()
        with self._starting:
            self._hand_over()
            self._beside.add(place)
            self._last = None
        try:
            rest = [*prompt, *said], params, schedule, limits, options, cancellation
            for event in self._answers.decode(rest, self._ngrams):
                if said and isinstance(event, Round):
                    event = replace(event, prompt=False, seconds=seconds + (event.seconds or 0.0))
                yield event
        finally:
            self._beside.discard(place)

    def _begin_alone(self, *request: *Request) -> "_Answer | None":
        """None: it goes by the loop."""
        prompt, params, schedule, limits, options, cancellation = request
        with self._starting:
            if self.concurrency == 1 and not self._waited(cancellation):
                return None
            self._check()
            beyond = limits.end > PAGE * self._pages  # it could not go on in company
            if self.concurrency > 1 and (
                self._answer or self._beside or self._eagle or limits.own or beyond or not params.plain
            ):
                return None
            with self._failing():
                policy = self._steer(schedule, options.oracle, params)
                self._answer = self._last = self._begin(prompt, params, schedule, policy, limits, options)
            return self._answer

    def _waited(self, cancellation: Cancellation) -> bool:
        """Over several devices, for the answer before this one. False: this one was cancelled meanwhile."""
        while self._answer is not None and not cancellation.asked:
            if self._answer.thread == get_ident():
                raise PpsdError("several GPUs decode one answer at a time: end the one that is in progress")
            self._over.wait(0.05)  # whoever cancels may not be made to wait for the lock, and so does not tell
        return not cancellation.asked

    def _alone(self, answer: "_Answer", cancellation: Cancellation) -> Iterator[Round | Drafted]:
        cancellation.tells(answer.cancel)
        try:
            with self._failing():
                yield from answer.events()
        finally:
            answer.close()
            with self._starting:
                if self._answer is answer:
                    self._answer = None
                self._over.notify_all()

    def _hand_over(self) -> None:
        """Nothing works on the answer that is alone when this returns; it goes on in the loop."""
        self._check()
        answer, self._answer = self._answer, None
        if answer is not None and self.concurrency > 1:
            answer.hand_over()
        elif answer is not None:
            answer.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except _native.CudaError as error:
            self._lost = str(error)  # a broken context stays broken
            raise PpsdError(self._lost) from None
        except (RuntimeError, TritonError) as error:  # of torch, whose next call would fail as well; of the compiler
            lines = str(error).strip().splitlines() or [type(error).__name__]
            if lines[0] == NO_NUMBER:
                raise PpsdError(NO_NUMBER) from None
            raise PpsdError(f"the GPU, or what was compiled for it, failed: {lines[0]}") from None

    def _make_loop(self) -> _native.Loop:
        pages, graphs = self._pages, None if self._eager else StepGraphs(self._device, Recorder())
        with errors.out_of_memory(f"{pages} pages of KV caches", {self._device: pages * self._page_bytes}, self._dtype):
            passes = CudaPasses(self._weights, pages, self._eagle, pdl=self._pdl, graphs=graphs)
        return _native.Loop.of_passes(passes, pages, MOST_ANSWERS, PROMPT_ROWS)

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        check_ids(ids, last, self._config.vocab_size)
        with self._starting:
            self._hand_over()
            self._tokens = []
            return self._ready(len(ids) + 1).logits(ids, last).cpu().numpy()

    def bytes_per_token(self, context: int) -> int:
        return self._weights.bytes + self._config.kv_values * self._weights.dtype.itemsize * context

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        return self._last.spans() if self._last else super().spans()

    def explain(self) -> str:
        lines = [self._policy.explain() if self._policy else "", super().explain()]
        if spans := self.spans():
            lines.append(str(occupancy(spans)))
        return "\n".join(filter(None, lines))

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "launches": "one by one" if self._eager else "captured",
            "dependent_launches": self._pdl,
        }
        if self._placement is not None:
            facts["layers"] = str(self._placement)
        if self._measured:
            facts["measured_layer_us"] = [round(1e6 * each.layer, 2) for each in self._measured]
        if self._device.type == "cuda":
            properties = torch.cuda.get_device_properties(self._device)
            free, total = torch.cuda.mem_get_info(self._device)
            facts |= {
                "gpu": properties.name,
                "sm": f"{properties.major}{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_gigabytes": round(total / 1e9, 1),
                "free_gigabytes": round(free / 1e9, 1),
            }
        return {**facts, "packed_megabytes": round(self._weights.bytes / 1e6, 1)}

    # -- an answer -----------------------------------------------------------------------------------------------------

    def _begin(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        policy: _native.AlonePolicy | None,
        limits: Limits,
        options: RunOptions,
    ) -> "_Answer":
        """Run the prompt and the pass that gives the first token; then the carrier's work begins."""
        begun = perf_counter()
        stages = self._ready(limits.end)
        drafts = _drafts_of_a_round(schedule, self._serial)
        if self._graphs is not None:
            self._capture(drafts)
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
        self._synchronise()
        if self._graphs is None:
            stages.plain_step((len(prompt) - 1, 1))
            self._synchronise()
        else:
            self._graphs.plain_step((len(prompt) - 1, 1))
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
            "in_turns": self._serial,
            "ngrams": self._ngrams.of(options.copied_by),
        }
        if self._graphs is None:
            plan = _native.LaunchPlan(stages=len(stages.slices), **arguments)
            carrier = EagerCarrier(stages, plan, sequence=sequence, drawn=drawn, report_drafts=options.report_drafts)
            events = carrier.events(prompt, kept, record[RECORD_IDS])
            return _Answer(events)
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
        return _Answer(session, session)

    def _steer(
        self, schedule: Schedule | Auto, oracle: Oracle | None, params: SamplingParams
    ) -> _native.AlonePolicy | None:
        """Of `auto`; it goes on from answer to answer."""
        if not isinstance(schedule, Auto):
            return None
        if self._policy is None:
            self._policy = _native.AlonePolicy(learned.prior(self.head), not self._serial)
        asked = copying(schedule if oracle is None else replace(schedule, lookup=0, recycle=False))
        self._policy.begin(asked, -1 if oracle else int(params.temperature > 0))
        return self._policy

    def _end(self) -> None:
        """End all answers in progress."""
        self._check()
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()
        self._answers.end_all()

    def _check(self) -> None:
        if self._lost is not None:
            raise PpsdError(f"{self._lost}; this process cannot use the GPU any more")

    # -- stages and graphs ---------------------------------------------------------------------------------------------

    def _ready(self, end: int) -> DeviceStages:
        """Stages, captured where that can be, for texts that end before this position."""
        if self._stages is None or self._stages.capacity < end:
            longest = self._config.max_position_embeddings
            capacity = max(end, min(max(LEAST_CAPACITY, 1 << (end - 1).bit_length()), longest))
            self._drop_stages()
            cuts = self._stage_cuts(self._weights.exit_layer, self._placement)
            with errors.out_of_memory(
                f"a KV cache of {capacity} tokens", needed_bytes(self._weights, capacity, cuts), self._dtype
            ):
                self._stages = DeviceStages(self._weights, capacity, cuts, pdl=self._pdl)
            if not self._eager:
                self._capture(0)
        assert self._stages is not None
        return self._stages

    def _capture(self, drafts: int | None) -> None:
        """The stages, and rounds of so many drafts."""
        assert self._stages is not None
        try:
            if self._graphs is None:
                self._graphs = StageGraphs(self._stages, Recorder())
            if drafts is not None:
                self._graphs.prepare_round(drafts)
        except CaptureFailed as error:
            self._graphs, self._eager = None, True
            if not self._told:
                self._told = True
                _LOG.warning("ppsd-rt: the stages cannot be captured (%s); they are launched one by one", error)

    def _drop_stages(self) -> None:
        if self._graphs is not None:
            self._synchronise()
            self._graphs.close()
        self._graphs = self._stages = None
        self._tokens = []

    def _synchronise(self) -> None:
        synchronise(self._devices())

    def _machine(self) -> str:
        if self._device.type != "cuda":
            return "interpreter"
        switches = (self._eager, self._pdl, *([str(self._placement)] if self._placement else []))
        return f"{torch.cuda.get_device_name(self._device)} {torch.__version__} {switches}"

    # -- several devices -----------------------------------------------------------------------------------------------

    def _devices(self) -> tuple[torch.device, ...]:
        return self._placement.devices if self._placement else (self._device,)

    def _first_placement(self, devices: list[torch.device]) -> Placement:
        """As --stages says, or measured; the exit head, which has a say in it too, is not known yet."""
        layers = self._config.num_hidden_layers
        sizes = given_sizes(layers, len(devices), self._cuts)
        if sizes is None:
            recorder = None if self._eager else Recorder
            costs = {
                each: measure(self._config, self._dtype, each, pdl=self._pdl, recorder=recorder)
                for each in dict.fromkeys(devices)
            }
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # what was measured with is free for the weights again
            self._measured = [costs[each] for each in devices]
            sizes = best_sizes(layers, self._measured, None, 1.0)
            errors.check_same_kind(devices, sizes)
        return Placement(tuple(devices), sizes)

    def _placement_for(self, head: HeadInfo | None, draft_vocabulary: int) -> Placement | None:
        if self._placement is None or not self._measured:
            return self._placement
        share = draft_vocabulary / self._config.vocab_size if draft_vocabulary else 1.0
        sizes = best_sizes(self._config.num_hidden_layers, self._measured, head, share)
        return Placement(self._placement.devices, sizes)

    def _stage_cuts(self, exit_layer: int, placement: Placement | None) -> list[int]:
        return (
            placement.cuts(exit_layer)
            if placement
            else cut_layers(exit_layer, self._config.num_hidden_layers, self._cuts)
        )


class _Answer:
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
