"""`LlamaConfig`: what the runtime needs to know of a model, read from a Hugging Face `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PpsdError
from .files import one_line, read_json_object

# model_type -> which projections carry a bias when the file itself does not say.
_QKV_BIAS_BY_DEFAULT = {"llama": False, "mistral": False, "qwen2": True}

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
class LlamaConfig:
    """Shape and constants of a Llama-family model. Field names are those of `config.json`.

    `attention_bias` speaks of q, k and v; `attention_output_bias` of o (Llama files with `attention_bias` have both,
    Qwen2 files only the former).
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
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_values(self) -> int:
        """Numbers that a row has in the KV caches of all layers together."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim

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
        read = _Reader(raw, where)
        model_type = raw.get("model_type")
        if not isinstance(model_type, str) or model_type not in _QKV_BIAS_BY_DEFAULT:
            known = ", ".join(_QKV_BIAS_BY_DEFAULT)
            raise PpsdError(f"{where}: model_type {_shown(model_type)} is not supported; supported are {known}")
        _refuse_unsupported(raw, where)

        hidden_size = read.integer("hidden_size")
        heads = read.integer("num_attention_heads")
        bias = read.boolean("attention_bias", _QKV_BIAS_BY_DEFAULT[model_type])
        config = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
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

    def integer(self, key: str, default: int | None = None) -> int:
        value, most = self._value(key, default), _MOST[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise PpsdError(f"{self.where}: {key} must be a whole number from 1 to {most}, not {_shown(value)}")
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


def _refuse_unsupported(raw: Mapping[str, Any], where: str) -> None:
    """Settings that would change the arithmetic, and that this runtime does not compute."""
    checks = {
        "hidden_act": raw.get("hidden_act", "silu") in ("silu", "swish"),
        "mlp_bias": not raw.get("mlp_bias"),
        "quantization_config": not raw.get("quantization_config"),
        "partial_rotary_factor": raw.get("partial_rotary_factor") in (None, 1, 1.0),
        "sliding_window": raw.get("sliding_window") is None or raw.get("use_sliding_window") is False,
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
