"""What the runtime needs to know of a model, read from a Hugging Face `config.json`; which tensors follow from it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import PpsdError
from .files import read_json_object, shown, unfit


class Family(NamedTuple):
    """What one model_type has of its own; which tensors follow from it: `layer_shapes`."""

    usual: dict[str, Any]  # what transformers takes where the file says nothing, if that is not what Llama has
    fixed: dict[str, Any]  # what its modules in transformers have, whatever the file says
    qk_norm: bool = False
    output_bias: bool = True  # attention_bias speaks of the output's matrix, too
    windows: str = (
        "as said"  # which layers see a window alone: `never`, `all` where there is one, or what the file says
    )
    skips_rotation: bool = False  # some layers do not rotate, and these are those that see a window
    gguf: bool = True  # llama.cpp has the family under this name
    neighbours: bool = False  # there it rotates neighbours, where Hugging Face rotates halves


Shapes = dict[str, tuple[int, ...]]  # by the keys of a checkpoint

FAMILIES = {
    "llama": Family({"bos_token_id": 1, "eos_token_id": 2}, fixed={}, windows="never", neighbours=True),
    "mistral": Family(
        {"bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096}
        | {"max_position_embeddings": 131072},
        fixed={"attention_bias": False, "mlp_bias": False},
        windows="all",  # as transformers has it, whatever layer_types says
        gguf=False,  # it is llama there
    ),
    "qwen2": Family(
        {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 32768},
        fixed={"attention_bias": True, "mlp_bias": False},
        output_bias=False,
    ),
    "qwen3": Family(
        {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_position_embeddings": 32768},
        fixed={"mlp_bias": False},
        qk_norm=True,
    ),
    "smollm3": Family(
        {"bos_token_id": 128000, "eos_token_id": 128001, "num_key_value_heads": 4, "rope_theta": 2000000.0}
        | {"tie_word_embeddings": True, "no_rope_layer_interval": 4, "max_position_embeddings": 32768},
        fixed={},
        skips_rotation=True,
        neighbours=True,
    ),
}

# The least and the most of each number; whole numbers where these are. Beyond every model there is, and little enough
# that a damaged file costs neither memory nor time. The rotary frequencies theta^(-2i/d) / factor stay between 1e-21
# and 1: in float32 none vanishes, and the angle at the last position is finite. Nor is the epsilon's square root 0.
_RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 22),
    "num_hidden_layers": (1, 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), (1, 1 << 14)),
    "max_window_layers": (0, (1 << 31) - 1),
    "rope_theta": (1.0, 1e15),
    "rms_norm_eps": (1e-20, 1.0),
    "factor": (1.0, 1e6),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), (1e-3, 1e6)),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim"), (0.0, 1e6)),
    **dict.fromkeys(("beta_fast", "beta_slow"), (1e-6, 1e6)),
    **dict.fromkeys(("short_factor", "long_factor"), (1e-6, 1e9)),  # each of them
}
_OTHERS = (1, (1 << 31) - 1)


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched; the arithmetic is in rotary.py. Field names are transformers'.

    kind: `linear` (all by `factor`), `llama3` (low frequencies only), `yarn` (between the two by a ramp), `dynamic` (by
    the length of the text) or `longrope` (each by a factor of its own: `short_factor` in texts of up to
    `original_max_position_embeddings`, `long_factor` in longer ones; head_dim / 2 each).
    attention_factor: cosines and sines are multiplied by it.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def by_length(self) -> bool:
        """Do the frequencies depend on how long the text is?"""
        return self.kind == "dynamic" or self.short_factor != self.long_factor


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends: are queries and keys rotated, and how many positions does a row see, its own included?"""

    rotary: bool = True
    window: int | None = None  # None: all before it


@dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a Llama-family model. Field names are those of `config.json`.

    `attention_bias` speaks of q, k and v; `attention_output_bias` of o (Llama files with `attention_bias` have both,
    Qwen2 files only the former); `mlp_bias` of gate, up and down. `qk_norm`: every head of the queries and of the keys
    goes through an RMSNorm.
    `layer_attention`: of each layer, where they are not all plain (rotary, without a window); else empty.
    `max_position_embeddings`: the longest text; with `yarn` and `dynamic` rotation the stretched length.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_attention: tuple[LayerAttention, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_values(self) -> int:
        """Numbers that a row has in the KV caches of all layers together."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

    def attention(self, layer: int) -> LayerAttention:
        """Of a layer; a negative number counts from the last one, as those of an exit head do."""
        return self.layer_attention[layer] if self.layer_attention else LayerAttention()

    @classmethod
    def from_folder(cls, folder: Path) -> "LlamaConfig":
        """Read `config.json`, and the EOS ids of `generation_config.json` where that file exists.

        Where neither names one, it is the family's as transformers has it. Ids outside the vocabulary are left out.
        """
        raw, generation = read_json_object(folder / "config.json"), folder / "generation_config.json"
        config = cls.from_dict(raw, where=str(folder / "config.json"))
        ids = Reader(read_json_object(generation, missing_ok=True), generation).ids("eos_token_id", config.vocab_size)
        if ids and raw.get("eos_token_id") is not None:
            ids += config.eos_token_ids
        return replace(config, eos_token_ids=tuple(dict.fromkeys(ids))) if ids else config

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "LlamaConfig":
        """Build from the parsed file. Raises PpsdError that names whatever is missing, malformed or not supported."""
        model_type = raw.get("model_type")
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            raise unfit(where, "model_type", shown(model_type), ", ".join(FAMILIES))
        read = Reader({**family.usual, **raw, **family.fixed}, where)
        read.refuse("hidden_act", None, "silu", "swish")
        for key in ("num_experts", "num_local_experts"):
            read.refuse(key, None, 0)  # mixtures of experts

        hidden_size, heads = read.number("hidden_size"), read.number("num_attention_heads")
        layers, vocab_size = read.number("num_hidden_layers"), read.number("vocab_size")
        kv_heads, head_dim = read.number("num_key_value_heads", heads), read.number("head_dim", hidden_size // heads)
        if heads % kv_heads:
            raise read.bad("num_key_value_heads", f"a divisor of the {heads} heads", kv_heads)
        if head_dim % 2:
            raise read.bad("head_dim", "an even number, as rotary embedding needs pairs", head_dim)
        bias, scaling = read.boolean("attention_bias"), _rope_scaling(read, head_dim)
        return cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=read.number("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=_context(read.number("max_position_embeddings", 2048), scaling),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=_rope_section(read).number("rope_theta", read.number("rope_theta", 10000.0)),
            rope_scaling=scaling,
            tie_word_embeddings=read.boolean("tie_word_embeddings"),
            attention_bias=bias,
            attention_output_bias=bias and family.output_bias,
            mlp_bias=read.boolean("mlp_bias"),
            qk_norm=family.qk_norm,
            layer_attention=_layer_attention(family, read, layers),
            bos_token_id=next(iter(read.ids("bos_token_id", vocab_size)), None),
            eos_token_ids=read.ids("eos_token_id", vocab_size),
        )


class Reader:
    """Typed look-ups in a JSON object; a wrong type is one clear line, never a failure further on."""

    def __init__(self, raw: Mapping[str, Any], where: object) -> None:
        self.raw, self.where = raw, where

    def bad(self, key: str, wanted: str, value: Any) -> PpsdError:
        return unfit(self.where, key, "missing" if value is None else shown(value), wanted)

    def refuse(self, key: str, *neutral: object) -> None:
        """Raises PpsdError where the file says anything but these: it would change the arithmetic."""
        if self.raw.get(key) not in neutral:
            raise self.bad(key, " or ".join(map(str, neutral[1:])), self.raw[key])

    def number(self, key: str, default: float | None = None) -> Any:
        """Within its range: an int or a float, as that has it."""
        least, most = _RANGES.get(key, _OTHERS)
        value: Any = default if self.raw.get(key) is None else self.raw[key]
        if not _is_number(value, least, most):
            kind = "whole number" if isinstance(least, int) else "number"
            raise self.bad(key, f"a {kind} from {least:.10g} to {most:.10g}", value)
        return value if isinstance(least, int) else float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        values, (least, most) = self.raw.get(key), _RANGES[key]
        if not isinstance(values, list) or len(values) != count or not all(_is_number(v, least, most) for v in values):
            raise self.bad(key, f"a list of {count} numbers from {least:g} to {most:g}", values)
        return tuple(map(float, values))

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if not isinstance(value, bool | None):
            raise self.bad(key, "true or false", value)
        return default if value is None else value

    def ids(self, key: str, vocabulary: int) -> tuple[int, ...]:
        """One or several, without those outside the vocabulary, such as -1 for none, which can never come up."""
        value = self.raw.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(id) is int for id in ids):
            raise self.bad(key, "a token id or a list of them", value)
        return tuple(id for id in ids if 0 <= id < vocabulary)


def _is_number(value: Any, least: float, most: float) -> bool:
    return (type(value) is int or (type(value) is float and isinstance(least, float))) and bool(least <= value <= most)


def _rope_section(read: Reader) -> Reader:
    """The object that holds the rotary settings. `rope_scaling` wins over `rope_parameters`, the newer name: people add
    the former by hand to files that have the latter, and transformers reads them so."""
    name = "rope_scaling" if read.raw.get("rope_scaling") else "rope_parameters"
    section = read.raw.get(name) or {}
    if not isinstance(section, dict) or any(isinstance(value, dict) for value in section.values()):
        raise read.bad(name, "an object without objects in it", section)
    return Reader(section, f"{read.where}: {name}")


def _rope_scaling(read: Reader, head_dim: int) -> RopeScaling | None:
    section = _rope_section(read)
    kind = section.raw.get("rope_type", section.raw.get("type", "default"))
    if kind == "default":  # transformers' modules of these families rotate whole heads then, whatever the file says
        return None
    for each in (section, read):
        each.refuse("partial_rotary_factor", None, 1)
    context = read.number("max_position_embeddings", 2048)
    if kind == "linear":
        return RopeScaling(kind, section.number("factor"))
    if kind == "dynamic":
        return RopeScaling(kind, section.number("factor"), original_max_position_embeddings=context)
    # transformers takes the outer number where there are two, and the context's length where there is none.
    inner = section.number("original_max_position_embeddings", context)
    original = read.number("original_max_position_embeddings", inner)
    if kind == "llama3":
        factor, low, high = (section.number(f"{name}factor") for name in ("", "low_freq_", "high_freq_"))
        if high <= low:
            raise section.bad("high_freq_factor", f"a number above low_freq_factor, {low:g}", high)
        return RopeScaling(kind, factor, low, high, original)
    factor = section.number("factor", max(context / original, 1.0))
    if kind == "yarn":
        return RopeScaling(
            kind,
            factor,
            original_max_position_embeddings=original,
            attention_factor=section.number("attention_factor", _yarn_attention_factor(section, factor)),
            beta_fast=section.number("beta_fast", 32.0),
            beta_slow=section.number("beta_slow", 1.0),
            truncate=section.boolean("truncate", "truncate" not in section.raw),
        )
    if kind == "longrope":
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return RopeScaling(
            kind,
            factor,
            original_max_position_embeddings=original,
            attention_factor=section.number("attention_factor", usual),
            short_factor=section.numbers("short_factor", head_dim // 2),
            long_factor=section.numbers("long_factor", head_dim // 2),
        )
    raise section.bad("type", "default, linear, dynamic, llama3, yarn or longrope", kind)


def _context(stated: int, scaling: RopeScaling | None) -> int:
    """Positions that the model takes. People add these kinds to a file that states the length before stretching."""
    if scaling is None or scaling.kind not in ("yarn", "dynamic"):
        return stated
    return min(max(stated, int(scaling.original_max_position_embeddings * scaling.factor)), 2**31 - 1)


def _yarn_attention_factor(section: Reader, factor: float) -> float:
    """By how much cosines and sines grow where the file does not say (Peng et al., arXiv 2309.00071, equation 22)."""

    def scale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    above, below = section.number("mscale", 0.0), section.number("mscale_all_dim", 0.0)
    return scale(above) / scale(below) if above and below else scale(1.0)


def _layer_attention(family: Family, read: Reader, layers: int) -> tuple[LayerAttention, ...]:
    """Of each layer; empty where all are plain."""
    rotary = _rotary_layers(read, layers) if family.skips_rotation else [True] * layers
    sliding = _sliding_layers(family, read, rotary)
    window = read.number("sliding_window") if any(sliding) else None
    if all(rotary) and window is None:
        return ()
    return tuple(
        LayerAttention(rotates, window if slides else None) for rotates, slides in zip(rotary, sliding, strict=True)
    )


def _rotary_layers(read: Reader, layers: int) -> list[bool]:
    """Which layers rotate: files say so layer by layer (1 or 0), or leave out every fourth one."""
    listed = read.raw.get("no_rope_layers")
    if listed is None:
        interval = read.number("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(rotates not in (0, 1) for rotates in listed):
        raise read.bad("no_rope_layers", f"a list of 0 and 1 for each of the {layers} layers", listed)
    return [bool(rotates) for rotates in listed[:layers]]


def _sliding_layers(family: Family, read: Reader, rotary: list[bool]) -> list[bool]:
    """Which layers see a window of `sliding_window` positions alone."""
    layers, there = len(rotary), read.raw.get("sliding_window") is not None
    if family.windows != "as said":
        return [there and family.windows == "all"] * layers
    in_use, types = read.boolean("use_sliding_window") and there, read.raw.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")[: 1 + in_use]
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            raise read.bad("layer_types", f"a list of {' or '.join(known)} for each of the {layers} layers", types)
        return [kind == "sliding_attention" for kind in types]
    if not in_use:
        return [False] * layers
    if family.skips_rotation:
        return [not rotates for rotates in rotary]
    first = read.number("max_window_layers", 28)
    return [layer >= first for layer in range(layers)]


def model_shapes(config: LlamaConfig) -> Shapes:
    """Every tensor of a checkpoint, in the order of use; a tied LM head is not there."""
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        shapes |= layer_shapes(config, f"model.layers.{layer}.")
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_shapes(config: LlamaConfig, prefix: str, *, mlp: bool = True) -> Shapes:
    """A decoder layer, or without the MLP the attention block of one."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: Shapes = {"input_layernorm.weight": (hidden,)}
    for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes[f"self_attn.{name}.weight"] = (outputs, hidden)
        if config.attention_bias:
            shapes[f"self_attn.{name}.bias"] = (outputs,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if config.attention_output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if mlp:
        shapes["post_attention_layernorm.weight"] = (hidden,)
        shapes |= {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)}
        shapes["mlp.down_proj.weight"] = (hidden, inner)
        if config.mlp_bias:
            shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def check_shapes(found: Mapping[str, Any], expected: Shapes, where: object) -> None:
    """Raises PpsdError that names the first tensor that is missing, of the wrong shape, or too many."""
    for name in {**expected, **found}:
        shape = tuple(found[name].shape) if name in found else "missing"
        if shape != expected.get(name):
            raise unfit(where, f"tensor {name}", shape, f"by its model's settings {expected.get(name, 'none')}")
