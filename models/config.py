"""`LlamaConfig`: what the runtime needs to know of a model, read from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PpsdError
from .files import one_line, read_json_object

# model_type -> what transformers takes where the file says nothing, and where that is not what it takes for Llama.
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    "qwen2": {"attention_bias": True, "sliding_window": 4096, "max_position_embeddings": 32768},
    "qwen3": {"head_dim": 128, "sliding_window": 4096, "max_position_embeddings": 32768},
    "smollm3": {
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
        "max_position_embeddings": 32768,
    },
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
    "max_position_embeddings": (1 << 31) - 1,
    "original_max_position_embeddings": (1 << 31) - 1,
    "sliding_window": (1 << 31) - 1,
    "max_window_layers": (1 << 31) - 1,
    "no_rope_layer_interval": (1 << 31) - 1,
}

# Beyond every model, too. So the rotary frequencies theta^(-2i/d) / factor stay between 1e-21 and 1: in float32 none of
# them vanishes, and the angle at the last position is finite. The epsilon's square root is not zero in float32.
_RANGES = {
    "rope_theta": (1.0, 1e15),
    "rms_norm_eps": (1e-20, 1.0),
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
}


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched: `linear` (all by `factor`) or `llama3` (low frequencies only)."""

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class LayerAttention:
    """How a layer attends: are queries and keys rotated, and how many positions does a row see, its own included?"""

    rotary: bool = True
    window: int | None = None  # None: all before it


@dataclass(frozen=True)
class LlamaConfig:
    """Shape and constants of a Llama-family model. Field names are those of `config.json`.

    `attention_bias` speaks of q, k and v; `attention_output_bias` of o (Llama files with `attention_bias` have both,
    Qwen2 files only the former). `qk_norm`: every head of the queries and of the keys goes through an RMSNorm.
    `layer_attention`: of each layer, where they are not all plain (rotary, without a window); else empty.
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
        """Read `config.json`, and the EOS ids of `generation_config.json` where that file exists."""
        raw = read_json_object(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = read_json_object(generation, missing_ok=True).get("eos_token_id")
        if eos is not None:
            ids = _id_tuple(eos, generation) + _id_tuple(raw.get("eos_token_id"), generation)
            raw = {**raw, "eos_token_id": list(dict.fromkeys(ids))}
        return cls.from_dict(raw, where=str(folder / "config.json"))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str = "config.json") -> "LlamaConfig":
        """Build from the parsed file. Raises PpsdError that names whatever is missing, malformed or not supported."""
        model_type = raw.get("model_type")
        if not isinstance(model_type, str) or model_type not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise PpsdError(f"{where}: model_type {_shown(model_type)} is not supported; supported are {known}")
        raw = {**_FAMILIES[model_type], **raw}
        read = _Reader(raw, where)
        _refuse_unsupported(raw, where)

        hidden_size = read.integer("hidden_size")
        heads = read.integer("num_attention_heads")
        layers = read.integer("num_hidden_layers")
        bias = read.boolean("attention_bias", False)
        config = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=read.integer("num_key_value_heads", heads),
            head_dim=read.integer("head_dim", hidden_size // heads),
            max_position_embeddings=read.integer("max_position_embeddings", 2048),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=_rope_section(raw, read).number("rope_theta", read.number("rope_theta", 10000.0)),
            rope_scaling=_rope_scaling(raw, read),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            attention_bias=bias,
            attention_output_bias=bias and model_type != "qwen2",
            qk_norm=model_type == "qwen3",
            layer_attention=_layer_attention(raw, read, layers),
            bos_token_id=next(iter(_id_tuple(raw.get("bos_token_id"), where)), None),
            eos_token_ids=_id_tuple(raw.get("eos_token_id"), where),
        )
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise PpsdError(
                f"{where}: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise PpsdError(f"{where}: head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        for name, ids in (("bos_token_id", (self.bos_token_id,)), ("eos_token_id", self.eos_token_ids)):
            for token in ids:
                if token is not None and not 0 <= token < self.vocab_size:
                    raise PpsdError(f"{where}: {name} {_shown(token)} is outside the vocabulary of {self.vocab_size}")


class _Reader:
    """Typed look-ups in a JSON object; a wrong type is one clear line, never a failure further on."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise PpsdError(f"{self.where}: {key} is missing")
            return default
        return value

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value, most = self._value(key, default), _MOST[key]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise PpsdError(f"{self.where}: {key} must be a whole number from {least} to {most}, not {_shown(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value, (least, most) = self._value(key, default), _RANGES[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise PpsdError(f"{self.where}: {key} must be a number from {least:g} to {most:g}, not {_shown(value)}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise PpsdError(f"{self.where}: {key} must be true or false, not {_shown(value)}")
        return value


def _shown(value: object) -> str:
    return one_line(repr(value))


def _rope_section(raw: Mapping[str, Any], read: _Reader) -> _Reader:
    """The object that holds the rotary settings: newer files write `rope_parameters`, older ones `rope_scaling`."""
    section = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(section, dict):
        raise PpsdError(f"{read.where}: rope_scaling must be an object, not {_shown(section)}")
    return _Reader(section, f"{read.where}: rope_scaling")


def _rope_scaling(raw: Mapping[str, Any], read: _Reader) -> RopeScaling | None:
    section = _rope_section(raw, read)
    kind = section.raw.get("rope_type", section.raw.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", section.number("factor"))
    if kind == "llama3":
        scaling = RopeScaling(
            "llama3",
            section.number("factor"),
            section.number("low_freq_factor"),
            section.number("high_freq_factor"),
            section.integer("original_max_position_embeddings"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise PpsdError(f"{section.where}: high_freq_factor must be above low_freq_factor")
        return scaling
    raise PpsdError(f"{section.where}: type {_shown(kind)} is not supported; supported are default, linear and llama3")


def _layer_attention(raw: Mapping[str, Any], read: _Reader, layers: int) -> tuple[LayerAttention, ...]:
    """Of each layer; empty where all are plain."""
    rotary = _rotary_layers(raw, read, layers)
    sliding = _sliding_layers(raw, read, rotary)
    window = read.integer("sliding_window") if any(sliding) else None
    if all(rotary) and window is None:
        return ()
    return tuple(
        LayerAttention(rotates, window if slides else None) for rotates, slides in zip(rotary, sliding, strict=True)
    )


def _rotary_layers(raw: Mapping[str, Any], read: _Reader, layers: int) -> list[bool]:
    """Which layers rotate: SmolLM3 files say so layer by layer (1 or 0), or leave out every fourth one."""
    if raw["model_type"] != "smollm3":
        return [True] * layers
    listed = raw.get("no_rope_layers")
    if listed is None:
        interval = read.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) < layers or any(rotates not in (0, 1) for rotates in listed):
        what = f"a list of 0 and 1 for each of the {layers} layers"
        raise PpsdError(f"{read.where}: no_rope_layers must be {what}, not {_shown(listed)}")
    return [bool(rotates) for rotates in listed[:layers]]


def _sliding_layers(raw: Mapping[str, Any], read: _Reader, rotary: list[bool]) -> list[bool]:
    """Which layers see a window of `sliding_window` positions alone."""
    layers, family = len(rotary), raw["model_type"]
    if family == "mistral":  # all, as transformers has it, whatever layer_types says
        return [raw.get("sliding_window") is not None] * layers
    in_use = read.boolean("use_sliding_window", False) and raw.get("sliding_window") is not None
    types = raw.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
            what = f"full_attention or sliding_attention for each of the {layers} layers"
            raise PpsdError(f"{read.where}: layer_types must name {what}, not {_shown(types)}")
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
    checks = {
        "hidden_act": raw.get("hidden_act", "silu") in ("silu", "swish"),
        "mlp_bias": not raw.get("mlp_bias"),
        "quantization_config": not raw.get("quantization_config"),
        "partial_rotary_factor": raw.get("partial_rotary_factor") in (None, 1, 1.0),
        "sliding_window": raw["model_type"] != "llama"
        or not raw.get("sliding_window")
        or not raw.get("use_sliding_window", True),
        "num_experts": not raw.get("num_experts") and not raw.get("num_local_experts"),
    }
    for key, supported in checks.items():
        if not supported:
            raise PpsdError(f"{where}: {key} = {_shown(raw.get(key))} is not supported")


def _id_tuple(value: Any, where: object) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise PpsdError(f"{where}: a token id must be an integer or a list of integers, not {_shown(value)}")
    return tuple(ids)
