"""GGUF in, a Hugging Face model folder out: `config.json`, the tokenizer, and the weights as safetensors.

The arithmetic of the quantised blocks is the `gguf` package's. What the fields mean follows llama.cpp: its converter
(`conversion/llama.py`: names, rope order, rope factors) and its loader (`src/models/llama.cpp`).
"""

import json
import math
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from ..errors import PpsdError, UsageError
from .config import LlamaConfig
from .gguf_file import GgufFile, GgufTensor, read_gguf
from .gguf_tokenizer import Tokens, build_tokenizer, generation_config, read_tokens, tokenizer_config

# Whoever changes what a converted folder holds raises cache.CONVERTER_VERSION.

Progress = Callable[[int, int], None]

# dtype -> (bytes each, name in safetensors, largest finite value)
_DTYPES = {
    "float32": (4, "F32", 3.4028234663852886e38),
    "float16": (2, "F16", 65504.0),
    "bfloat16": (2, "BF16", 3.3895313892515355e38),
}
_ANOTHER_PLACE = "make room or choose another place (PPSD_CACHE is the cache's)"
_SHARD_BYTES = 5_000_000_000
_BLOCK_BYTES = 16 << 20  # of float32, held at a time


def convert_gguf(source: Path, target: Path, *, dtype: str = "float32", progress: Progress | None = None) -> None:
    """Write the model in `source` (.gguf) as the folder `target`, which must not exist or be empty.

    The weights are dequantised to `dtype` (float32, float16 or bfloat16, rounded to nearest even) a block of rows at a
    time; `progress(done, total)` is told the bytes written. The folder appears whole or not at all, and the same input
    gives the same bytes. Raises PpsdError, one line that names the file and what is wrong with it: damaged, of an
    architecture, a tensor type or a tokenizer that is not supported, holding what `dtype` cannot, or a full disk.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; supported are {', '.join(_DTYPES)}")
    try:
        _refuse_occupied(target)
        gguf = read_gguf(source)
        shape = _read_shape(gguf)
        weights = _plan_weights(gguf, shape)
        tokens = read_tokens(gguf, shape.vocabulary)
        LlamaConfig.from_dict(_config(shape, tokens, dtype), str(source))  # says what is out of range
        tokenizer = build_tokenizer(gguf, tokens)
        _refuse_full_disk(target, weights, dtype)

        # A sibling, so that the rename at the end stays on one file system.
        staging = target.absolute().with_name(f".{target.absolute().name}.{secrets.token_hex(4)}.tmp")
        try:
            staging.mkdir(parents=True)
            _write_json(staging / "config.json", _config(shape, tokens, dtype))
            _write_json(staging / "generation_config.json", generation_config(tokens))
            (staging / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
            _write_json(staging / "tokenizer_config.json", tokenizer_config(gguf, shape.context, tokens))
            _write_weights(gguf, weights, staging, dtype, progress)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        what = f"cannot convert {source} to {target}: {error.strerror or error} ({error.filename or target})"
        raise PpsdError(f"{what}; {_ANOTHER_PLACE}") from None


def _refuse_occupied(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PpsdError(f"{target} already exists and is not an empty folder: remove it or name another")


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# llama.cpp rotates neighbours for these, and halves, as Hugging Face does, for the others.
_INTERLEAVED = ("llama", "smollm3")

# GGUF name -> (Hugging Face name, shape in the words of `_Shape.sizes`)
_LAYER = {
    "attn_norm.weight": ("input_layernorm.weight", "hidden"),
    "attn_q.weight": ("self_attn.q_proj.weight", "query hidden"),
    "attn_k.weight": ("self_attn.k_proj.weight", "key hidden"),
    "attn_v.weight": ("self_attn.v_proj.weight", "key hidden"),
    "attn_output.weight": ("self_attn.o_proj.weight", "hidden query"),
    "ffn_norm.weight": ("post_attention_layernorm.weight", "hidden"),
    "ffn_gate.weight": ("mlp.gate_proj.weight", "inner hidden"),
    "ffn_up.weight": ("mlp.up_proj.weight", "inner hidden"),
    "ffn_down.weight": ("mlp.down_proj.weight", "hidden inner"),
}
_QKV_BIAS = {
    "attn_q.bias": ("self_attn.q_proj.bias", "query"),
    "attn_k.bias": ("self_attn.k_proj.bias", "key"),
    "attn_v.bias": ("self_attn.v_proj.bias", "key"),
}
_HEAD_NORMS = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "head"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "head"),
}
_OUTPUT_BIAS = {"attn_output.bias": ("self_attn.o_proj.bias", "hidden")}

# (key, values that change nothing, what any other is)
_NEUTRAL: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("{arch}.expert_count", (0,), "is a mixture of experts"),
    ("{arch}.attention.causal", (True,), "is attention in both directions"),
    ("{arch}.attention.sliding_window", (0,), "is sliding-window attention"),
    ("{arch}.attention.scale", (0.0,), "is another attention scale"),
    ("{arch}.rope.scaling.attn_factor", (0.0, 1.0), "is a rope attention factor"),
)

# The published settings: Llama 3.1 (8B to 405B, and 3.3) and Llama 3.2 (1B, 3B).
_LLAMA3_ROPE = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)


@dataclass(frozen=True)
class _Shape:
    """Everything of `config.json` but the token ids."""

    architecture: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied: bool
    bias: bool

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "hidden": self.hidden,
            "inner": self.inner,
            "query": self.heads * self.head_dim,
            "key": self.kv_heads * self.head_dim,
            "head": self.head_dim,
            "vocabulary": self.vocabulary,
        }


@dataclass(frozen=True)
class _Weight:
    """A tensor on its way: `head_dim` > 0 says that its rows come back from GGUF's interleaved rope order."""

    tensor: GgufTensor
    key: str
    head_dim: int


def _read_shape(gguf: GgufFile) -> _Shape:
    """Raises PpsdError for what the runtime cannot compute: another architecture, experts, partial rotary, ..."""
    if gguf.scalar("split.count", 1) not in (0, 1):
        raise gguf.bad("this is one part of a split model; join the parts first (llama-gguf-split --merge)")
    arch = gguf.text("general.architecture")
    if arch not in _ARCHITECTURES:
        raise gguf.bad(f"the architecture {arch!r} is not supported; supported are {', '.join(_ARCHITECTURES)}")
    for pattern, neutral, what in _NEUTRAL:
        key = pattern.format(arch=arch)
        value = gguf.scalar(key, neutral[0])
        if value not in neutral:
            raise gguf.bad(f"{key} = {value} {what}, which is not supported")

    heads = gguf.integer(f"{arch}.attention.head_count")
    kv_heads = gguf.integer(f"{arch}.attention.head_count_kv", heads)
    if heads % kv_heads:
        raise gguf.bad(f"{heads} attention heads cannot share {kv_heads} key/value heads")
    head_dim = _read_head_dim(gguf, arch, heads)
    theta = gguf.number(f"{arch}.rope.freq_base", 10000.0)
    return _Shape(
        architecture=arch,
        layers=gguf.integer(f"{arch}.block_count"),
        hidden=gguf.integer(f"{arch}.embedding_length"),
        inner=gguf.integer(f"{arch}.feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=_tensor(gguf, "token_embd.weight").shape[0],
        context=gguf.integer(f"{arch}.context_length"),
        norm_eps=gguf.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=theta,
        rope_scaling=_read_rope_scaling(gguf, arch, head_dim, theta),
        tied="output.weight" not in gguf.tensors,
        bias="blk.0.attn_q.bias" in gguf.tensors,
    )


def _read_head_dim(gguf: GgufFile, arch: str, heads: int) -> int:
    """The width of a head: as stated, else as the query matrix has it. Rotary embedding must cover all of it."""
    rows = _tensor(gguf, "blk.0.attn_q.weight").shape[0]
    head_dim = gguf.integer(f"{arch}.attention.key_length", max(rows // heads, 1))
    if head_dim % 2:
        raise gguf.bad(f"the head width {head_dim} is odd; rotary embedding needs pairs")
    if gguf.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise gguf.bad(f"{arch}.attention.value_length differs from the key length {head_dim}: not supported")
    rotary = gguf.integer(f"{arch}.rope.dimension_count", head_dim)
    if rotary != head_dim:
        raise gguf.bad(f"rotary embedding of {rotary} of {head_dim} dimensions (partial rotary) is not supported")
    return head_dim


def _read_rope_scaling(gguf: GgufFile, arch: str, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = gguf.text(f"{arch}.rope.scaling.type", "none")
    old_linear = gguf.number(f"{arch}.rope.scale_linear", 1.0)
    factor = gguf.number(f"{arch}.rope.scaling.factor", old_linear)
    if kind not in ("none", "linear"):
        raise gguf.bad(f"rope scaling of type {kind!r} is not supported; supported are linear and llama3")
    # A factor without a type means linear, as in llama.cpp.
    linear = factor != 1.0 and (kind == "linear" or f"{arch}.rope.scaling.type" not in gguf.values)
    if "rope_freqs.weight" not in gguf.tensors:
        return {"rope_type": "linear", "factor": factor} if linear else None
    if linear:
        raise gguf.bad("linear rope scaling together with rope_freqs.weight is not supported")
    return _read_llama3_scaling(gguf, head_dim, theta)


def _read_llama3_scaling(gguf: GgufFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The setting whose factors the file holds: GGUF stores what the formula gave, not the formula."""
    tensor = gguf.tensors["rope_freqs.weight"]
    if tensor.shape != (head_dim // 2,):
        raise gguf.bad(f"rope_freqs.weight has shape {tensor.shape}, expected {(head_dim // 2,)}")
    with gguf.path.open("rb") as file:
        found = _read_rows(gguf, file, tensor, 0, 1)[0]  # [head_dim / 2]
    for setting in _LLAMA3_ROPE:
        if np.allclose(found, _llama3_factors(head_dim, theta, setting), rtol=1e-3, atol=0.0):
            return setting
    raise gguf.bad("rope_freqs.weight is neither Llama 3.1's nor Llama 3.2's rope scaling: not supported")


def _llama3_factors(head_dim: int, theta: float, setting: dict[str, Any]) -> NDArray[np.float64]:
    """What each rotary frequency is divided by: [head_dim / 2]. Source: `generate_extra_tensors` of the converter."""
    low, high = setting["low_freq_factor"], setting["high_freq_factor"]
    frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    turns = setting["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / setting["factor"] + smooth)


def _tensor(gguf: GgufFile, name: str) -> GgufTensor:
    if name not in gguf.tensors:
        raise gguf.bad(f"the tensor {name!r} is missing")
    return gguf.tensors[name]


def _plan_weights(gguf: GgufFile, shape: _Shape) -> list[_Weight]:
    """All tensors under their Hugging Face names, in the model's order; none missing, none left over."""
    if shape.layers * len(_LAYER) > len(gguf.tensors):
        raise gguf.bad(f"{shape.layers} layers are announced, but there are only {len(gguf.tensors)} tensors")
    names = {"token_embd.weight": ("model.embed_tokens.weight", "vocabulary hidden")}
    for layer in range(shape.layers):
        for name, (key, dimensions) in _layer_tensors(shape).items():
            names[f"blk.{layer}.{name}"] = (f"model.layers.{layer}.{key}", dimensions)
    names["output_norm.weight"] = ("model.norm.weight", "hidden")
    if not shape.tied:
        names["output.weight"] = ("lm_head.weight", "vocabulary hidden")

    for name in gguf.tensors:
        if name not in names and name != "rope_freqs.weight":
            raise gguf.bad(f"the tensor {name!r} is not part of the {shape.architecture} models that are supported")
    return [_plan_weight(gguf, shape, name, key, dimensions) for name, (key, dimensions) in names.items()]


def _layer_tensors(shape: _Shape) -> dict[str, tuple[str, str]]:
    if shape.architecture == "qwen2":
        return {**_LAYER, **_QKV_BIAS}
    if shape.architecture == "qwen3":
        return {**_LAYER, **_HEAD_NORMS}
    return {**_LAYER, **_QKV_BIAS, **_OUTPUT_BIAS} if shape.bias else _LAYER


def _plan_weight(gguf: GgufFile, shape: _Shape, name: str, key: str, dimensions: str) -> _Weight:
    tensor = _tensor(gguf, name)
    expected = tuple(shape.sizes[word] for word in dimensions.split())
    if tensor.shape != expected:
        raise gguf.bad(f"the tensor {name!r} has shape {tensor.shape}, expected {expected}")
    interleaved = shape.architecture in _INTERLEAVED and ("q_proj" in key or "k_proj" in key)
    return _Weight(tensor, key, shape.head_dim if interleaved else 0)


def _refuse_full_disk(target: Path, weights: list[_Weight], dtype: str) -> None:
    needed = sum(_bytes_of(weight, dtype) for weight in weights)
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PpsdError(
            f"{target} needs {needed / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free; {_ANOTHER_PLACE}"
        )


def _config(shape: _Shape, tokens: Tokens, dtype: str) -> dict[str, Any]:
    config = {
        "architectures": [_ARCHITECTURES[shape.architecture]],
        "model_type": shape.architecture,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": shape.rope_scaling,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": dtype,
        **generation_config(tokens),
    }
    if shape.architecture == "llama":
        return {**config, "attention_bias": shape.bias, "mlp_bias": False}
    if shape.architecture == "smollm3":  # llama.cpp has the interval in its code, the file does not say it
        return {**config, "attention_bias": shape.bias, "mlp_bias": False, "no_rope_layer_interval": 4}
    if shape.architecture == "qwen3":
        return {**config, "attention_bias": False, "use_sliding_window": False}
    return {**config, "use_sliding_window": False}


def _write_weights(gguf: GgufFile, weights: list[_Weight], folder: Path, dtype: str, progress: Progress | None) -> None:
    """One `model.safetensors`, or shards and their index: never more than a block of one tensor in memory."""
    total = sum(_bytes_of(weight, dtype) for weight in weights)
    shards = _split_into_shards(weights, dtype)
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {weight.key: name for weight in shard}
        with gguf.path.open("rb") as source, (folder / name).open("wb") as file:
            file.write(_safetensors_header(shard, dtype))
            for weight in shard:
                for values in _blocks(gguf, source, weight):
                    done += file.write(_encode(gguf, weight, values, dtype))
                    if progress is not None:
                        progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _split_into_shards(weights: list[_Weight], dtype: str) -> list[list[_Weight]]:
    shards: list[list[_Weight]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + _bytes_of(weight, dtype) > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += _bytes_of(weight, dtype)
    return shards


def _bytes_of(weight: _Weight, dtype: str) -> int:
    return math.prod(weight.tensor.shape) * _DTYPES[dtype][0]


def _safetensors_header(weights: list[_Weight], dtype: str) -> bytes:
    """Length and JSON table, padded so that the data begins at a multiple of 8 bytes."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for weight in weights:
        start, end = end, end + _bytes_of(weight, dtype)
        table[weight.key] = {
            "dtype": _DTYPES[dtype][1],
            "shape": list(weight.tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _blocks(gguf: GgufFile, file: BinaryIO, weight: _Weight) -> Iterator[NDArray[np.float32]]:
    """The tensor as float32, in Hugging Face's row order, some whole rows (or, with rope, heads) at a time."""
    tensor = weight.tensor
    fitting = max(1, _BLOCK_BYTES // (4 * tensor.shape[-1]))
    step = fitting + -fitting % (weight.head_dim or 1)
    for start in range(0, tensor.rows, step):
        values = _read_rows(gguf, file, tensor, start, min(step, tensor.rows - start))  # [rows, columns]
        if weight.head_dim:
            columns = tensor.shape[1] if len(tensor.shape) == 2 else 1  # a bias has one value for each row
            heads = values.reshape(-1, weight.head_dim // 2, 2, columns)  # pairs are neighbours in GGUF
            values = heads.swapaxes(1, 2).reshape(values.shape)  # pairs are head_dim / 2 apart
        yield values


def _read_rows(gguf: GgufFile, file: BinaryIO, tensor: GgufTensor, start: int, count: int) -> NDArray[np.float32]:
    """Rows [start, start + count) of a tensor, dequantised: [count, columns]; a vector is one row."""
    file.seek(tensor.start + start * tensor.row_bytes)
    data = file.read(count * tensor.row_bytes)
    if len(data) != count * tensor.row_bytes:
        raise gguf.bad(f"the data of the tensor {tensor.name!r} ends early: the file changed while it was read")
    blocks = np.frombuffer(data, np.uint8).reshape(count, -1)
    with np.errstate(all="ignore"):  # a damaged scale is NaN or infinite: `_encode` says so by name
        return dequantize(blocks, tensor.kind).reshape(count, tensor.shape[-1])


def _encode(gguf: GgufFile, weight: _Weight, values: NDArray[np.float32], dtype: str) -> bytes:
    largest = max(float(values.max()), -float(values.min()))
    if not math.isfinite(largest):
        raise gguf.bad(f"the tensor {weight.tensor.name!r} holds NaN or infinite values: the file is damaged")
    if largest > _DTYPES[dtype][2]:
        raise gguf.bad(f"the tensor {weight.tensor.name!r} holds {largest:g}, too large for {dtype}; use float32")
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2").tobytes()  # to nearest, ties to even


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
