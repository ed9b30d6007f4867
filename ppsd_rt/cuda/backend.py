"""The CUDA backend: fused Triton kernels. An answer alone has the captured stages (alone.py), answers in company the
loop of csrc/loop (passes.py)."""

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Condition, RLock, get_ident
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
    check_ids,
)
from ..cpu.answers import MOST_ANSWERS, PROMPT_ROWS
from ..cpu.machine import SHARE, kv_memory_of
from ..errors import PpsdError
from ..loop_backend import LoopBackend
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from ..models.head_file import HeadFile, HeadInfo, refuse_eagle3
from ..pipeline import learned
from ..pipeline.rounds import Drafted, Round
from ..pipeline.schedule import Auto, Schedule, copying
from ..pipeline.split import cut_layers
from ..sampling.params import SamplingParams
from ..trace import occupancy
from . import errors
from .alone import AloneAnswer, AloneEngine
from .graphs import Graphs
from .passes import PAGE, CudaPasses, Eagle
from .placement import Measured, Placement, best_sizes, given_sizes, measure
from .weights import DeviceWeights, check_runs

_LOG = logging.getLogger(__name__)


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
        self._alone = AloneEngine(
            pdl=errors.launches_dependently(devices),
            eager=not on_gpu or errors.switch("PPSD_CUDA_EAGER"),
            serial=errors.switch("PPSD_CUDA_SERIAL"),
        )
        self._measured: list[Measured] = []  # of each device, where the best split is to be found
        self._placement: Placement | None = None
        sizes: Sequence[int] = (self._config.num_hidden_layers,)
        if len(devices) > 1:
            self._placement = self._first_placement(devices)
            sizes = self._placement.sizes
        else:
            cut_layers(0, self._config.num_hidden_layers, stages)  # before the weights are loaded
        needed = errors.check_memory(self._config, self._dtype, devices, sizes)
        places = self._placement.places if self._placement else ()
        with errors.out_of_memory(f"the weights as {self._dtype}", needed, self._dtype):
            self._base = DeviceWeights.from_checkpoint(checkpoint, self._dtype, self._device, places)
        self._starting = RLock()
        self._over = Condition(self._starting)  # told when the answer that is alone is over
        if kv_memory is None and on_gpu:
            kv_memory = int(torch.cuda.mem_get_info(self._device)[0] * SHARE)
        self._kv_memory = kv_memory_of(kv_memory)
        self._beside: set[object] = set()  # answers that go by the loop
        self._answer: AloneAnswer | None = None  # the one that is alone
        self._last: AloneAnswer | None = None
        self._lost: str | None = None
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
        self._alone.drop()
        with errors.out_of_memory("the exit head", dict.fromkeys(self._devices(), 0), self._dtype):
            if placement is not None:
                self._weights = self._base
                self._placement, self._base = placement, self._base.placed(placement.places)
            eagle = file if isinstance(file, Eagle3File) else None
            self._weights = self._base.with_head(None if eagle else file)
            self._eagle = Eagle(eagle, self._weights) if eagle else None
        self._alone.use(self._weights, self._stage_cuts(self._weights.exit_layer, self._placement))
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
            for event in self._events(answer, cancellation):
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

    def _begin_alone(self, *request: *Request) -> AloneAnswer | None:
        """None: it goes by the loop."""
        prompt, params, schedule, limits, options, cancellation = request
        with self._starting:
            if self.concurrency == 1 and not self._waited(cancellation):
                return None
            self._check()
            beyond = limits.end > PAGE * self._pages  # it could not go on in company
            company = self._answer or self._beside or limits.own
            if self.concurrency > 1 and (company or self._alone.eager or self._eagle or beyond or not params.plain):
                return None
            with self._failing():
                policy = self._steer(schedule, options.oracle, params)
                ngrams = self._ngrams.of(options.copied_by)
                answer = self._alone.begin(prompt, params, schedule, policy, limits, options, ngrams)
            if answer is None and self.concurrency == 1:
                raise PpsdError("several GPUs need captured stages, which there are not: name one")
            self._answer = self._last = answer
            return answer

    def _waited(self, cancellation: Cancellation) -> bool:
        """Over several devices, for the answer before this one. False: this one was cancelled meanwhile."""
        while self._answer is not None and not cancellation.asked:
            if self._answer.thread == get_ident():
                raise PpsdError("several GPUs decode one answer at a time: end the one that is in progress")
            self._over.wait(0.05)  # whoever cancels may not be made to wait for the lock, and so does not tell
        return not cancellation.asked

    def _events(self, answer: AloneAnswer, cancellation: Cancellation) -> Iterator[Round | Drafted]:
        cancellation.tells(answer.session.cancel)
        try:
            with self._failing():
                yield from answer.session
        finally:
            answer.session.close()
            with self._starting:
                if self._answer is answer:
                    self._answer = None
                self._over.notify_all()

    def _hand_over(self) -> None:
        """Nothing works on the answer that is alone when this returns; it goes on in the loop."""
        self._check()
        answer, self._answer = self._answer, None
        if answer is not None and self.concurrency > 1:
            answer.handed_over = True
            answer.session.end()  # what has been committed is still there
        elif answer is not None:
            answer.session.close()

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
        pages, graphs = self._pages, None if self._alone.eager else Graphs(self._device)
        with errors.out_of_memory(f"{pages} pages of KV caches", {self._device: pages * self._page_bytes}, self._dtype):
            passes = CudaPasses(self._weights, pages, self._eagle, pdl=self._alone.pdl, graphs=graphs)
        return _native.Loop.of_passes(passes, pages, MOST_ANSWERS, PROMPT_ROWS)

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        check_ids(ids, last, self._config.vocab_size)
        with self._starting:
            self._hand_over()
            return self._alone.logits(ids, last)

    def bytes_per_token(self, context: int) -> int:
        return self._weights.bytes + self._config.kv_values * self._weights.dtype.itemsize * context

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        return self._last.session.spans() if self._last else super().spans()

    def explain(self) -> str:
        lines = [self._policy.explain() if self._policy else "", super().explain()]
        if spans := self.spans():
            lines.append(str(occupancy(spans)))
        return "\n".join(filter(None, lines))

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "launches": "one by one" if self._alone.eager else "captured",
            "dependent_launches": self._alone.pdl,
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

    def _steer(
        self, schedule: Schedule | Auto, oracle: Oracle | None, params: SamplingParams
    ) -> _native.AlonePolicy | None:
        """Of `auto`; it goes on from answer to answer."""
        if not isinstance(schedule, Auto):
            return None
        if self._policy is None:
            self._policy = _native.AlonePolicy(learned.prior(self.head), not self._alone.serial)
        asked = copying(schedule if oracle is None else replace(schedule, lookup=0, recycle=False))
        self._policy.begin(asked, -1 if oracle else int(params.temperature > 0))
        return self._policy

    def _end(self) -> None:
        """End all answers in progress."""
        self._check()
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.session.close()
        self._answers.end_all()

    def _check(self) -> None:
        if self._lost is not None:
            raise PpsdError(f"{self._lost}; this process cannot use the GPU any more")

    def _machine(self) -> str:
        if self._device.type != "cuda":
            return "interpreter"
        switches = (self._alone.eager, self._alone.pdl, *([str(self._placement)] if self._placement else []))
        return f"{torch.cuda.get_device_name(self._device)} {torch.__version__} {switches}"

    # -- several devices -----------------------------------------------------------------------------------------------

    def _devices(self) -> tuple[torch.device, ...]:
        return self._placement.devices if self._placement else (self._device,)

    def _first_placement(self, devices: list[torch.device]) -> Placement:
        """As --stages says, or measured; the exit head, which has a say in it too, is not known yet."""
        layers = self._config.num_hidden_layers
        sizes = given_sizes(layers, len(devices), self._cuts)
        if sizes is None:
            config, dtype, pdl = self._config, self._dtype, self._alone.pdl
            costs = {each: measure(config, dtype, each, pdl=pdl) for each in dict.fromkeys(devices)}
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
