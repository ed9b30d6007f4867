"""What model a GGUF file holds: its configuration, its tokenizer, its weights, mapped, and decoded when asked for.

What the fields mean follows llama.cpp: its converter (`conversion/llama.py`: names, rope order, rope factors) and its
loader (`src/models/llama.cpp`). The arithmetic of the quantised blocks is the `gguf` package's.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .config import FAMILIES, LlamaConfig, RopeScaling, check_shapes, model_shapes
from .files import drop_pages, unfit
from .gguf_file import BY_TABLE, GgufFile, GgufTensor, Kind, read_gguf
from .gguf_tokenizer import Tokens, build_tokenizer, generation_config, read_tokens, tokenizer_config
from .rotary import llama3_frequencies
from .stored import Blocks, Decoded, Floats

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

_BIASED = ("attn_q", "attn_output", "ffn_gate")  # of q, k and v; of o; of gate, up and down
_Biases = tuple[bool, bool, bool]
_LEAST_TENSORS = 9  # of a layer

_NEUTRAL = ("expert_count", "nextn_predict_layers", "attention.scale", "attention.clamp_kqv")  # where they are 0

_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}

# The published settings: Llama 3.1 (8B to 405B, and 3.3) and Llama 3.2 (1B, 3B). All but the factor are RopeScaling's
# defaults.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_FACTORS = (8.0, 32.0)


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
    known = [name for name, family in FAMILIES.items() if family.gguf]
    arch = gguf.get("general.architecture", str)
    neutral: dict[str, Any] = {f"{arch}.{key}": 0 for key in _NEUTRAL} | {
        f"{arch}.attention.causal": True,
        "general.type": "model",
    }
    if arch not in known:
        raise gguf.bad("general.architecture", repr(arch), ", ".join(known))
    for key, value in neutral.items():
        if not np.array_equal(gguf.values.get(key, value), value):
            raise gguf.bad(key, gguf.values[key], value)
    return arch


def _read_config(gguf: GgufFile, arch: str, biases: _Biases) -> dict[str, Any]:
    """Everything of `config.json` but the token ids."""
    heads, head_dim = gguf.integer(f"{arch}.attention.head_count"), _read_head_dim(gguf, arch)
    theta, context = gguf.number(f"{arch}.rope.freq_base", 10000.0), gguf.integer(f"{arch}.context_length")
    return {
        # The second's modules in transformers compute the same.
        "model_type": "qwen2" if arch == "llama" and biases == (True, False, False) else arch,
        "vocab_size": _shape_of(gguf, "token_embd.weight")[0],
        "hidden_size": gguf.integer(f"{arch}.embedding_length"),
        "intermediate_size": gguf.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": gguf.integer(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.integer(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": gguf.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": _read_rope_scaling(gguf, arch, head_dim, theta, context),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": biases[0],
        "mlp_bias": biases[2],
    }


def _read_head_dim(gguf: GgufFile, arch: str) -> int:
    """The width of a head: as stated, else as the query matrix has it. Rotary embedding must cover all of it."""
    rows, heads = _shape_of(gguf, "blk.0.attn_q.weight")[0], gguf.integer(f"{arch}.attention.head_count")
    head_dim = gguf.integer(f"{arch}.attention.key_length", max(rows // heads, 1))
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (found := gguf.integer(key, head_dim)) != head_dim:
            raise gguf.bad(key, found, f"the width of the keys, {head_dim},")
    return head_dim


def _read_rope_scaling(gguf: GgufFile, arch: str, head_dim: int, theta: float, context: int) -> dict[str, Any] | None:
    """In transformers' words. Source: `llama_model_base::load_hparams` and `llama_context` of llama.cpp."""
    key = f"{arch}.rope.scaling."

    def number(name: str, default: float) -> float:
        return gguf.number(key + name, default, unknown=True)

    kind = gguf.get(f"{key}type", str, "linear")
    factor = number("factor", gguf.number(f"{arch}.rope.scale_linear", 0.0, unknown=True)) or 1.0
    grown = number("attn_factor", 1.0)  # cosines and sines, beside what yarn does to them
    original = gguf.integer(f"{key}original_context_length", context)
    whole = abs(gguf.get(f"{key}yarn_ext_factor", float, 1.0)) == 1.0
    if kind == "yarn" and whole and "rope_freqs.weight" not in gguf.tensors:
        usual = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            **{name: number(f"yarn_{name}", usual) for name, usual in _YARN_BETAS.items()},
            "attention_factor": usual * grown * number("yarn_attn_factor", 1.0),
        }
    if kind not in ("none", "linear", "longrope"):
        raise gguf.bad(f"{key}type", kind, "none, linear, longrope, or yarn alone")
    if kind == "none":
        factor = 1.0
    if kind == "longrope":
        short, long = (_read_factors(gguf, f"rope_factors_{name}.weight", head_dim) for name in ("short", "long"))
    else:
        short = long = _read_factors(gguf, "rope_freqs.weight", head_dim)
    if short is long and grown == 1.0:
        if short is None or (short == 1.0).all():
            return {"rope_type": "linear", "factor": factor} if factor != 1.0 else None
        for stretch in _LLAMA3_FACTORS if factor == 1.0 else ():
            plainly = np.float32(theta) ** -(np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
            stretched = llama3_frequencies(plainly, RopeScaling("llama3", stretch))
            if np.allclose(short, plainly / stretched, rtol=1e-3, atol=0.0):
                return {"rope_type": "llama3", **_LLAMA3, "factor": stretch}
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
    if name not in gguf.tensors:
        return None
    check_shapes({name: gguf.tensors[name]}, {name: (head_dim // 2,)}, gguf.path)
    tensor = gguf.tensors[name]
    factors = decode(np.memmap(tensor.path, np.uint8, "r", tensor.start, (1, tensor.row_bytes)), tensor)[0]
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise gguf.bad(f"tensor {name}", "partly 0, negative, NaN or infinite")
    return factors


def _shape_of(gguf: GgufFile, name: str) -> tuple[int, ...]:
    if name not in gguf.tensors:
        raise gguf.bad(f"tensor {name}", "missing")
    return gguf.tensors[name].shape


def _plan_weights(gguf: GgufFile, arch: str, config: LlamaConfig) -> list[GgufWeight]:
    """All tensors under their Hugging Face names, in the model's order; none missing, none left over."""
    keys = {_gguf_name(key): key for key in model_shapes(config)}
    shapes = dict(zip(keys, model_shapes(config).values(), strict=True))
    found = {name: tensor for name, tensor in gguf.tensors.items() if name not in _ROTATIONS}
    check_shapes(found, shapes, gguf.path)
    width = config.head_dim if FAMILIES[arch].neighbours else 0
    turned = ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias")
    return [GgufWeight(found[name], key, width if key.endswith(turned) else 0) for name, key in keys.items()]


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
        return tokenizer_config(self.gguf, self.tokens)


def decode(data: NDArray[np.uint8], tensor: GgufTensor) -> Floats:
    """Rows of a tensor as they lie in the file, [rows, bytes of a row] -> [rows, columns]; a vector is one row."""
    if tensor.kind == Kind.F32:
        return data.view(np.float32)
    from gguf.quants import GGMLQuantizationType, dequantize  # which take as long to import as numpy

    with np.errstate(all="ignore"):  # a damaged scale is NaN or infinite: whoever reads the values says so
        return dequantize(data, GGMLQuantizationType(tensor.kind)).reshape(len(data), tensor.shape[-1])


def open_tensors(path: Path) -> "GgufTensors":
    """Raises PpsdError, one line that names the file and what is wrong with it: damaged, of an architecture, a tensor
    type or a tokenizer that is not supported."""
    try:
        gguf = read_gguf(path)
    except OSError as error:
        raise unfit(path, "it", f"not to be read ({error.strerror or error})") from None
    arch = _read_architecture(gguf)
    inputs, output, mlp = (f"blk.0.{name}.bias" in gguf.tensors for name in _BIASED)
    layers, tensors = gguf.integer(f"{arch}.block_count"), len(gguf.tensors)
    if layers * _LEAST_TENSORS > tensors:
        raise gguf.bad(f"{arch}.block_count", layers, f"as {tensors} tensors give")
    raw = _read_config(gguf, arch, (inputs, output, mlp))
    config = LlamaConfig.from_dict(raw, str(path))
    weights = tuple(_plan_weights(gguf, arch, replace(config, attention_output_bias=output, mlp_bias=mlp)))
    if output != config.attention_output_bias:
        raise gguf.bad("blk.0.attn_output.bias", "there" if output else "missing", f"what other {arch} models have")
    return GgufTensors(GgufModel(gguf, raw, read_tokens(gguf, config.vocab_size), weights))


class GgufTensors(Decoded):
    """Tensors by their Hugging Face names, in Hugging Face's row order.

    Each look-up decodes a tensor to float32, a copy that belongs to the caller. It raises PpsdError that names the file
    and the tensor, where values are NaN or infinite.
    """

    def __init__(self, model: GgufModel) -> None:
        self.model, self._gguf = model, model.gguf
        self._of: dict[str, GgufWeight] = {weight.key: weight for weight in model.weights}
        paths = {weight.tensor.path for weight in model.weights}
        self._files = {path: np.memmap(path, np.uint8, "r") for path in paths}

    def __getitem__(self, name: str) -> Floats:
        weight = self._of[name]
        values = weight.decode(self._stored(name)).reshape(weight.tensor.shape)
        if not math.isfinite(max(float(values.max()), -float(values.min()))):
            raise self._gguf.bad(f"tensor {weight.tensor.name}", "partly NaN or infinite")
        return values.copy() if np.may_share_memory(values, self._files[weight.tensor.path]) else values

    @property
    def kinds(self) -> set[str]:
        """llama.cpp's names of the types that are stored."""
        return {weight.tensor.kind.name for weight in self._of.values()}

    def values_at(self, name: str, places: NDArray[np.int64]) -> Floats:
        """The values at some places of the tensor as one long row; only the rows around them are decoded."""
        weight = self._of[name]
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
            for name, weight in self._of.items()
            if len(weight.tensor.shape) == 2 and weight.tensor.kind not in BY_TABLE
        }

    def _stored(self, name: str) -> NDArray[np.uint8]:
        """[rows, bytes of a row], in the order of the file."""
        tensor = self._of[name].tensor
        size = tensor.rows * tensor.row_bytes
        return self._files[tensor.path][tensor.start : tensor.start + size].reshape(tensor.rows, tensor.row_bytes)
