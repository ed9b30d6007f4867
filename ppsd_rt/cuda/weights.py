"""A model's weights and an exit head's, on a device or several, in the form in which the Triton kernels take them.

q, k and v are one matrix, gate and up another. Formats: float32 (the interpreter's), bfloat16, int8 (weights int8 with
a float16 scale for every 32 inputs), int4 (the CPU's: the same matrices are int4, a file's own four bits as they are,
and those that it leaves int8 are int8; k and v are then a matrix of their own), and fp8 (float8 with a float32 scale
for each output). Beside these three, all else is bfloat16: norms, biases, the embedding table and the KV cache.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..cpu.importance import Importance, importance_for
from ..cpu.machine import default_threads
from ..cpu.native import four_bits, one_line
from ..errors import PpsdError, UsageError
from ..models.checkpoint import Checkpoint
from ..models.config import LayerAttention, LlamaConfig, model_shapes
from ..models.head_file import DISTANCES, LAYERS, MOST_TEXT_IDS, HeadFile, HeadInfo, head_shapes
from ..models.llama import from_numpy
from ..models.random_weights import RandomCheckpoint
from ..models.stored import Array
from ..triton_kernels.int4 import GROUP, of_codes
from ..triton_kernels.linear import INT8_BLOCK, Weight, quantise, quantise_fp8, quantise_int4
from ..triton_kernels.prompt_layers import OUTPUTS_BLOCK

QUANTISED: dict[str, Callable[..., Weight]] = {"int8": quantise, "int4": quantise_int4, "fp8": quantise_fp8}
FORMATS = ("float32", "bfloat16", *QUANTISED)
NO_ID = -1  # in a place that no id of the text has taken
_ROWS_AT_A_TIME = 8192  # of a matrix that is quantised: its float32 copy should not need much memory

Source = Callable[[str], Tensor]  # a checkpoint's tensor by its name, on any device, in any float format


def refuses(config: LlamaConfig) -> str | None:
    """Why the kernels cannot run a model of this shape, or None."""
    for name, value, step in (
        ("hidden_size", config.hidden_size, INT8_BLOCK),
        ("intermediate_size", config.intermediate_size, INT8_BLOCK),
        ("num_attention_heads * head_dim", config.num_attention_heads * config.head_dim, INT8_BLOCK),
        ("head_dim", config.head_dim, 16),
    ):
        if value % step:
            return f"{name} {value} is not a multiple of {step}"
    if config.mlp_bias:
        return "its MLPs have biases (mlp_bias)"
    if config.rope_scaling is not None and config.rope_scaling.by_length:
        return f"its rotation depends on the length of the text (rope_scaling of type {config.rope_scaling.kind})"
    if config.qk_norm and (config.head_dim & (config.head_dim - 1) or config.head_dim > OUTPUTS_BLOCK):
        return f"norms of queries and keys need a head_dim of 16, 32, 64 or {OUTPUTS_BLOCK}, not {config.head_dim}"
    return None


@dataclass(frozen=True)
class Layer:
    """A decoder layer; an adapter's has no MLP (post_norm, gate_up and down are None)."""

    norm: Tensor  # [hidden]
    qkv: Weight  # [(heads + 2 kv_heads) * head_dim, hidden]; where kv is apart, q alone
    qkv_bias: Tensor | None
    out: Weight  # [hidden, heads * head_dim]
    out_bias: Tensor | None
    attention: LayerAttention
    norms: Tensor | None = None  # of the heads of queries and of keys, [2, head_dim]
    post_norm: Tensor | None = None  # [hidden]
    gate_up: Weight | None = None  # [2 inner, hidden]
    down: Weight | None = None  # [hidden, inner]
    kv: Weight | None = None  # [2 kv_heads * head_dim, hidden]

    @property
    def bytes(self) -> int:
        """Of its matrices, which every pass reads."""
        return sum(map(weight_bytes, (self.qkv, self.kv, self.out, self.gate_up, self.down)))

    def to(self, device: torch.device) -> "Layer":
        parts: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: part.to(device) for name, part in parts.items() if hasattr(part, "to")}
        return replace(self, **moved)


@dataclass(frozen=True)
class Head:
    """An exit head. draft_ids: int32 [outputs], ascending, then places for ids of the text (NO_ID: free), or None for
    the whole vocabulary. rows: of such ids, as lm_head holds them.

    feedback: of a head of that kind its matrices, one below the other [DISTANCES * hidden, hidden], and its norm.
    """

    info: HeadInfo
    layers: tuple[Layer, ...]
    norm: Tensor
    lm_head: Weight  # [outputs, hidden]
    draft_ids: Tensor | None
    feedback: Weight | None = None
    feedback_norm: Tensor | None = None
    rows: Callable[[Tensor], Weight] | None = None

    @cached_property
    def listed(self) -> list[int] | None:
        """The ids that it drafts from whatever the text."""
        return None if self.draft_ids is None else self.draft_ids[:-MOST_TEXT_IDS].tolist()

    def follow(self, text: Sequence[int]) -> None:
        """Draft from the ids of this text too. They stand in the same memory for every text, as captured launches read
        it: the last outputs of the LM head are theirs."""
        if self.listed is None:
            return
        assert self.draft_ids is not None
        assert self.rows is not None
        self.draft_ids[-MOST_TEXT_IDS:] = NO_ID
        listed = frozenset(self.listed)
        newest = list(dict.fromkeys(token for token in reversed(text) if token not in listed))[:MOST_TEXT_IDS]
        if not newest:
            return
        ids = torch.tensor(newest[::-1], dtype=torch.int32, device=self.draft_ids.device)
        places, rows = slice(len(listed), len(listed) + len(ids)), self.rows(ids)
        self.lm_head.values[places] = rows.values
        if self.lm_head.scales is not None and rows.scales is not None:
            self.lm_head.scales[places] = rows.scales
        self.draft_ids[places] = ids


@dataclass(frozen=True)
class DeviceWeights:
    """places: the device of each layer, where they are not all on one. The embedding and the exit head are on the first
    layer's, the final norm and the LM head on the last one's."""

    config: LlamaConfig
    format: str
    layers: tuple[Layer, ...]
    embedding: Tensor  # [vocabulary, hidden]
    norm: Tensor  # [hidden]
    lm_head: Weight  # [vocabulary, hidden]; in the formats of one kind it shares the memory of a tied embedding
    head: Head | None = None
    places: tuple[torch.device, ...] = ()

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, format: str, device: torch.device | str, places: Sequence[torch.device] = ()
    ) -> "DeviceWeights":
        """places: the device of each layer, the first one's being `device`; none: all are there."""
        if isinstance(checkpoint, RandomCheckpoint):
            return cls.random(checkpoint.config, format, device, seed=checkpoint.seed, places=places)
        if format == "int4" and checkpoint.in_four_bits:  # nothing is rounded
            return cls.build(checkpoint.config, _FourBits(checkpoint), format, device, places)
        threads = default_threads()
        with one_line(f"pack {checkpoint.folder} as {format}", threads):
            importance = importance_for(format, checkpoint, threads)  # as on a CPU
        return cls.build(checkpoint.config, _mapped(checkpoint.tensors), format, device, places, importance)

    @classmethod
    def random(
        cls,
        config: LlamaConfig,
        format: str,
        device: torch.device | str,
        *,
        seed: int = 0,
        scale: float = 0.02,
        places: Sequence[torch.device] = (),
    ) -> "DeviceWeights":
        """Random weights, drawn on the device, for benchmarks; no checkpoint is read; int8 and int4 as such."""
        return cls.build(config, _Dice(model_shapes(config), device, seed, scale), format, device, places)

    @classmethod
    def build(
        cls,
        config: LlamaConfig,
        source: Source,
        format: str,
        device: torch.device | str,
        places: Sequence[torch.device] = (),
        importance: Importance | None = None,
    ) -> "DeviceWeights":
        """importance: as of `importance_for`, for int4; None: all inputs alike.

        Raises as check_runs.
        """
        check_runs(config, format)
        devices = places or (device,) * config.num_hidden_layers
        loaders = [_Loader(source, format, place) for place in devices]
        layers = tuple(
            loader.layer(f"model.layers.{i}.", config, i, importance=None if importance is None else importance[i])
            for i, loader in enumerate(loaders)
        )
        embedding = _Loader(source, format, device).plain("model.embed_tokens.weight")
        lm_head = loaders[-1].lm_head(embedding if config.tie_word_embeddings else None)
        norm = loaders[-1].plain("model.norm.weight")
        return cls(config, format, layers, embedding, norm, lm_head, places=tuple(places))

    def placed(self, places: Sequence[torch.device]) -> "DeviceWeights":
        """The same weights with each layer on its device; those that are there already stay what they are."""
        if tuple(places) == self.places:
            return self
        before = self.places or (self.device,) * len(self.layers)
        layers = tuple(
            layer if old == new else layer.to(new) for layer, old, new in zip(self.layers, before, places, strict=True)
        )
        norm, lm_head = self.norm, self.lm_head
        if before[-1] != places[-1]:
            norm, lm_head = norm.to(places[-1]), lm_head.to(places[-1])
        return replace(self, layers=layers, norm=norm, lm_head=lm_head, places=tuple(places))

    def with_head(self, file: HeadFile | None) -> "DeviceWeights":
        """The same weights (shared) with another exit head, or without one."""
        if file is None:
            return replace(self, head=None)
        return self._with(_mapped(file.whole), file.info, None if file.draft_ids is None else file.draft_ids.tolist())

    def with_random_head(
        self, kind: str, exit_layer: int, draft_ids: Sequence[int] | None = None, *, seed: int = 1, scale: float = 0.02
    ) -> "DeviceWeights":
        info = HeadInfo(kind, exit_layer, "random", "")
        info.check(self.config)
        return self._with(_Dice(head_shapes(info, self.config), self.device, seed, scale), info, draft_ids)

    def _with(self, source: Source, info: HeadInfo, draft_ids: Sequence[int] | None) -> "DeviceWeights":
        loader = _Loader(source, self.format, self.device)
        mlp = info.kind != "adapter"
        count = LAYERS[info.kind]
        layers = tuple(loader.layer(f"layers.{i}.", self.config, i - count, mlp=mlp) for i in range(count))
        heard, norm = None, None
        if info.hears:
            heard = loader.matrix(*(f"feedback.{distance}.weight" for distance in range(1, DISTANCES + 1)))
            norm = loader.plain("feedback.norm.weight")
        norms = loader.plain("norm.weight")
        if draft_ids is not None:
            ids = torch.tensor([*draft_ids, *[NO_ID] * MOST_TEXT_IDS], dtype=torch.int32, device=self.device)
            drafted = self._draft_rows(ids.clamp(min=0))
            return replace(self, head=Head(info, layers, norms, drafted, ids, heard, norm, self._draft_rows))
        lm_head = self.lm_head
        if self.places and self.places[-1] != self.device:  # the exit head drafts on the first device
            shared = self.config.tie_word_embeddings and self.format not in QUANTISED
            lm_head = Weight(self.embedding) if shared else lm_head.to(self.device)
        return replace(self, head=Head(info, layers, norms, lm_head, None, heard, norm))

    def _draft_rows(self, ids: Tensor) -> Weight:
        """Of the LM head, on the device that drafts; int4 where the model is, for drafts are only proposed."""
        if self.format == "int4" and self.config.tie_word_embeddings and self.lm_head.format != "int4":
            return quantise_int4(self.embedding[ids.long()])
        rows = self.lm_head.rows(ids.long().to(self.lm_head.values.device)).to(self.device)
        return quantise_int4(rows.wide()) if self.format == "int4" and rows.format != "int4" else rows

    @property
    def device(self) -> torch.device:
        """That drafts: of the embedding and the exit head."""
        return self.places[0] if self.places else self.embedding.device

    @property
    def hears(self) -> bool:
        """Does the exit head receive the last layer's hidden states?"""
        return self.head is not None and self.head.feedback is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of the KV cache, and of the rows between the kernels of a layer."""
        return self.embedding.dtype

    @property
    def exit_layer(self) -> int:
        """How many layers draft steps run; 0 without a head."""
        return self.head.info.exit_layer if self.head else 0

    @property
    def bytes(self) -> int:
        """What a plain step reads: all matrices once."""
        return sum(layer.bytes for layer in self.layers) + weight_bytes(self.lm_head)

    @property
    def draft_bytes(self) -> int:
        """What a draft step reads."""
        if self.head is None:
            return 0
        layers, heard = chain(self.layers[: self.exit_layer], self.head.layers), self.head.feedback
        of_one = 0 if heard is None else weight_bytes(heard) // DISTANCES
        return sum(layer.bytes for layer in layers) + weight_bytes(self.head.lm_head) + of_one


def check_runs(config: LlamaConfig, format: str) -> None:
    """Raises UsageError for an unknown format, PpsdError for a shape that the kernels do not do."""
    if format not in FORMATS:
        raise UsageError(f"dtype {format!r} is unknown to the cuda backend; dtypes are auto, {', '.join(FORMATS)}")
    reason = refuses(config)
    if reason:
        raise PpsdError(f"the cuda backend cannot run this model: {reason}; use --backend torch")


def weight_bytes(weight: Weight | None) -> int:
    if weight is None:
        return 0
    return weight.values.nbytes + (0 if weight.scales is None else weight.scales.nbytes)


class _Loader:
    """Takes a layer's tensors from a source, by the names of a checkpoint."""

    def __init__(self, source: Source, format: str, device: torch.device | str) -> None:
        self.source, self.format, self.device = source, format, device
        self.four_bits: Collection[str] = getattr(source, "in_four_bits", ())  # matrices that are stored so
        self.dtype = torch.float32 if format == "float32" else torch.bfloat16

    def plain(self, name: str) -> Tensor:
        return self.source(name).to(self.device, self.dtype).contiguous()

    def format_of(self, *names: str, delicate: bool = False) -> str:
        """int4 leaves to int8 what is delicate; or, of a file with four bits of its own, what is stored otherwise."""
        if self.format == "int4" and self.four_bits:
            return "int4" if all(name in self.four_bits for name in names) else "int8"
        return "int8" if self.format == "int4" and delicate else self.format

    def lm_head(self, table: Tensor | None) -> Weight:
        """table: the embedding, where that is the LM head."""
        name = "lm_head.weight" if table is None else "model.embed_tokens.weight"
        format = self.format_of(name, delicate=True)
        if table is None or (self.four_bits and format == "int4"):
            return self.matrix(name, format=format)
        return self.packed(table.to(self.device), format)

    def matrix(self, *names: str, format: str | None = None, importance: Tensor | None = None) -> Weight:
        """The matrices one below the other. importance: of their inputs."""
        format = format or self.format_of(*names)
        ready = getattr(self.source, format, None)
        if ready is not None:
            return _stacked([ready(name).to(self.device) for name in names])
        return _stacked([self.packed(self.plain(name), format, importance) for name in names])

    def packed(self, matrix: Tensor, format: str, importance: Tensor | None = None) -> Weight:
        if format not in QUANTISED:
            return Weight(matrix)
        parts = matrix.split(_ROWS_AT_A_TIME)
        more = () if importance is None else (importance,)
        return _stacked([QUANTISED[format](part, *more) for part in parts])

    def layer(
        self,
        prefix: str,
        config: LlamaConfig,
        number: int,
        *,
        mlp: bool = True,
        importance: npt.NDArray[np.float32] | None = None,
    ) -> Layer:
        """number: of the layer that it attends like; negative ones count from the last one.

        importance: of the inputs of all four matrices, one after the other.
        """
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        of_qkv = of_out = of_gate_up = of_down = None
        if importance is not None:
            sizes = (hidden, width, hidden, config.intermediate_size)
            of_qkv, of_out, of_gate_up, of_down = torch.from_numpy(importance).split(sizes)
        projections = [f"{prefix}self_attn.{name}_proj.weight" for name in "qkv"]
        bias, out_bias, (q, *others) = config.attention_bias, config.attention_output_bias, projections
        of_q, of_others = self.format_of(q), self.format_of(*others, delicate=True)
        apart = of_q == "int4" != of_others
        layer = Layer(
            self.plain(f"{prefix}input_layernorm.weight"),
            self.matrix(*([q] if apart else projections), format=of_q, importance=of_qkv),
            torch.cat([self.plain(name.replace(".weight", ".bias")) for name in projections]) if bias else None,
            self.matrix(f"{prefix}self_attn.o_proj.weight", importance=of_out),
            self.plain(f"{prefix}self_attn.o_proj.bias") if out_bias else None,
            config.attention(number),
            torch.stack([self.plain(f"{prefix}self_attn.{name}_norm.weight") for name in "qk"])
            if config.qk_norm
            else None,
            kv=self.matrix(*others, format=of_others) if apart else None,
        )
        if not mlp:
            return layer
        return replace(
            layer,
            post_norm=self.plain(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self.matrix(f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight", importance=of_gate_up),
            down=self.matrix(f"{prefix}mlp.down_proj.weight", importance=of_down),
        )


def _mapped(tensors: "dict[str, Array] | object") -> Source:
    return lambda name: from_numpy(tensors[name])  # type: ignore[index]


class _FourBits:
    """A checkpoint's tensors; those of its matrices that are of four bits also as they are stored."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.in_four_bits = checkpoint, checkpoint.in_four_bits
        self.tensor = _mapped(checkpoint.tensors)

    def __call__(self, name: str) -> Tensor:
        return self.tensor(name)

    def int4(self, name: str) -> Weight:
        """Raises PpsdError for one that is not finite."""
        with one_line(f"pack {name} of {self.checkpoint.folder} as int4", 1):
            codes, scale, minimum = map(torch.from_numpy, four_bits(self.checkpoint, name).four_bits())
        halves = (line.view(torch.float16) for line in (scale, minimum))
        return Weight(*of_codes(codes.to(torch.int32), *halves), codes.shape[1])


def _stacked(parts: Sequence[Weight]) -> Weight:
    if len(parts) == 1:
        return parts[0]
    scales = [part.scales for part in parts if part.scales is not None]
    return parts[0]._replace(
        values=torch.cat([part.values for part in parts]), scales=torch.cat(scales) if scales else None
    )


class _Dice:
    """Random tensors of given shapes: norms near 1, all else normal with a standard deviation of `scale`."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device | str, seed: int, scale: float) -> None:
        self.shapes, self.device, self.scale = shapes, device, scale
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        if len(shape) == 2 and torch.device(self.device).type == "cuda":
            made = torch.empty(shape, dtype=torch.bfloat16, device=self.device)  # half the memory while it is made
            return made.normal_(0.0, self.scale, generator=self.generator)
        noise = torch.randn(shape, generator=self.generator, device=self.device)
        return 1 + 0.1 * noise if "norm" in name else self.scale * noise

    def int8(self, name: str) -> Weight:
        outputs, inputs = self.shapes[name]
        values = torch.empty(outputs, inputs, dtype=torch.int8, device=self.device)
        values.random_(-127, 128, generator=self.generator)
        # A uniform number from -127 to 127 has a standard deviation of 73.6.
        scales = torch.full((outputs, inputs // INT8_BLOCK), self.scale / 73.6, dtype=torch.float16, device=self.device)
        return Weight(values, scales)

    def int4(self, name: str) -> Weight:
        outputs, inputs = self.shapes[name]
        groups = -(-inputs // GROUP)
        words = torch.empty(outputs, groups * GROUP // 8, dtype=torch.int32, device=self.device)
        words.random_(-(2**31), 2**31, generator=self.generator)
        scales = torch.zeros(outputs, groups * 4, 2, dtype=torch.float16, device=self.device)
        # Codes from 0 to 15 have a standard deviation of 4.6 around 7.5.
        scales[:, : inputs // 32] = self.scale / 4.6 * torch.tensor([1, 7.5], dtype=torch.float16, device=self.device)
        return Weight(words, scales.flatten(1).view(torch.int32), inputs)
