"""GGUF in, a Hugging Face model folder out: `config.json`, the tokenizer, and the weights as safetensors.

The file is read by a small parser of our own: every count and offset is checked against the file's size before it is
used, so a damaged file costs neither memory nor time. Only the arithmetic of the quantised blocks is the `gguf`
package's. What the fields mean follows llama.cpp: its converter (`conversion/llama.py`: names, rope order, rope
factors), its loader (`src/models/llama.cpp`) and its vocabulary (`src/llama-vocab.cpp`: types, defaults, regexes).
"""

import json
import math
import mmap
import secrets
import shutil
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import PpsdError, UsageError

# To be raised whenever the converted folder changes: cached folders of another version are built again.
CONVERTER_VERSION = 1

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

_Kind = GGMLQuantizationType
_KINDS = {
    *(_Kind.F32, _Kind.F16, _Kind.BF16),
    *(_Kind.Q4_0, _Kind.Q4_1, _Kind.Q5_0, _Kind.Q5_1, _Kind.Q8_0),
    *(_Kind.Q2_K, _Kind.Q3_K, _Kind.Q4_K, _Kind.Q5_K, _Kind.Q6_K),
}


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
        gguf = _read_gguf(source)
        shape = _read_shape(gguf)
        weights = _plan_weights(gguf, shape)
        tokens = _read_tokens(gguf, shape)
        tokenizer = _build_tokenizer(gguf, tokens)
        _refuse_full_disk(target, weights, dtype)

        # A sibling, so that the rename at the end stays on one file system.
        staging = target.absolute().with_name(f".{target.absolute().name}.{secrets.token_hex(4)}.tmp")
        try:
            staging.mkdir(parents=True)
            _write_json(staging / "config.json", _config(shape, tokens, dtype))
            _write_json(staging / "generation_config.json", _generation_config(tokens))
            (staging / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
            _write_json(staging / "tokenizer_config.json", _tokenizer_config(gguf, shape, tokens))
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


# ---------------------------------------------------------------------------------------------------------------------
# The file: header, metadata, tensor table
# ---------------------------------------------------------------------------------------------------------------------

# By GGUF's number of the type, as numpy writes it; 8 and 9 are strings and arrays.
_SCALARS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
_STRING, _ARRAY = 8, 9

# Beyond what any published file has, and little enough that a damaged count costs seconds at most.
_MOST_KEYS, _MOST_TENSORS, _MOST_STRINGS = 1 << 16, 1 << 16, 1 << 22


@dataclass(frozen=True)
class _Tensor:
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first, as in Hugging Face: (out, in) or (n,)
    start: int  # of its data, from the start of the file

    @property
    def row_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * size

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class _Gguf:
    """A parsed file: its metadata and where its tensors lie."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, _Tensor]

    def bad(self, problem: str) -> PpsdError:
        return PpsdError(f"{self.path}: {problem}")

    def _value(self, key: str, kinds: tuple[type, ...], default: Any) -> Any:
        value = self.values.get(key, default)
        if value is None:
            raise self.bad(f"the metadata lacks {key}; convert the model again with a current llama.cpp")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.bad(f"the metadata {key} is of the wrong type ({type(value).__name__})")
        return value

    def scalar(self, key: str, default: Any) -> Any:
        return self._value(key, (int, float, bool), default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, (int,), default)
        if not 1 <= value < 2**31:
            raise self.bad(f"the metadata {key} = {value} is out of range")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, as the shortest decimal that rounds to the same float32: 1e-05, not 9.99999974e-06."""
        value = self._value(key, (int, float), default)
        if not 0 < value <= _DTYPES["float32"][2]:
            raise self.bad(f"the metadata {key} = {value} is not a positive number")
        return float(str(np.float32(value)))

    def text(self, key: str, default: str | None = None) -> str:
        return self._value(key, (str,), default)

    def flag(self, key: str, default: bool) -> bool:
        return self._value(key, (bool,), default)

    def strings(self, key: str) -> list[str]:
        return self._value(key, (list,), None)

    def numbers(self, key: str, count: int) -> NDArray[Any]:
        """One finite number for each of `count` tokens."""
        value = self._value(key, (np.ndarray,), None)
        if len(value) != count:
            raise self.bad(f"{key} has {len(value)} entries for {count} tokens")
        if not np.isfinite(value).all():
            raise self.bad(f"{key} holds NaN or infinite values: the file is damaged; fetch it again")
        return value

    def token_id(self, key: str, vocabulary: int) -> int | None:
        if key not in self.values:
            return None
        value = self._value(key, (int,), None)
        if not 0 <= value < vocabulary:
            raise self.bad(f"the metadata {key} = {value} is outside the vocabulary of {vocabulary}")
        return value


class _Cursor:
    """Little-endian values off a buffer; whatever points past its end is refused before it is read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def bad(self, problem: str) -> PpsdError:
        return PpsdError(f"{self.path}: {problem}: the file is truncated or damaged; fetch it again")

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise self.bad("the file ends inside its metadata")
        self.at += count
        return self.data[self.at - count : self.at]

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def count(self, smallest: int, most: int | None = None) -> int:
        """How many items follow, each of at least `smallest` bytes."""
        count = self.u64()
        if count * smallest > len(self.data) - self.at or (most is not None and count > most):
            raise self.bad(f"the metadata announces {count} items")
        return count

    def text(self) -> str:
        try:
            return self.take(self.u64()).decode("utf-8")
        except UnicodeDecodeError:
            raise self.bad("the metadata holds text that is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """A scalar as a Python value, an array of strings as a list, an array of numbers as a numpy array."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array(self.u32())
        return self._numbers(kind, 1)[0].item()

    def _array(self, kind: int) -> Any:
        if kind == _STRING:
            return [self.text() for _ in range(self.count(8, _MOST_STRINGS))]
        return self._numbers(kind, self.count(1))

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        if kind >= len(_SCALARS) or _SCALARS[kind] is None:
            raise self.bad(f"the metadata holds a value of the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def _read_gguf(path: Path) -> _Gguf:
    """Metadata and tensor table; the tensors' data is only located. Raises PpsdError, or OSError from the system."""
    if not path.is_file():
        raise PpsdError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise PpsdError(f"{path} is not a GGUF file: it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(_Cursor(data, path))


def _parse(cursor: _Cursor) -> _Gguf:
    cursor.take(4)
    version = cursor.u32()
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "is big-endian" if swapped in (2, 3) else f"has GGUF version {version}"
        raise PpsdError(f"{cursor.path} {what}; supported are the versions 2 and 3, little-endian")
    # The least that a table entry takes: name length, dimension count, one dimension, type, offset.
    tensor_count = cursor.count(32, _MOST_TENSORS)
    values = _read_values(cursor, cursor.count(13, _MOST_KEYS))
    tensors = _read_tensor_table(cursor, tensor_count, values.get("general.alignment", 32))
    return _Gguf(cursor.path, values, tensors)


def _read_values(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        if key in values:
            raise cursor.bad(f"the metadata gives {key!r} twice")
        values[key] = cursor.value(cursor.u32())
    return values


def _read_tensor_table(cursor: _Cursor, count: int, alignment: Any) -> dict[str, _Tensor]:
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.bad(f"general.alignment is {alignment!r}, not a power of two")
    entries = [_read_tensor_entry(cursor) for _ in range(count)]

    data = cursor.at + -cursor.at % alignment
    expected = 0  # llama.cpp, too, accepts only tensors that follow each other without a gap
    tensors: dict[str, _Tensor] = {}
    for tensor in entries:
        if tensor.name in tensors:
            raise cursor.bad(f"the tensor {tensor.name!r} is there twice")
        if tensor.start != expected:
            raise cursor.bad(f"the tensor {tensor.name!r} lies at {tensor.start}, expected at {expected}")
        size = tensor.rows * tensor.row_bytes
        if data + expected + size > len(cursor.data):
            raise cursor.bad(f"the data of the tensor {tensor.name!r} runs past the end of the file")
        tensors[tensor.name] = _Tensor(tensor.name, tensor.kind, tensor.shape, data + expected)
        expected += size + -size % alignment
    return tensors


def _read_tensor_entry(cursor: _Cursor) -> _Tensor:
    """One line of the table; its `start` still counts from where the tensors' data begins."""
    name = cursor.text()
    dimensions = cursor.u32()
    if not 1 <= dimensions <= 4:
        raise cursor.bad(f"the tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))))
    number = cursor.u32()
    if number not in _KINDS:
        found = next((known.name for known in GGMLQuantizationType if known == number), str(number))
        supported = ", ".join(sorted(known.name for known in _KINDS))
        raise PpsdError(f"{cursor.path}: the tensor {name!r} has type {found}; supported are {supported}")
    kind = GGMLQuantizationType(number)
    if min(shape) < 1 or shape[-1] % GGML_QUANT_SIZES[kind][0]:
        raise cursor.bad(f"the tensor {name!r} has shape {shape}, which {kind.name} does not allow")
    return _Tensor(name, kind, shape, cursor.u64())


# ---------------------------------------------------------------------------------------------------------------------
# The model's shape and its weights
# ---------------------------------------------------------------------------------------------------------------------

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}

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
            "vocabulary": self.vocabulary,
        }


@dataclass(frozen=True)
class _Weight:
    """A tensor on its way: `head_dim` > 0 says that its rows come back from GGUF's interleaved rope order."""

    tensor: _Tensor
    key: str
    head_dim: int


def _read_shape(gguf: _Gguf) -> _Shape:
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


def _read_head_dim(gguf: _Gguf, arch: str, heads: int) -> int:
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


def _read_rope_scaling(gguf: _Gguf, arch: str, head_dim: int, theta: float) -> dict[str, Any] | None:
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


def _read_llama3_scaling(gguf: _Gguf, head_dim: int, theta: float) -> dict[str, Any]:
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


def _tensor(gguf: _Gguf, name: str) -> _Tensor:
    if name not in gguf.tensors:
        raise gguf.bad(f"the tensor {name!r} is missing")
    return gguf.tensors[name]


def _plan_weights(gguf: _Gguf, shape: _Shape) -> list[_Weight]:
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
    return {**_LAYER, **_QKV_BIAS, **_OUTPUT_BIAS} if shape.bias else _LAYER


def _plan_weight(gguf: _Gguf, shape: _Shape, name: str, key: str, dimensions: str) -> _Weight:
    tensor = _tensor(gguf, name)
    expected = tuple(shape.sizes[word] for word in dimensions.split())
    if tensor.shape != expected:
        raise gguf.bad(f"the tensor {name!r} has shape {tensor.shape}, expected {expected}")
    # llama.cpp rotates neighbours for `llama` and halves, as Hugging Face does, for `qwen2`.
    interleaved = shape.architecture == "llama" and ("q_proj" in key or "k_proj" in key)
    return _Weight(tensor, key, shape.head_dim if interleaved else 0)


def _refuse_full_disk(target: Path, weights: list[_Weight], dtype: str) -> None:
    needed = sum(_bytes_of(weight, dtype) for weight in weights)
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PpsdError(
            f"{target} needs {needed / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free; {_ANOTHER_PLACE}"
        )


def _config(shape: _Shape, tokens: "_Tokens", dtype: str) -> dict[str, Any]:
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
        **_generation_config(tokens),
    }
    if shape.architecture == "llama":
        return {**config, "attention_bias": shape.bias, "mlp_bias": False}
    return {**config, "use_sliding_window": False}


def _write_weights(gguf: _Gguf, weights: list[_Weight], folder: Path, dtype: str, progress: Progress | None) -> None:
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


def _blocks(gguf: _Gguf, file: BinaryIO, weight: _Weight) -> Iterator[NDArray[np.float32]]:
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


def _read_rows(gguf: _Gguf, file: BinaryIO, tensor: _Tensor, start: int, count: int) -> NDArray[np.float32]:
    """Rows [start, start + count) of a tensor, dequantised: [count, columns]; a vector is one row."""
    file.seek(tensor.start + start * tensor.row_bytes)
    data = file.read(count * tensor.row_bytes)
    if len(data) != count * tensor.row_bytes:
        raise gguf.bad(f"the data of the tensor {tensor.name!r} ends early: the file changed while it was read")
    blocks = np.frombuffer(data, np.uint8).reshape(count, -1)
    with np.errstate(all="ignore"):  # a damaged scale is NaN or infinite: `_encode` says so by name
        return dequantize(blocks, tensor.kind).reshape(count, tensor.shape[-1])


def _encode(gguf: _Gguf, weight: _Weight, values: NDArray[np.float32], dtype: str) -> bytes:
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


# ---------------------------------------------------------------------------------------------------------------------
# The tokenizer
# ---------------------------------------------------------------------------------------------------------------------

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


@dataclass(frozen=True)
class _Tokens:
    """The vocabulary in id order, and the ids with a role."""

    texts: list[str]
    types: list[int]
    bos: int | None
    eos: list[int]
    unknown: int | None
    padding: int | None
    add_bos: bool
    add_eos: bool

    def text_of(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.texts[token_id]


def _read_tokens(gguf: _Gguf, shape: _Shape) -> _Tokens:
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(gguf.strings("tokenizer.ggml.tokens"))]
    if len(texts) != shape.vocabulary:
        raise gguf.bad(f"there are {len(texts)} tokens, but the embedding has {shape.vocabulary} rows")
    if len(set(texts)) != len(texts):
        (twice, _), *_ = Counter(texts).most_common(1)
        raise gguf.bad(f"the token {twice!r} is in the vocabulary twice")

    ids = {
        name: gguf.token_id(f"tokenizer.ggml.{name}_token_id", len(texts))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    if ids["eos"] is None:
        raise gguf.bad("the metadata lacks tokenizer.ggml.eos_token_id: the text would have no end")
    ends = [token for name in ("eos", "eot", "eom") if (token := ids[name]) is not None]
    add_bos = gguf.flag("tokenizer.ggml.add_bos_token", _adds_bos_by_default(gguf))
    if add_bos and ids["bos"] is None:
        raise gguf.bad("texts are to begin with a BOS token, but the metadata lacks tokenizer.ggml.bos_token_id")
    return _Tokens(
        texts=texts,
        types=gguf.numbers("tokenizer.ggml.token_type", len(texts)).tolist(),
        bos=ids["bos"],
        eos=list(dict.fromkeys(ends)),
        unknown=ids["unknown"],
        padding=ids["padding"],
        add_bos=add_bos,
        add_eos=gguf.flag("tokenizer.ggml.add_eos_token", False),
    )


def _adds_bos_by_default(gguf: _Gguf) -> bool:
    """What llama.cpp does where the file does not say."""
    if gguf.text("tokenizer.ggml.model") == "llama":
        return True
    return gguf.text("tokenizer.ggml.pre") in _LLAMA3_NAMES


def _build_tokenizer(gguf: _Gguf, tokens: _Tokens) -> Tokenizer:
    """A tokenizer that gives the same ids as the one the model was trained with."""
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    model = gguf.text("tokenizer.ggml.model")
    if model not in builders:
        raise gguf.bad(f"the tokenizer model {model!r} is not supported; supported are {', '.join(builders)}")
    try:
        tokenizer = builders[model](gguf, tokens)
        _add_special_tokens(tokenizer, tokens)
        tokenizer.post_processor = _post_processor(tokens)
    except PpsdError:
        raise
    except Exception as error:  # whatever the tokenizers package raises for tables that do not fit together
        reason = " ".join(str(error).split())
        raise gguf.bad(f"the tokenizer's tables do not fit together ({reason}): the file is damaged") from None
    return tokenizer


def _byte_level_bpe(gguf: _Gguf, tokens: _Tokens) -> Tokenizer:
    name = gguf.text("tokenizer.ggml.pre")
    vocabulary = {text: i for i, text in enumerate(tokens.texts)}
    # Llama 3 takes a word that is a token whole, even where no chain of merges leads to it.
    whole_words = name in _LLAMA3_NAMES
    tokenizer = Tokenizer(models.BPE(vocabulary, _read_merges(gguf), ignore_merges=whole_words))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(gguf, name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(gguf: _Gguf, name: str) -> pre_tokenizers.PreTokenizer:
    """How the text is cut into words before merging, by llama.cpp's name for it."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps: list[pre_tokenizers.PreTokenizer]
    if name == "gpt-2":
        steps = [words]
    elif name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), words]
    elif name == "qwen2":
        steps = [_split(_QWEN2_SPLIT), letters]
    elif name in _LLAMA3_NAMES:
        steps = [_split(_LLAMA3_SPLIT), letters]
    elif name == "default":
        # What llama.cpp falls back to, and so what these files have always been run with.
        splits = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]")
        steps = [*map(_split, splits), letters]
    else:
        known = ", ".join(("smollm", *_LLAMA3_NAMES, "qwen2", "gpt-2", "default"))
        raise gguf.bad(f"the pre-tokenizer {name!r} is not supported; supported are {known}")
    return pre_tokenizers.Sequence(steps)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)


def _read_merges(gguf: _Gguf) -> list[tuple[str, str]]:
    merges = []
    for merge in gguf.strings("tokenizer.ggml.merges"):
        cut = merge.find(" ", 1)
        if cut < 1 or cut + 1 == len(merge):
            raise gguf.bad(f"the merge {merge!r} does not name two tokens: the file is damaged")
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _sentencepiece_bpe(gguf: _Gguf, tokens: _Tokens) -> Tokenizer:
    vocabulary = {text: i for i, text in enumerate(tokens.texts)}
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if missing:
        raise gguf.bad(f"the vocabulary lacks the byte token <0x{missing[0]:02X}>: byte fallback needs all 256")
    merges = _read_merges(gguf) if "tokenizer.ggml.merges" in gguf.values else _merges_by_score(gguf, tokens)
    model = models.BPE(vocabulary, merges, unk_token=tokens.text_of(tokens.unknown), fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)

    # Prepended to every stretch of text between special tokens, as sentencepiece and llama.cpp do.
    prefix = gguf.flag("tokenizer.ggml.add_space_prefix", True)
    escape = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape]) if prefix else escape
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(gguf: _Gguf, tokens: _Tokens) -> list[tuple[str, str]]:
    """The merges that sentencepiece makes: it joins the neighbours whose union has the best score."""
    scores = gguf.numbers("tokenizer.ggml.scores", len(tokens.texts)).tolist()
    mergeable = {
        text: score
        for text, kind, score in zip(tokens.texts, tokens.types, scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    if len(mergeable) > 1 and len(set(mergeable.values())) == 1:
        raise gguf.bad(
            "all tokens have the same score, so their merges cannot be told; use the original model folder instead"
        )
    found = [
        (text[:cut], text[cut:])
        for text in mergeable
        for cut in range(1, len(text))
        if text[:cut] in mergeable and text[cut:] in mergeable
    ]
    return sorted(found, key=lambda pair: -mergeable[pair[0] + pair[1]])


def _add_special_tokens(tokenizer: Tokenizer, tokens: _Tokens) -> None:
    """Control tokens are recognised in text and hidden when decoding; user-defined ones are only recognised."""
    typed = list(zip(tokens.texts, tokens.types, strict=True))
    special = [text for text, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    plain = [text for text, kind in typed if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])


def _post_processor(tokens: _Tokens) -> processors.PostProcessor | None:
    bos = [tokens.bos] if tokens.add_bos and tokens.bos is not None else []
    eos = tokens.eos[:1] if tokens.add_eos else []
    if not bos and not eos:
        return None
    first, last = ([tokens.texts[token] for token in ids] for ids in (bos, eos))
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{text}:1" for text in first), "$B:1", *(f"{text}:1" for text in last)],
        special_tokens=[(tokens.texts[token], token) for token in dict.fromkeys([*bos, *eos])],
    )


def _generation_config(tokens: _Tokens) -> dict[str, Any]:
    eos = tokens.eos[0] if len(tokens.eos) == 1 else tokens.eos
    ids = {"bos_token_id": tokens.bos, "eos_token_id": eos, "pad_token_id": tokens.padding}
    return {name: value for name, value in ids.items() if value is not None}


def _tokenizer_config(gguf: _Gguf, shape: _Shape, tokens: _Tokens) -> dict[str, Any]:
    named = {
        "bos_token": tokens.text_of(tokens.bos),
        "eos_token": tokens.text_of(tokens.eos[0]),
        "unk_token": tokens.text_of(tokens.unknown),
        "pad_token": tokens.text_of(tokens.padding),
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokens.add_bos,
        "add_eos_token": tokens.add_eos,
        **{name: text for name, text in named.items() if text is not None},
        "model_max_length": shape.context,
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in gguf.values:
        config["chat_template"] = gguf.text("tokenizer.chat_template")
    return config
