"""The reference backend: the loop of csrc/loop/loop.cpp over the torch passes of `passes.py`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .. import _native
from ..backend import check_ids, logprobs_by_logits
from ..cpu.answers import MOST_ANSWERS, PROMPT_ROWS
from ..cpu.machine import SHARE, kv_memory_of
from ..errors import PpsdError, UsageError
from ..loop_backend import LoopBackend
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from ..models.exit_head import Eagle3Head, ExitHead
from ..models.head_file import HeadFile, HeadInfo
from ..models.llama import LlamaForCausalLM
from ..pipeline.rounds import Logprob
from ..sampling.params import SamplingParams
from .passes import PAGE, TorchPasses

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


class TorchBackend(LoopBackend):
    name = "torch"

    def __init__(
        self, checkpoint: Checkpoint, dtype: str, device: str, threads: int | None, kv_memory: int | str | None = None
    ) -> None:
        super().__init__()
        self.torch_device = pick_device(device)
        self.torch_dtype = pick_dtype(dtype, self.torch_device)
        if threads is not None:
            torch.set_num_threads(threads)
        self.model = LlamaForCausalLM.from_checkpoint(checkpoint, self.torch_dtype, self.torch_device)
        on_gpu = self.torch_device.type == "cuda"
        if kv_memory is None and on_gpu:
            kv_memory = int(torch.cuda.mem_get_info(self.torch_device)[0] * SHARE)
        self._kv_memory = kv_memory_of(kv_memory)
        self.use_head(None)

    @property
    def longest(self) -> int:
        return PAGE * self._pages

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
        self._answers.forget_loop()
        self._head: ExitHead | Eagle3Head | None = None
        if isinstance(file, Eagle3File):
            self._head = Eagle3Head.from_file(file, self.model.model.embed_tokens.weight)
        elif file:
            self._head = ExitHead.from_file(file, self.model)
        self._pages = min(self._kv_memory // self._passes().page_bytes, 1 << 24)
        self.know(None)

    def _passes(self) -> TorchPasses:
        return TorchPasses(self.model, self._head)

    def _make_loop(self) -> _native.Loop:
        return _native.Loop.of_passes(self._passes(), self._pages, MOST_ANSWERS, PROMPT_ROWS)

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        check_ids(ids, last, self.model.config.vocab_size)
        return self._passes().scores(ids)(len(ids) - last, len(ids))

    def logprobs(self, ids: Sequence[int], top: int) -> list[Logprob]:
        check_ids(ids, 1, self.model.config.vocab_size)
        scores = self._passes().scores(ids)
        return logprobs_by_logits(lambda some, last: scores(len(some) - last, len(some)), ids, top)

    def stages(self, params: SamplingParams) -> _native.Stages:
        return _native.Stages.of_passes(self._passes(), params)

    def bytes_per_token(self, context: int) -> int:
        weights = sum(parameter.nbytes for parameter in self.model.parameters())  # a tied LM head counts once
        if not self.model.config.tie_word_embeddings:
            weights -= self.model.model.embed_tokens.weight.nbytes  # of which a step reads one row
        return weights + self.model.config.kv_values * self.torch_dtype.itemsize * context

    def facts(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "kv_megabytes": round(self._kv_memory / 1e6, 1),
        }

    def explain(self) -> str:
        return ""  # passes are measured as they are made, and no schedule is predicted
