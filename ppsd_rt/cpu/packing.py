"""A checkpoint's weights, packed for the C++ kernels."""

from .. import _native
from ..errors import PpsdError
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from ..models.head_file import HeadFile
from .formats import fits_int8, refuses, rotary_of
from .importance import MEASURE, importance_for
from .native import one_line, packable
from .packed import NO_FILE, packed


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

    def pack(file: _native.PackedFile | None) -> _native.Model:
        rounds = dtype == "int4" and not checkpoint.in_four_bits and file is None
        return _native.Model(
            checkpoint.config,
            packable(checkpoint, dtype),
            rotary_of(checkpoint.config),
            dtype,
            kv_dtype,
            threads,
            first=first,
            last=last,
            lm_head=lm_head,
            importance=importance_for(dtype, checkpoint, threads) if rounds else None,
            file=file or NO_FILE,
        )

    how = {"dtype": dtype, "layers": [first, last], "lm_head": lm_head, "importance": MEASURE}
    return packed(checkpoint.files, how, pack)


def pack_shipped(
    model: _native.Model, file: HeadFile, checkpoint: Checkpoint, dtypes: tuple[str, str], threads: int
) -> _native.Model:
    """As `pack_head`, but mapped where that can be. dtypes: of the model and of its KV cache."""
    if file.path is None:
        return pack_head(model, file, dtypes[1], threads)
    how = {"dtype": dtypes[0], "head": str(file.path.resolve())}
    return packed([*checkpoint.files, file.path], how, lambda made: pack_head(model, file, dtypes[1], threads, made))


def pack_head(
    model: _native.Model, file: HeadFile, kv_dtype: str, threads: int, made: _native.PackedFile | None = None
) -> _native.Model:
    """The model with this exit head; an EAGLE-3 head is packed in the model's formats. made: what packing it has made.

    Raises PpsdError, one line, for weights that are not finite, and for a shape that the kernels do not take.
    """
    draft_ids = [] if file.draft_ids is None else file.draft_ids.tolist()
    made = made or NO_FILE
    with one_line("pack the exit head", threads):
        if not isinstance(file, Eagle3File):
            return model.with_exit_head(file.info.exit_layer, dict(file.whole), draft_ids, threads, made, file.info.tap)
        eagle = file.eagle
        reason = refuses(eagle.layer)
        if reason is None and kv_dtype == "int8" and not fits_int8(eagle.layer.head_dim):
            reason = f"its head_dim {eagle.layer.head_dim} needs --kv-dtype bfloat16"
        if reason:
            raise PpsdError(f"the cpu backend cannot run this exit head: {reason}; use --backend torch")
        return model.with_eagle3(
            shape=eagle.layer,
            rotary=rotary_of(eagle.layer),
            taps=eagle.taps,
            norm_before_residual=eagle.norm_before_residual,
            norm_output=eagle.norm_output,
            tensors=dict(file.tensors),
            draft_ids=draft_ids,
            threads=threads,
            file=made,
        )
