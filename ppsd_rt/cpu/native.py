"""The C++ extension: a checkpoint's tensors as it takes them, and what it says where it fails, as one line."""

from collections.abc import Iterator
from contextlib import contextmanager

from .. import _native
from ..errors import PpsdError
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


@contextmanager
def one_line(what: str, threads: int, mend: str = "free some, or choose a smaller --dtype") -> Iterator[None]:
    """PpsdError for what the extension says, or lacks to `what`; mend: what helps against a lack of memory."""
    try:
        yield
    except MemoryError:
        raise PpsdError(f"not enough memory to {what}: {mend}") from None
    except _native.NoThread as error:
        raise PpsdError(f"cannot {what} with {threads} threads: {error}") from None
    except RuntimeError as error:
        raise PpsdError(f"cannot {what}: {error}") from None
