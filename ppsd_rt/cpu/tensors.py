"""A checkpoint's tensors as the C++ extension takes them."""

from .. import _native
from ..models.checkpoint import Array, Checkpoint


def packable(checkpoint: Checkpoint) -> dict[str, Array | _native.Blocks]:
    """Each where it lies in its file; vectors of a .gguf file decoded."""
    dense = {name: checkpoint.tensors[name] for name in checkpoint.tensors if name not in checkpoint.blocks}
    return {**dense, **{name: _native.Blocks(*blocks) for name, blocks in checkpoint.blocks.items()}}
