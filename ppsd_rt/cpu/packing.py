"""A checkpoint's weights, packed for the C++ kernels."""

from .. import _native
from ..errors import PpsdError
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from .formats import fits_int8, refuses, rotary_of, shape_of
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


def pack_eagle3(model: _native.Model, file: Eagle3File, kv_dtype: str, threads: int) -> _native.Model:
    """The model with an EAGLE-3 head, packed in the model's formats.

    Raises PpsdError for a shape that the kernels do not take, and RuntimeError, one line, for weights that are not
    finite.
    """
    eagle = file.eagle
    reason = refuses(eagle.layer)
    if reason is None and kv_dtype == "int8" and not fits_int8(eagle.layer.head_dim):
        reason = f"its head_dim {eagle.layer.head_dim} needs --kv-dtype bfloat16"
    if reason:
        raise PpsdError(f"the cpu backend cannot run this exit head: {reason}; use --backend torch")
    return model.with_eagle3(
        shape=shape_of(eagle.layer),
        rotary=rotary_of(eagle.layer),
        taps=eagle.taps,
        norm_before_residual=eagle.norm_before_residual,
        norm_output=eagle.norm_output,
        tensors=dict(file.tensors),
        draft_ids=[] if file.draft_ids is None else file.draft_ids.tolist(),
        threads=threads,
    )
