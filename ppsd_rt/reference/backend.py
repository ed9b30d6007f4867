"""The reference backend: the torch stages, driven by the readable loop of `pipeline.py`."""

from collections.abc import Generator, Iterator, Sequence
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ..backend import Asked, Cancellation, check_ids, common_prefix, logprobs_by_logits, one_at_a_time
from ..errors import PpsdError, UsageError
from ..forks import NO_GPU_AFTER_FORK, hears_of_forks
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from ..models.eagle3_head import Eagle3Head
from ..models.exit_head import ExitHead
from ..models.head_file import HeadFile, HeadInfo
from ..models.llama import LlamaForCausalLM
from ..pipeline.rounds import Drafted, Logprob, Round
from ..pipeline.schedule import MAX_ROWS, Auto, Schedule
from ..planning.planner_pool import PlannerPool, kind_of
from ..sampling.params import EXTRAS, SamplingParams
from .eagle_stage import EagleDraftStage
from .ngrams import Ngrams
from .pipeline import Pipeline, Ticks
from .sampler import Sampler
from .stage import DraftStage, Taps, VerifyStage
from .text_stages import TorchStages
from .timeline import Timeline

if TYPE_CHECKING:
    from .._native import Costs, Planner

CONTEXT = 128  # rows of text after which `auto` measures, where the model takes so many
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU where torch has one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise PpsdError(f"device {name!r}: torch sees {torch.cuda.device_count()} CUDA devices; use --device cpu")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the machine multiplies it natively, else float32."""
    if name == "auto":
        native = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if native else torch.float32
    if name not in DTYPES:
        raise UsageError(f"dtype {name!r} is unknown to the torch backend; dtypes are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


class TorchBackend:
    """One model, one head, one sequence at a time."""

    name = "torch"
    copies = siblings = True
    extras = EXTRAS
    concurrency = 1
    longest = 1 << 31

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: str, threads: int | None) -> None:
        self.torch_device = pick_device(device)
        self.torch_dtype = pick_dtype(dtype, self.torch_device)
        if threads is not None:
            torch.set_num_threads(threads)
        self.model = LlamaForCausalLM.from_checkpoint(checkpoint, self.torch_dtype, self.torch_device)
        self._on_gpu_before_fork = False
        self._working = RLock()  # of the thread that uses the stages: an answer begins after another one's round
        self.use_head(None)
        hears_of_forks(self)

    @property
    def device(self) -> str:
        return str(self.torch_device)

    @property
    def dtype(self) -> str:
        return str(self.torch_dtype).removeprefix("torch.")

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    @property
    def head(self) -> HeadInfo | None:
        return self._head.info if self._head else None

    def use_head(self, file: HeadFile | None) -> None:
        """Split the layers at the head's exit; without a head all of them verify."""
        self._head: ExitHead | Eagle3Head | None = None
        if isinstance(file, Eagle3File):
            self._head = Eagle3Head.from_file(file, self.model)
        elif file:
            self._head = ExitHead.from_file(file, self.model)
        self.know(None)
        self._make_stages()

    def know(self, successors: npt.NDArray[np.int32] | None) -> None:
        self._counted = successors
        self._ngrams = Ngrams()
        if successors is not None:
            self._ngrams.know(successors.tolist())

    def _new_stages(self) -> tuple[DraftStage, VerifyStage]:
        if isinstance(self._head, Eagle3Head):
            taps = Taps(self._head.eagle.taps, self.model.model.embed_tokens.weight)
            return EagleDraftStage(self.model, self._head, taps), VerifyStage(self.model, 0, taps=taps)
        first = self._head.info.exit_layer if self._head else 0
        return DraftStage(self.model, self._head), VerifyStage(self.model, first)

    def _make_stages(self) -> None:
        self._draft, self._verify = self._new_stages()
        self._tokens: list[int] = []  # what the stages' rows were computed from
        self._active: Pipeline | None = None
        self._costs: Costs | None = None
        self._planners = PlannerPool()
        self._timeline: Timeline | None = None

    def forked(self) -> None:
        torch.set_num_threads(1)  # it would wait for its others for ever
        self._working = RLock()
        self._active = None
        self._on_gpu_before_fork = self.torch_device.type == "cuda"
        if not self._on_gpu_before_fork:
            self._make_stages()

    def rounds(self, *asked: *Asked) -> Generator[Round | Drafted, None, None]:
        prompt, params, schedule, limits, options, cancellation = asked
        """Decode one answer. Rows that an earlier answer's text shares with `prompt` are not computed again."""
        if options.oracle:
            raise UsageError("the torch backend drafts by no oracle; use --backend cpu")
        with self._working:
            self._retire()
            planner = None
            if isinstance(schedule, Auto):
                from . import auto

                planner = self._plan(schedule, params)
                planner.begin(len(prompt))
                schedule = planner.schedule()
            self._keep_common(prompt, own=limits.own)
            self._reserve(limits.end)
            self._timeline = Timeline() if options.trace else None
            mask, ticks = options.masks() if options.masks else None, self._ticks(schedule)
            sampler = Sampler(params, len(prompt) - limits.own, mask, limits.stop_ids)
            ngrams = None if options.owner is None else self._ngrams
            stages = self._draft, self._verify
            pipeline = Pipeline(*stages, schedule, sampler, limits, ticks, self._timeline, ngrams, options.owner or 0)
            self._active = pipeline
        events = pipeline.run(prompt)
        if planner is not None:
            events = auto.replanned(pipeline, planner, events)
        try:
            while (event := self._next(pipeline, events, cancellation)) is not None:
                if options.report_drafts or isinstance(event, Round):
                    yield event
        finally:
            with self._working:
                if self._active is pipeline:
                    self._retire()

    def _next(
        self, pipeline: Pipeline, events: Iterator[Round | Drafted], cancellation: Cancellation
    ) -> Round | Drafted | None:
        with self._working:
            one_at_a_time(self._active is pipeline, cancellation)
            return None if cancellation.asked else next(events, None)

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        check_ids(ids, last, self.model.config.vocab_size)
        with self._working:
            self._retire()
            self._keep_common(ids, last)
            self._reserve(len(ids))
            self._draft.run_tokens(ids[self._draft.length :])
            start = self._verify.length
            self._tokens = list(ids)
            logits = self._verify.logits(self._draft.exit_hidden(start, len(ids) - start), last)
        return logits.float().cpu().numpy()

    def logprobs(self, ids: Sequence[int], top: int) -> list[Logprob]:
        return logprobs_by_logits(self.logits, ids, top)

    def stages(self, params: SamplingParams) -> TorchStages:
        if self._on_gpu_before_fork:
            raise PpsdError(NO_GPU_AFTER_FORK)
        draft, verify = self._new_stages()
        return TorchStages(draft, verify, Sampler(params))

    def bytes_per_token(self, context: int) -> int:
        weights = sum(parameter.nbytes for parameter in self.model.parameters())  # a tied LM head counts once
        if not self.model.config.tie_word_embeddings:
            weights -= self.model.model.embed_tokens.weight.nbytes  # of which a step reads one row
        return weights + self.model.config.kv_values * self.torch_dtype.itemsize * context

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        return list(self._timeline.spans) if self._timeline else []

    def facts(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "cpu_capability": torch.backends.cpu.get_cpu_capability()}

    def explain(self) -> str:
        """What `auto` expects of every schedule, and what it has measured; empty when it has not been used."""
        if self._planners.used is None or self._costs is None:
            return ""
        from ..planning.planner import explain

        return explain(self._planners.used, self._costs)

    def _plan(self, schedule: Auto, params: SamplingParams) -> "Planner":
        from .auto import measure

        assert self._head is not None, "without a head there is nothing to choose"
        if self._costs is None:
            context = max(min(CONTEXT, self.model.config.max_position_embeddings - MAX_ROWS), 1)
            self._tokens = []
            self._reserve(context + MAX_ROWS)
            self._costs = measure(self._draft, self._verify, context)
        return self._planners.planner(kind_of(schedule, params), self._costs, self._head.info)

    def _keep_common(self, prompt: Sequence[int], last: int = 1, own: int = 0) -> None:
        """Roll back to the rows that `prompt` shares with the stages; the `last` ones are always run again."""
        self._draft.begin_text(len(prompt) - own)
        self._verify.begin_text(len(prompt) - own)
        keep = min(common_prefix(self._tokens, prompt), len(prompt) - last)
        self._draft.rollback(keep)
        self._verify.rollback(keep)

    def _retire(self) -> None:
        """End the answer in progress, if any; its text's rows stay for the next one to share."""
        if self._on_gpu_before_fork:
            raise PpsdError(NO_GPU_AFTER_FORK)
        if self._active is not None:
            self._active.cancel()
            self._tokens, self._active = self._active.tokens, None

    def _reserve(self, capacity: int) -> None:
        try:
            self._draft.reserve(capacity)
            self._verify.reserve(capacity)
        except RuntimeError as error:  # torch's out-of-memory errors, of the CPU and of CUDA
            reason = str(error).splitlines()[0]
            raise PpsdError(f"no memory for a KV cache of {capacity} tokens ({reason}); lower --max-tokens") from None

    def _ticks(self, schedule: Schedule) -> Ticks:
        """How many draft steps a verification takes, by the number of layers that each goes through."""
        if self._head is None or not schedule.overlap:
            return Ticks()
        early = self._head.info.exit_layer + len(self._head.layers)
        late = self.model.config.num_hidden_layers - self._head.info.exit_layer
        ratio = max(1, round(late / early))
        return Ticks(stages=ratio) if schedule.max_chunk == 1 else Ticks(per_stage=ratio)
