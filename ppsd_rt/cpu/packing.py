"""A checkpoint's weights, packed for the C++ kernels."""

from .. import _native
from ..models.checkpoint import Checkpoint
from .formats import rotary_of, shape_of
from .importance import importance_for
from .tensors import packable


def pack_model(
    checkpoint: Checkpoint,
    dtype: str,
    kv_dtype: str,
    threads: int,
    *,
    first: int = 0,
    last: int = -1,
    lm_head: bool = True,
) -> _native.Model:
    """Layers [first, last) (-1: to the end), and the LM head if wanted.

    Raises RuntimeError, one line, for weights that are not finite, and NoThread.
    """
    return _native.Model(
        shape_of(checkpoint.config),
        packable(checkpoint, dtype),
        rotary_of(checkpoint.config),
        dtype,
        kv_dtype,
        threads,
        first=first,
        last=last,
        lm_head=lm_head,
        importance=None if dtype == "int4" and checkpoint.in_four_bits else importance_for(dtype, checkpoint, threads),
    )
