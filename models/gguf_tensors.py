"""The weights of a GGUF file, where they lie: mapped, and decoded when somebody asks for one."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ..errors import PpsdError
from .files import drop_pages
from .gguf_file import BY_TABLE
from .gguf_model import GgufModel, check_finite, decode, open_gguf
from .stored import Blocks, Floats


def open_tensors(path: Path) -> "GgufTensors":
    """Raises PpsdError, one line that names the file and what is wrong with it."""
    try:
        return GgufTensors(open_gguf(path))
    except OSError as error:
        raise PpsdError(f"{path} cannot be read: {error.strerror or error}") from None


class GgufTensors(Mapping[str, Floats]):
    """Tensors by their Hugging Face names, in Hugging Face's row order.

    Each look-up decodes a tensor to float32, a copy that belongs to the caller. It raises PpsdError that names the file
    and the tensor, where values are NaN or infinite.
    """

    def __init__(self, model: GgufModel) -> None:
        self.model, self._gguf = model, model.gguf
        self._weights = {weight.key: weight for weight in model.weights}
        paths = {weight.tensor.path for weight in model.weights}
        self._files = {path: np.memmap(path, np.uint8, "r") for path in paths}

    def __getitem__(self, name: str) -> Floats:
        weight = self._weights[name]
        values = weight.decode(self._stored(name)).reshape(weight.tensor.shape)
        check_finite(self._gguf, weight.tensor, values)
        return values.copy() if np.may_share_memory(values, self._files[weight.tensor.path]) else values

    def __contains__(self, name: object) -> bool:  # Mapping's own would decode it
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def kinds(self) -> set[str]:
        """llama.cpp's names of the types that are stored."""
        return {weight.tensor.kind.name for weight in self._weights.values()}

    def values_at(self, name: str, places: npt.NDArray[np.int64]) -> Floats:
        """The values at some places of the tensor as one long row; only the rows around them are decoded."""
        weight = self._weights[name]
        if len(weight.tensor.shape) == 1:
            return self[name][places]
        rows, columns = np.divmod(places, weight.tensor.shape[1])
        if weight.head_dim:
            heads, channels = np.divmod(rows, weight.head_dim)
            second, pairs = np.divmod(channels, weight.head_dim // 2)
            rows = heads * weight.head_dim + 2 * pairs + second
        stored = self._stored(name)
        values = decode(stored[rows], weight.tensor)
        drop_pages(stored)
        return values[np.arange(len(places)), columns]

    def blocks(self) -> dict[str, Blocks]:
        """The matrices that the C++ extension decodes, as they lie in the file."""
        return {
            name: Blocks(self._stored(name), weight.tensor.kind.name, weight.tensor.shape[1], weight.head_dim)
            for name, weight in self._weights.items()
            if len(weight.tensor.shape) == 2 and weight.tensor.kind not in BY_TABLE
        }

    def _stored(self, name: str) -> npt.NDArray[np.uint8]:
        """[rows, bytes of a row], in the order of the file."""
        tensor = self._weights[name].tensor
        size = tensor.rows * tensor.row_bytes
        return self._files[tensor.path][tensor.start : tensor.start + size].reshape(tensor.rows, tensor.row_bytes)
