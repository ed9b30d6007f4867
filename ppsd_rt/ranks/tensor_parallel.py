"""A baseline, not a product: tensor-parallel plain decoding (`--parallel tp`), to compare pipelines with.

Every rank holds some heads, some inner channels of the MLP and some of the vocabulary of *every* layer (Shoeybi et al.,
Megatron-LM, arXiv 1909.08053), in the same packed kernels; two all-reduces a layer add up what they make of a row. All
ranks work on every token at once, one thread each. Greedy decoding only, and sums are made in another order than in one
process, so that near ties may fall otherwise: its answers are not held to those of the other schedules.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..backend import Cancellation, RunOptions
from ..cpu_backend import kv_format, one_line
from ..errors import PpsdError, UsageError
from ..models.checkpoint import Array, Checkpoint, as_float32
from ..models.config import LlamaConfig
from ..models.head_file import HeadFile, HeadInfo
from ..models.rotary import inverse_frequencies
from ..protocol import Drafted, Limits, Round
from ..sampling import SamplingParams
from ..schedule import Auto, Schedule
from .control import Control
from .report import report_of
from .slices import layers_of
from .threads import start

_PASS = 64  # rows of a pass over a prompt
_BLOCK = 32  # widths are multiples of this
_HEADER = 3  # words: rows of the prompt, tokens at most, 1 (or 0: the end of all)


def shares(total: int, ranks: int, step: int) -> list[int]:
    """`total` in parts that are multiples of `step`, as even as can be."""
    units, rest = divmod(total, step)
    if rest or units < ranks:
        raise PpsdError(
            f"{total} cannot be cut into {ranks} parts of whole {step}s: take fewer ranks for --parallel tp"
        )
    return [step * (units * (rank + 1) // ranks - units * rank // ranks) for rank in range(ranks)]


def pack_share(checkpoint: Checkpoint, rank: int, ranks: int, dtype: str) -> tuple[_native.LayerShares, int, int]:
    """(the share, its first id of the vocabulary, packed bytes)"""
    config = checkpoint.config
    group = config.num_attention_heads // config.num_key_value_heads
    keys = layers_of(shares(config.num_key_value_heads, ranks, 1), rank)
    inner = layers_of(shares(config.intermediate_size, ranks, _BLOCK), rank)
    ids = layers_of(shares(config.vocab_size, ranks, 1), rank)
    wide = config.head_dim
    tensors: dict[str, Array] = {}
    for name, tensor in checkpoint.tensors.items():
        if ".self_attn.q_proj." in name:
            tensor = tensor[keys[0] * group * wide : keys[1] * group * wide]
        elif ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            tensor = tensor[keys[0] * wide : keys[1] * wide]
        elif name.endswith("o_proj.weight"):
            tensor = np.ascontiguousarray(tensor[:, keys[0] * group * wide : keys[1] * group * wide])
        elif name.endswith("o_proj.bias") and rank > 0:
            continue  # added once
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor = tensor[inner[0] : inner[1]]
        elif name.endswith("down_proj.weight"):
            tensor = np.ascontiguousarray(tensor[:, inner[0] : inner[1]])
        elif name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensor = tensor[ids[0] : ids[1]]
        tensors[name] = tensor
    shape = _native.ModelShape(
        vocab_size=ids[1] - ids[0],
        hidden_size=config.hidden_size,
        intermediate_size=inner[1] - inner[0],
        num_layers=config.num_hidden_layers,
        num_heads=(keys[1] - keys[0]) * group,
        num_kv_heads=keys[1] - keys[0],
        head_dim=wide,
        rms_norm_eps=config.rms_norm_eps,
    )
    kv = kv_format(dtype, wide)
    with one_line("pack a share of the model", 1):
        model = _native.Model(shape, tensors, inverse_frequencies(config).tolist(), dtype, kv, 1)
    return _native.LayerShares(model), ids[0], model.packed_bytes


class TensorParallel:
    """What every rank does for a token; all ranks call the same methods at the same time."""

    def __init__(self, checkpoint: Checkpoint, rank: int, ranks: int, dtype: str) -> None:
        self._share, self._first_id, self.packed_bytes = pack_share(checkpoint, rank, ranks, dtype)
        self._embedding = checkpoint.tensors["model.embed_tokens.weight"]
        self._config: LlamaConfig = checkpoint.config
        self._ranks = ranks

    def begin(self, header: npt.NDArray[np.int32] | None = None) -> npt.NDArray[np.int32]:
        """Rank 0 says what is next."""
        words = np.zeros(_HEADER, np.int32) if header is None else header
        _broadcast(words)
        return words

    def tokens(self, prompt: npt.NDArray[np.int32], count: int) -> Generator[int, None, None]:
        """The greedy answer, on every rank alike."""
        self._share.reserve(len(prompt) + count + 1)
        for first in range(0, len(prompt), _PASS):
            x = self._pass(prompt[first : first + _PASS], first)
        token = self._choose(x[-1:])
        yield token
        for position in range(len(prompt), len(prompt) + count - 1):
            token = self._choose(self._pass(np.array([token], np.int32), position))
            yield token

    def _pass(self, ids: npt.NDArray[np.int32], start: int) -> npt.NDArray[np.float32]:
        import torch

        x = np.ascontiguousarray(as_float32(self._embedding[ids]))
        part = np.zeros_like(x)
        tensor = torch.from_numpy(part)
        for layer in range(self._config.num_hidden_layers):
            self._share.attention(layer, x, start, part)
            _add_up(tensor)
            x += part
            self._share.mlp(layer, x, part)
            _add_up(tensor)
            x += part
        return x

    def _choose(self, row: npt.NDArray[np.float32]) -> int:
        """The best of all shares; equal logits: the lowest id."""
        import torch
        import torch.distributed as dist

        score, index = self._share.best(np.ascontiguousarray(row))
        mine = torch.tensor([score, float(self._first_id + index)], dtype=torch.float64)
        everyone = [torch.zeros(2, dtype=torch.float64) for _ in range(self._ranks)]
        dist.all_gather(everyone, mine)
        _, best = max((each[0].item(), -each[1].item()) for each in everyone)
        return int(-best)


def _broadcast(words: npt.NDArray[np.int32]) -> None:
    import torch
    import torch.distributed as dist

    dist.broadcast(torch.from_numpy(words), 0)


def _add_up(tensor: Any) -> None:
    import torch.distributed as dist

    dist.all_reduce(tensor)


def serve_share(work: TensorParallel, control: Control) -> None:
    """Ranks but 0: until rank 0 says that it is over."""
    from threading import Thread

    def loop() -> None:
        try:
            while (header := work.begin())[2]:
                prompt = np.zeros(header[0], np.int32)
                _broadcast(prompt)
                for _ in work.tokens(prompt, int(header[1])):
                    going_on = np.zeros(1, np.int32)
                    _broadcast(going_on)
                    if not going_on[0]:
                        break
        except RuntimeError as error:
            control.lost(0, error)

    start(Thread(target=loop, daemon=True))
    control.failed.wait()
    control.check()


class TensorParallelBackend:
    """Rank 0's."""

    name = "tp"
    copies = siblings = False
    device = "cpu"
    threads = 1
    head: HeadInfo | None = None

    def __init__(self, work: TensorParallel, control: Control, dtype: str) -> None:
        self._work, self._control, self.dtype = work, control, dtype

    def close(self) -> None:
        if self._control.failure is None:
            self._work.begin(np.zeros(_HEADER, np.int32))
        self._control.stop()

    def use_head(self, file: HeadFile | None) -> None:
        if file is not None:
            raise UsageError("--parallel tp drafts nothing: leave --exit-head out")

    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        limits: Limits,
        options: RunOptions,
        cancellation: Cancellation,
    ) -> Generator[Round | Drafted, None, None]:
        if params.temperature or params.repetition_penalty != 1 or (isinstance(schedule, Schedule) and schedule.drafts):
            raise UsageError("--parallel tp is a baseline: it decodes greedily, without drafts (--schedule plain)")
        count, begun = limits.end - len(prompt), perf_counter()
        try:
            self._work.begin(np.array([len(prompt), count, 1], np.int32))
            ids = np.array(prompt, np.int32)
            _broadcast(ids)
            for place, token in enumerate(self._work.tokens(ids, count)):
                round = Round(0, len(prompt) + place, 1 if place else len(prompt), (token,), prompt=place == 0)
                last = limits.reached_by(round)
                going_on = False
                try:
                    yield replace(round, seconds=perf_counter() - begun)
                    going_on = not last
                finally:
                    _broadcast(np.array([going_on], np.int32))
                if last:
                    return
        except RuntimeError as error:
            self._control.lost(1, error)
            self._control.failed.wait(2.0)
            self._control.check()
            raise

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        raise PpsdError("logits stay on their ranks: run this in one process")

    def bytes_per_token(self, context: int) -> int:
        return 0

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        return []

    def explain(self) -> str:
        return ""

    def facts(self) -> dict[str, Any]:
        return {"share_megabytes": round(self._work.packed_bytes / 1e6, 1)}

    def report(self) -> list[list[float]]:
        return [report_of(self._work.packed_bytes, 0, 0, 0.0)]
