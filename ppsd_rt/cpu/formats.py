"""What the C++ kernels can run: shapes, and the formats of weights and of the KV cache."""

from typing import TYPE_CHECKING

from ..errors import UsageError
from ..models.checkpoint import Checkpoint
from ..models.config import LlamaConfig
from ..models.rotary import attention_factor, inverse_frequencies
from ..printable import quoted

if TYPE_CHECKING:
    from .. import _native

FORMATS = ("float32", "bfloat16", "int8", "int4")
DEFAULT_FORMAT = "int8"
MOST_NORMED = 256  # channels of a head whose queries and keys go through a norm
KV_FORMATS = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.125}  # bytes of a value, its part of the scales included


def rotary_of(config: LlamaConfig) -> "_native.Rotary":
    from .. import _native

    scaling, plain = config.rope_scaling, inverse_frequencies(config).tolist()
    factor = attention_factor(config)
    if scaling is None or not scaling.by_length:
        return _native.Rotary(plain, factor)
    original = scaling.original_max_position_embeddings
    if scaling.kind == "dynamic":
        return _native.Rotary(plain, factor, original, theta=config.rope_theta, growth=scaling.factor)
    return _native.Rotary(plain, factor, original, inverse_frequencies(config, original + 1).tolist())


def format_for(checkpoint: Checkpoint, dtype: str) -> str:
    """What a model's weights become; `auto`: what is nearest to its file, int4 for four bits, and int8 for all else."""
    if dtype != "auto":
        return dtype
    return "int4" if checkpoint.in_four_bits else DEFAULT_FORMAT


def refuses(config: LlamaConfig) -> str | None:
    """Why the kernels cannot run a model of this shape, or None."""
    for name, value, step in (
        ("hidden_size", config.hidden_size, 32),
        ("intermediate_size", config.intermediate_size, 32),
        ("num_attention_heads * head_dim", config.num_attention_heads * config.head_dim, 32),
        ("head_dim", config.head_dim, 16),
    ):
        if value % step:
            return f"{name} {value} is not a multiple of {step}"
    if config.qk_norm and config.head_dim > MOST_NORMED:
        return f"head_dim {config.head_dim} is above {MOST_NORMED}, the most that norms of queries and keys take"
    return None


def fits_int8(head_dim: int) -> bool:
    """Can keys and values be kept as int8?"""
    return head_dim % 32 == 0 and head_dim <= 256


def kv_format(dtype: str, head_dim: int, wanted: str = "auto") -> str:
    """What keys and values are kept as beside weights of `dtype`."""
    if wanted not in ("auto", *KV_FORMATS):
        raise UsageError(f"kv_dtype {quoted(wanted)} is unknown; dtypes are auto, {', '.join(KV_FORMATS)}")
    fits = fits_int8(head_dim)
    if wanted == "int8" and not fits:
        raise UsageError(f"an int8 KV cache needs a head_dim that is a multiple of 32 up to 256, not {head_dim}")
    if wanted != "auto":
        return wanted
    if dtype in ("float32", "bfloat16"):
        return dtype
    return "int8" if fits else "bfloat16"
