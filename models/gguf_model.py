"""What model a GGUF file holds: its configuration, its tokenizer, its weights, mapped, and decoded when asked for.

What the fields mean follows llama.cpp: its converter (`conversion/llama.py`: names, rope order, rope factors) and its
loader (`src/models/llama.cpp`). The arithmetic of the quantised blocks is the `gguf` package's.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ..errors import PpsdError
from .config import FAMILIES, LlamaConfig, RopeScaling
from .files import drop_pages
from .gguf_file import BY_TABLE, GgufFile, GgufTensor, Kind, read_gguf
from .gguf_tokenizer import Tokens, build_tokenizer, generation_config, read_tokens, tokenizer_config
from .rotary import llama3_frequencies
from .shapes import model_shapes
from .stored import Blocks, Floats

# Hugging Face's name of a module -> GGUF's
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_ROTATIONS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_BIASED = ("attn_q", "attn_output", "ffn_gate")
_LEAST_TENSORS = 9  # of a layer

# (key, values that change nothing, what any other is)
_NEUTRAL: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("{arch}.expert_count", (0,), "is a mixture of experts"),
    ("{arch}.nextn_predict_layers", (0,), "has layers that predict further tokens"),
    ("{arch}.attention.causal", (True,), "is attention in both directions"),
    ("{arch}.attention.scale", (0.0,), "is another attention scale"),
    ("{arch}.attention.clamp_kqv", (0.0,), "clamps queries, keys and values"),
)

_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}

# The published settings: Llama 3.1 (8B to 405B, and 3.3) and Llama 3.2 (1B, 3B). All but the factor are RopeScaling's
# defaults.
_LLAMA3_ROPE: tuple[dict[str, Any], ...] = tuple(
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
)


class _Biases(NamedTuple):
    """Which matrices have one: q, k and v; o; gate, up and down."""

    inputs: bool
    output: bool
    mlp: bool


@dataclass(frozen=True)
class GgufWeight:
    """A tensor and its Hugging Face name. head_dim > 0: its rows are in GGUF's order, rotary pairs side by side."""

    tensor: GgufTensor
    key: str
    head_dim: int

    def decode(self, stored: NDArray[np.uint8]) -> Floats:
        """Whole heads as they lie in the file [rows, bytes of a row] -> in Hugging Face's order [rows, columns]."""
        values = decode(stored, self.tensor)
        if not self.head_dim:
            return values
        columns = self.tensor.shape[1] if len(self.tensor.shape) == 2 else 1  # a bias has one value for each row
        heads = values.reshape(-1, self.head_dim // 2, 2, columns)  # pairs are neighbours in GGUF
        return heads.swapaxes(1, 2).reshape(values.shape)  # pairs are head_dim / 2 apart


def _read_architecture(gguf: GgufFile) -> str:
    """Raises PpsdError for what the runtime cannot compute: another one, experts, ..."""
    kind = gguf.text("general.type", "model")
    if kind != "model":
        mend = "merge it into its model with llama-export-lora" if kind == "adapter" else "take the model's own file"
        raise gguf.bad(f"this is of the type {kind!r}, not a model: {mend}")
    arch = gguf.text("general.architecture")
    known = [name for name, family in FAMILIES.items() if family.gguf]
    if arch not in known:
        raise gguf.bad(f"the architecture {arch!r} is not supported; supported are {', '.join(known)}")
    for pattern, neutral, what in _NEUTRAL:
        key = pattern.format(arch=arch)
        value = gguf.scalar(key, neutral[0])
        if value not in neutral:
            raise gguf.bad(f"{key} = {value} {what}, which is not supported")
    return arch


def _read_config(gguf: GgufFile, arch: str, biases: _Biases) -> dict[str, Any]:
    """Everything of `config.json` but the token ids."""
    # Whose modules in transformers compute the same.
    family = "qwen2" if arch == "llama" and biases == _Biases(True, False, False) else arch
    heads = gguf.integer(f"{arch}.attention.head_count")
    kv_heads = gguf.integer(f"{arch}.attention.head_count_kv", heads)
    head_dim = _read_head_dim(gguf, arch, heads)
    theta = gguf.number(f"{arch}.rope.freq_base", 10000.0)
    context = gguf.integer(f"{arch}.context_length")
    return {
        "model_type": family,
        "vocab_size": _tensor(gguf, "token_embd.weight").shape[0],
        "hidden_size": gguf.integer(f"{arch}.embedding_length"),
        "intermediate_size": gguf.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": gguf.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": gguf.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _read_rope_scaling(gguf, arch, head_dim, theta, context),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": biases.inputs,
        "mlp_bias": biases.mlp,
        "no_rope_layer_interval": 4,  # llama.cpp has it in its code, for smollm3
    }


def _read_head_dim(gguf: GgufFile, arch: str, heads: int) -> int:
    """The width of a head: as stated, else as the query matrix has it. Rotary embedding must cover all of it."""
    rows = _tensor(gguf, "blk.0.attn_q.weight").shape[0]
    head_dim = gguf.integer(f"{arch}.attention.key_length", max(rows // heads, 1))
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (found := gguf.integer(key, head_dim)) != head_dim:
            raise gguf.bad(f"{key} = {found} differs from the width {head_dim} of the keys, which is not supported")
    return head_dim


def _read_rope_scaling(gguf: GgufFile, arch: str, head_dim: int, theta: float, context: int) -> dict[str, Any] | None:
    """In transformers' words. Source: `llama_model_base::load_hparams` and `llama_context` of llama.cpp."""
    key = f"{arch}.rope.scaling."
    kind = gguf.text(f"{key}type", "linear")
    factor = gguf.at_least_0(f"{key}factor", gguf.at_least_0(f"{arch}.rope.scale_linear", 0.0)) or 1.0
    grown = gguf.at_least_0(f"{key}attn_factor", 1.0)  # cosines and sines, beside what yarn does to them
    original = gguf.integer(f"{key}original_context_length", context)
    if kind == "yarn" and "rope_freqs.weight" not in gguf.tensors:
        if gguf.scalar(f"{key}yarn_ext_factor", 1.0) not in (1.0, -1.0):
            raise gguf.bad(f"{key}yarn_ext_factor other than 1 is not supported")
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        betas = {name: gguf.at_least_0(f"{key}yarn_{name}", usual) for name, usual in _YARN_BETAS.items()}
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        return {**yarn, **betas, "attention_factor": usual * grown * gguf.at_least_0(f"{key}yarn_attn_factor", 1.0)}
    if kind not in ("none", "linear", "longrope"):
        also = " beside rope_freqs.weight" if kind == "yarn" else ""
        raise gguf.bad(f"rope scaling of type {kind!r}{also} is not supported; none, linear, longrope and yarn are")
    if kind == "none":
        factor = 1.0
    if kind == "longrope":
        short, long = (_read_factors(gguf, f"rope_factors_{name}.weight", head_dim) for name in ("short", "long"))
    else:
        short = long = _read_factors(gguf, "rope_freqs.weight", head_dim)
    if short is long and grown == 1.0:
        if short is None or (short == 1.0).all():
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
        for setting in _LLAMA3_ROPE if factor == 1.0 else ():
            plainly = np.float32(theta) ** -(np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
            stretched = llama3_frequencies(plainly, RopeScaling("llama3", setting["factor"]))
            if np.allclose(short, plainly / stretched, rtol=1e-3, atol=0.0):
                return setting
    plain = np.ones(head_dim // 2, np.float32)
    scaled = [(plain if factors is None else factors) * np.float32(factor) for factors in (short, long)]
    return {
        "rope_type": "longrope",
        "short_factor": scaled[0].tolist(),
        "long_factor": scaled[1].tolist(),
        "factor": max(context / original, 1.0),
        "attention_factor": grown,
        "original_max_position_embeddings": original,
    }


def _read_factors(gguf: GgufFile, name: str, head_dim: int) -> Floats | None:
    """What each rotary frequency is divided by [head_dim / 2]: GGUF stores what a formula gave, not the formula."""
    tensor = gguf.tensors.get(name)
    if tensor is None:
        return None
    _check_shape(gguf, tensor, (head_dim // 2,))
    factors = decode(np.memmap(tensor.path, np.uint8, "r", tensor.start, (1, tensor.row_bytes)), tensor)[0]
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise gguf.bad(f"{name} holds factors that are not positive numbers: the file is damaged")
    return factors


def _tensor(gguf: GgufFile, name: str) -> GgufTensor:
    if name not in gguf.tensors:
        raise gguf.bad(f"the tensor {name!r} is missing")
    return gguf.tensors[name]


def _check_shape(gguf: GgufFile, tensor: GgufTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise gguf.bad(f"the tensor {tensor.name!r} has shape {tensor.shape}, expected {shape}")


def _plan_weights(gguf: GgufFile, arch: str, config: LlamaConfig) -> list[GgufWeight]:
    """All tensors under their Hugging Face names, in the model's order; none missing, none left over."""
    shapes = {_gguf_name(key): (key, shape) for key, shape in model_shapes(config).items()}
    for name in gguf.tensors:
        if name not in shapes and name not in _ROTATIONS:
            raise gguf.bad(f"the tensor {name!r} is not part of the {arch} models that are supported")
    weights = []
    for name, (key, shape) in shapes.items():
        tensor = _tensor(gguf, name)
        _check_shape(gguf, tensor, shape)
        interleaved = FAMILIES[arch].neighbours and ("q_proj" in key or "k_proj" in key)
        weights.append(GgufWeight(tensor, key, config.head_dim if interleaved else 0))
    return weights


def _gguf_name(key: str) -> str:
    """Of a tensor that Hugging Face calls so."""
    module, _, what = key.rpartition(".")
    if module in _OTHERS:
        return f"{_OTHERS[module]}.{what}"
    _, _, layer, inner = module.split(".", 3)
    return f"blk.{layer}.{_LAYER[inner]}.{what}"


@dataclass(frozen=True)
class GgufModel:
    """A model that can be run, read from a GGUF file: all but the data of its weights."""

    gguf: GgufFile
    raw: dict[str, Any]  # what config.json says, but for the token ids
    tokens: Tokens
    weights: tuple[GgufWeight, ...]  # in the model's order

    @cached_property
    def config(self) -> LlamaConfig:
        """Raises PpsdError that names the file, for values out of range."""
        return LlamaConfig.from_dict(self.config_json(), str(self.gguf.path))

    def config_json(self) -> dict[str, Any]:
        """What `config.json` says of the model."""
        return {**self.raw, **generation_config(self.tokens)}

    def tokenizer(self) -> Tokenizer:
        return build_tokenizer(self.gguf, self.tokens)

    def tokenizer_config(self) -> dict[str, Any]:
        """What `tokenizer_config.json` says, the chat template included."""
        return tokenizer_config(self.gguf, self.raw["max_position_embeddings"], self.tokens)


def open_gguf(path: Path) -> GgufModel:
    """Raises PpsdError, one line that names the file and what is wrong with it: damaged, of an architecture, a tensor
    type or a tokenizer that is not supported; or OSError from the system."""
    gguf = read_gguf(path)
    arch, biases = _read_architecture(gguf), _Biases(*(f"blk.0.{name}.bias" in gguf.tensors for name in _BIASED))
    layers = gguf.integer(f"{arch}.block_count")
    if layers * _LEAST_TENSORS > len(gguf.tensors):
        raise gguf.bad(f"{layers} layers are announced, but there are only {len(gguf.tensors)} tensors")
    raw = _read_config(gguf, arch, biases)
    config = LlamaConfig.from_dict(raw, str(path))
    every = replace(config, attention_output_bias=biases.output, mlp_bias=biases.mlp)
    weights = tuple(_plan_weights(gguf, arch, every))
    if biases.output != config.attention_output_bias:
        raise gguf.bad("attention with a bias of its output, or of its inputs, alone is not supported in this family")
    return GgufModel(gguf, raw, read_tokens(gguf, config.vocab_size), weights)


def decode(data: NDArray[np.uint8], tensor: GgufTensor) -> Floats:
    """Rows of a tensor as they lie in the file, [rows, bytes of a row] -> [rows, columns]; a vector is one row."""
    if tensor.kind == Kind.F32:
        return data.view(np.float32)
    from gguf.quants import GGMLQuantizationType, dequantize  # which take as long to import as numpy

    with np.errstate(all="ignore"):  # a damaged scale is NaN or infinite: whoever reads the values says so
        return dequantize(data, GGMLQuantizationType(tensor.kind)).reshape(len(data), tensor.shape[-1])


def open_tensors(path: Path) -> "GgufTensors":
    """Raises PpsdError, one line that names the file and what is wrong with it."""
    try:
        return GgufTensors(open_gguf(path))
    except OSError as error:
        raise PpsdError(f"{path} cannot be read: {error.strerror or error}") from None


class GgufTensors(Mapping[str, Floats]):
    """Tensors by their Hugging Face names, in Hugging Face's row order.

    Each look-up decodes a tensor to float32, a copy that belongs to the caller. It raises PpsdError that names the file
    and the tensor, where values are NaN or infinite.
    """

    def __init__(self, model: GgufModel) -> None:
        self.model, self._gguf = model, model.gguf
        self._weights = {weight.key: weight for weight in model.weights}
        paths = {weight.tensor.path for weight in model.weights}
        self._files = {path: np.memmap(path, np.uint8, "r") for path in paths}

    def __getitem__(self, name: str) -> Floats:
        weight = self._weights[name]
        values = weight.decode(self._stored(name)).reshape(weight.tensor.shape)
        if not math.isfinite(max(float(values.max()), -float(values.min()))):
            raise self._gguf.bad(f"the tensor {weight.tensor.name!r} holds NaN or infinite values: the file is damaged")
        return values.copy() if np.may_share_memory(values, self._files[weight.tensor.path]) else values

    def __contains__(self, name: object) -> bool:  # Mapping's own would decode it
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def kinds(self) -> set[str]:
        """llama.cpp's names of the types that are stored."""
        return {weight.tensor.kind.name for weight in self._weights.values()}

    def values_at(self, name: str, places: NDArray[np.int64]) -> Floats:
        """The values at some places of the tensor as one long row; only the rows around them are decoded."""
        weight = self._weights[name]
        if len(weight.tensor.shape) == 1:
            return self[name][places]
        rows, columns = np.divmod(places, weight.tensor.shape[1])
        if weight.head_dim:
            heads, channels = np.divmod(rows, weight.head_dim)
            second, pairs = np.divmod(channels, weight.head_dim // 2)
            rows = heads * weight.head_dim + 2 * pairs + second
        stored = self._stored(name)
        values = decode(stored[rows], weight.tensor)
        drop_pages(stored)
        return values[np.arange(len(places)), columns]

    def blocks(self) -> dict[str, Blocks]:
        """The matrices that the C++ extension decodes, as they lie in the file."""
        return {
            name: Blocks(self._stored(name), weight.tensor.kind.name, weight.tensor.shape[1], weight.head_dim)
            for name, weight in self._weights.items()
            if len(weight.tensor.shape) == 2 and weight.tensor.kind not in BY_TABLE
        }

    def _stored(self, name: str) -> NDArray[np.uint8]:
        """[rows, bytes of a row], in the order of the file."""
        tensor = self._weights[name].tensor
        size = tensor.rows * tensor.row_bytes
        return self._files[tensor.path][tensor.start : tensor.start + size].reshape(tensor.rows, tensor.row_bytes)
