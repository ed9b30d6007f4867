"""A checkpoint's tensors as the C++ extension takes them."""

from .. import _native
from ..models.checkpoint import Checkpoint
from ..models.stored import Array


def packable(checkpoint: Checkpoint, dtype: str) -> dict[str, Array | _native.Blocks]:
    """Each where it lies in its file. Vectors of a .gguf file are decoded, and so are matrices of a quantised folder.

    dtype: what they will be packed as. For int4, a folder's four bits are put into blocks and not decoded.
    """
    packed: dict[str, Array | _native.Blocks] = {
        name: _native.Blocks(*each) for name, each in checkpoint.blocks.items()
    }
    if dtype == "int4":
        packed |= {name: four_bits(checkpoint, name) for name in checkpoint.in_four_bits - packed.keys()}
    return packed | {name: checkpoint.tensors[name] for name in checkpoint.tensors if name not in packed}


def four_bits(checkpoint: Checkpoint, name: str) -> _native.Blocks:
    """One of `in_four_bits`."""
    if name in checkpoint.blocks:
        return _native.Blocks(*checkpoint.blocks[name])
    matrix = checkpoint.quantised(name)
    assert matrix is not None
    return _native.Blocks(matrix.blocks(), "Q4_1", matrix.q.shape[1])
