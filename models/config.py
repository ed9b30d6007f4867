"""`LlamaConfig`: what the runtime needs to know of a model, read from a Hugging Face `config.json`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import PpsdError
from .files import read_json_object, shown


class Family(NamedTuple):
    """What one model_type has of its own; which tensors follow from it is in shapes.py."""

    usual: dict[str, Any]  # what transformers takes where the file says nothing, if that is not what Llama has
    fixed: dict[str, Any]  # what its modules in transformers have, whatever the file says
    qk_norm: bool = False
    output_bias: bool = True  # attention_bias speaks of the output's matrix, too
    gguf: bool = True  # llama.cpp has the family under this name
    neighbours: bool = False  # there it rotates neighbours, where Hugging Face rotates halves


FAMILIES = {
    "llama": Family({"bos_token_id": 1, "eos_token_id": 2}, fixed={}, neighbours=True),
    "mistral": Family(
        {"bos_token_id": 1, "eos_token_id": 2, "num_key_value_heads": 8, "sliding_window": 4096}
        | {"max_position_embeddings": 131072},
        fixed={"attention_bias": False, "mlp_bias": False},
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
        neighbours=True,
    ),
}

# Far beyond every model there is, and little enough that a damaged file costs neither memory nor time.
_MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 4096,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
}
_MOST_OF_OTHERS = (1 << 31) - 1

# Beyond every model, too. So the rotary frequencies theta^(-2i/d) / factor stay between 1e-21 and 1: in float32 none of
# them vanishes, and the angle at the last position is finite. The epsilon's square root is not zero in float32.
_RANGES = {
    "rope_theta": (1.0, 1e15),
    "rms_norm_eps": (1e-20, 1.0),
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "attention_factor": (0.0, 1e6),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0.0, 1e6),
    "mscale_all_dim": (0.0, 1e6),
}
_LEAST_FACTOR, _MOST_FACTOR = 1e-6, 1e9  # of a frequency, as longrope lists them


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
        raw = read_json_object(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = _id_tuple(read_json_object(generation, missing_ok=True).get("eos_token_id"), generation)
        config = cls.from_dict(raw, where=str(folder / "config.json"))
        ids = [id for id in eos if 0 <= id < config.vocab_size]
        if ids and raw.get("eos_token_id") is not None:
            ids += config.eos_token_ids
        return replace(config, eos_token_ids=tuple(dict.fromkeys(ids))) if ids else config

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "LlamaConfig":
        """Build from the parsed file. Raises PpsdError that names whatever is missing, malformed or not supported."""
        model_type = raw.get("model_type")
        family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
        if family is None:
            known = ", ".join(FAMILIES)
            raise PpsdError(f"{where}: model_type {shown(model_type)} is not supported; supported are {known}")
        raw = {**family.usual, **raw, **family.fixed}
        read = Reader(raw, where)
        _refuse_unsupported(raw, where)

        hidden_size = read.integer("hidden_size")
        heads = read.integer("num_attention_heads")
        layers = read.integer("num_hidden_layers")
        head_dim = read.integer("head_dim", hidden_size // heads)
        vocab_size = read.integer("vocab_size")
        bias = read.boolean("attention_bias", False)
        scaling = _rope_scaling(raw, read, head_dim)
        config = cls(
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=read.integer("num_key_value_heads", heads),
            head_dim=head_dim,
            max_position_embeddings=_context(read.integer("max_position_embeddings", 2048), scaling),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=_rope_section(raw, read).number("rope_theta", read.number("rope_theta", 10000.0)),
            rope_scaling=scaling,
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            attention_bias=bias,
            attention_output_bias=bias and family.output_bias,
            mlp_bias=read.boolean("mlp_bias", False),
            qk_norm=family.qk_norm,
            layer_attention=_layer_attention(raw, read, layers),
            bos_token_id=next(iter(_known_ids(raw, "bos_token_id", where, vocab_size)), None),
            eos_token_ids=_known_ids(raw, "eos_token_id", where, vocab_size),
        )
        if heads % config.num_key_value_heads:
            raise read.bad("num_key_value_heads", f"a divisor of the {heads} heads", config.num_key_value_heads)
        if config.head_dim % 2:
            raise read.bad("head_dim", "even, as rotary embedding needs pairs", config.head_dim)
        return config


class Reader:
    """Typed look-ups in a JSON object; a wrong type is one clear line, never a failure further on."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def bad(self, key: str, what: str, value: Any) -> PpsdError:
        return PpsdError(f"{self.where}: {key} must be {what}, not {shown(value)}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise PpsdError(f"{self.where}: {key} is missing")
            return default
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value, most = self._value(key, default), _MOST.get(key, _MOST_OF_OTHERS)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.bad(key, f"a whole number from {least} to {most}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value, (least, most) = self._value(key, default), _RANGES[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise self.bad(key, f"a number from {least:g} to {most:g}", value)
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, "true or false", value)
        return value


def _rope_section(raw: Mapping[str, Any], read: Reader) -> Reader:
    """The object that holds the rotary settings. `rope_scaling` wins over `rope_parameters`, the newer name: people add
    the former by hand to files that have the latter, and transformers reads them so."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    section = raw.get(name) or {}
    if not isinstance(section, dict):
        raise read.bad(name, "an object", section)
    return Reader(section, f"{read.where}: {name}")


def _rope_scaling(raw: Mapping[str, Any], read: Reader, head_dim: int) -> RopeScaling | None:
    section = _rope_section(raw, read)
    nested = next((key for key, value in section.raw.items() if isinstance(value, dict)), None)
    if nested is not None:
        raise PpsdError(f"{section.where}: settings of their own for {shown(nested)} are not supported")
    kind = section.raw.get("rope_type", section.raw.get("type", "default"))
    if kind == "default":  # transformers' modules of these families rotate whole heads then, whatever the file says
        return None
    if (partial := section.raw.get("partial_rotary_factor", raw.get("partial_rotary_factor"))) not in (None, 1):
        raise PpsdError(f"{section.where}: partial_rotary_factor = {shown(partial)} is not supported")
    context = read.integer("max_position_embeddings", 2048)
    if kind == "linear":
        return RopeScaling(kind, section.number("factor"))
    if kind == "dynamic":
        return RopeScaling(kind, section.number("factor"), original_max_position_embeddings=context)
    # transformers takes the outer number where there are two, and the context's length where there is none.
    inner = section.integer("original_max_position_embeddings", context)
    original = read.integer("original_max_position_embeddings", inner)
    if kind == "llama3":
        factor, low, high = (section.number(f"{name}factor") for name in ("", "low_freq_", "high_freq_"))
        if high <= low:
            raise PpsdError(f"{section.where}: high_freq_factor must be above low_freq_factor")
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
            short_factor=_factors(section, "short_factor", head_dim // 2),
            long_factor=_factors(section, "long_factor", head_dim // 2),
        )
    known = "default, linear, dynamic, llama3, yarn and longrope"
    raise PpsdError(f"{section.where}: type {shown(kind)} is not supported; supported are {known}")


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


def _factors(section: Reader, key: str, count: int) -> tuple[float, ...]:
    values = section.raw.get(key)
    numbers = values if isinstance(values, list) else []
    good = (
        isinstance(value, int | float) and not isinstance(value, bool) and _LEAST_FACTOR <= value <= _MOST_FACTOR
        for value in numbers
    )
    if len(numbers) != count or not all(good):
        raise section.bad(key, f"a list of {count} numbers from {_LEAST_FACTOR:g} to {_MOST_FACTOR:g}", values)
    return tuple(map(float, numbers))


def _layer_attention(raw: Mapping[str, Any], read: Reader, layers: int) -> tuple[LayerAttention, ...]:
    """Of each layer; empty where all are plain."""
    rotary = _rotary_layers(raw, read, layers)
    sliding = _sliding_layers(raw, read, rotary)
    window = read.integer("sliding_window") if any(sliding) else None
    if all(rotary) and window is None:
        return ()
    return tuple(
        LayerAttention(rotates, window if slides else None) for rotates, slides in zip(rotary, sliding, strict=True)
    )


def _rotary_layers(raw: Mapping[str, Any], read: Reader, layers: int) -> list[bool]:
    """Which layers rotate: SmolLM3 files say so layer by layer (1 or 0), or leave out every fourth one."""
    if raw["model_type"] != "smollm3":
        return [True] * layers
    listed = raw.get("no_rope_layers")
    if listed is None:
        interval = read.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(rotates not in (0, 1) for rotates in listed):
        raise read.bad("no_rope_layers", f"a list of 0 and 1 for each of the {layers} layers", listed)
    return [bool(rotates) for rotates in listed[:layers]]


def _sliding_layers(raw: Mapping[str, Any], read: Reader, rotary: list[bool]) -> list[bool]:
    """Which layers see a window of `sliding_window` positions alone."""
    layers, family = len(rotary), raw["model_type"]
    if family == "llama":  # transformers reads neither key
        return [False] * layers
    if family == "mistral":  # all, as transformers has it, whatever layer_types says
        return [raw.get("sliding_window") is not None] * layers
    in_use = read.boolean("use_sliding_window", False) and raw.get("sliding_window") is not None
    types = raw.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            raise read.bad("layer_types", f"a list of {' or '.join(known)} for each of the {layers} layers", types)
        if not in_use and "sliding_attention" in types:
            raise PpsdError(f"{read.where}: layer_types has sliding_attention, but no sliding_window is in use")
        return [kind == "sliding_attention" for kind in types]
    if not in_use:
        return [False] * layers
    if family == "smollm3":
        return [not rotates for rotates in rotary]
    first = read.integer("max_window_layers", 28, least=0)
    return [layer >= first for layer in range(layers)]


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    """Settings that would change the arithmetic, and that this runtime does not compute."""
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise PpsdError(f"{where}: hidden_act = {shown(raw['hidden_act'])} is not supported")
    for key in ("num_experts", "num_local_experts"):
        if raw.get(key):
            raise PpsdError(f"{where}: {key} = {shown(raw[key])}: mixtures of experts are not supported")


def _id_tuple(value: Any, where: object) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise PpsdError(f"{where}: a token id must be an integer or a list of integers, not {shown(value)}")
    return tuple(ids)


def _known_ids(raw: Mapping[str, Any], key: str, where: str, vocabulary: int) -> tuple[int, ...]:
    """Those inside the vocabulary: the others, such as -1 for none, can never come up."""
    return tuple(id for id in _id_tuple(raw.get(key), where) if 0 <= id < vocabulary)
