"""The reference backend: the torch stages, driven by the readable loop of `pipeline.py`."""

from collections.abc import Generator, Iterator, Sequence
from threading import RLock
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..backend import NO_GPU_AFTER_FORK, Cancellation, RunOptions, check_ids, hears_of_forks, one_at_a_time
from ..errors import PpsdError, UsageError
from ..models.checkpoint import Checkpoint
from ..models.exit_head import ExitHead
from ..models.head_file import HeadFile, HeadInfo
from ..models.llama import LlamaForCausalLM
from ..planner import prior
from ..protocol import Drafted, Limits, Round
from ..sampling import SamplingParams
from ..schedule import Auto, Schedule
from .auto import Chooser, Costs, seconds
from .pipeline import Pipeline, Ticks
from .sampler import Sampler
from .stage import DraftStage, VerifyStage
from .text_stages import TorchStages
from .timeline import Timeline

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
        self._head = ExitHead.from_file(file, self.model) if file else None
        self._make_stages()

    def _new_stages(self) -> tuple[DraftStage, VerifyStage]:
        first = self._head.info.exit_layer if self._head else 0
        return DraftStage(self.model, self._head), VerifyStage(self.model, first)

    def _make_stages(self) -> None:
        self._draft, self._verify = self._new_stages()
        self._tokens: list[int] = []  # what the stages' rows were computed from
        self._active: Pipeline | None = None
        self._chooser: Chooser | None = None
        self._timeline: Timeline | None = None

    def forked(self) -> None:
        torch.set_num_threads(1)  # it would wait for its others for ever
        self._working = RLock()
        self._active = None
        self._on_gpu_before_fork = self.torch_device.type == "cuda"
        if not self._on_gpu_before_fork:
            self._make_stages()

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        limits: Limits,
        options: RunOptions,
        cancellation: Cancellation,
    ) -> Generator[Round | Drafted, None, None]:
        """Decode one answer. Rows that an earlier answer's text shares with `prompt` are not computed again."""
        if options.oracle:
            raise UsageError("the torch backend drafts by no oracle; use --backend cpu")
        with self._working:
            self._retire()
            if isinstance(schedule, Auto):
                schedule = self._choose(schedule.lookup)
            self._keep_common(prompt)
            self._reserve(limits.end)
            self._timeline = Timeline() if options.trace else None
            pipeline = Pipeline(
                self._draft, self._verify, schedule, Sampler(params), limits, self._ticks(schedule), self._timeline
            )
            self._active = pipeline
        events = pipeline.run(prompt)
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
            event = None if cancellation.asked else next(events, None)
            if self._chooser and isinstance(event, Round):
                self._chooser.observe(event)
            return event

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
        return self._chooser.explain() if self._chooser else ""

    def _choose(self, lookup: int) -> Schedule:
        assert self._head is not None, "without a head there is nothing to choose"
        if self._chooser is None:
            self._chooser = Chooser(self._measure(), prior(self._head.info))
        return self._chooser.choose(lookup)

    def _measure(self) -> Costs:
        """What a draft and a pass cost, timed behind a few rows of made-up text."""
        draft, verify, context = self._draft, self._verify, 16
        self._tokens = []
        self._reserve(context + Costs.MANY)
        draft.rollback(0)
        verify.rollback(0)
        draft.run_tokens([0] * (context + Costs.MANY))
        verify.logits(draft.exit_hidden(0, context + Costs.MANY), 1)

        def row() -> None:
            draft.rollback(context)
            draft.run_tokens([0])

        def drafted() -> None:
            row()
            draft.draft_logits()

        def verified(rows: int) -> None:
            verify.rollback(context)
            verify.logits(draft.exit_hidden(context, rows), rows)

        with torch.inference_mode():
            return Costs(
                seconds(row), seconds(drafted), seconds(lambda: verified(1)), seconds(lambda: verified(Costs.MANY))
            )

    def _keep_common(self, prompt: Sequence[int], last: int = 1) -> None:
        """Roll back to the rows that `prompt` shares with the stages; the `last` ones are always run again."""
        keep = min(_common_prefix(self._tokens, prompt), len(prompt) - last)
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


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
