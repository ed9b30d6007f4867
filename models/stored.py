"""How tensors lie in their files: numbers that numpy has no dtype for, blocks, uniform quantisation."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")  # blocks at even distances (csrc/cpu/gguf_blocks.cpp)


def as_float32(tensor: Array) -> npt.NDArray[np.float32]:
    """A copy in float32, whatever the tensor is stored as; uint16 are the bits of bfloat16."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)


def bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """To bfloat16, to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


class Stored(NamedTuple):
    """A tensor of a safetensors file. data: in numpy's dtype of the same size where it has none of that name."""

    data: Array
    dtype: str


class Decoded(Mapping[str, Array]):
    """Tensors by name, each decoded when it is looked up; `_of` has what they are decoded from."""

    _of: Mapping[str, Any]

    def __contains__(self, name: object) -> bool:  # Mapping's own would decode it
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)


class Blocks(NamedTuple):
    """A matrix that is stored in blocks of values with common scales.

    data: [rows, bytes of a row], mapped from the file. kind: llama.cpp's name of the type, such as `Q4_K`.
    neighbours: head_dim, where the channels that rotate together lie side by side, as in q and k of some GGUF files; 0:
    half a head apart, as in Hugging Face's.
    """

    data: npt.NDArray[np.uint8]
    kind: str
    columns: int
    neighbours: int


@dataclass(frozen=True)
class Uniform:
    """A matrix [outputs, inputs] whose values are `q * scale + minimum`, as its file has them.

    q: uint8 [outputs, inputs], of 4 bits (0 to 15) or 8. scale, minimum: float32 [outputs, inputs / group]; the minimum
    is what q = 0 stands for: `-zero_point * scale` in AWQ, GPTQ and compressed-tensors, `-8 * scale` in Q4_0.
    group: inputs that share a scale, one after the other; it divides their number.
    """

    q: npt.NDArray[np.uint8]
    scale: npt.NDArray[np.float32]
    minimum: npt.NDArray[np.float32]
    group: int

    def blocks(self) -> npt.NDArray[np.uint8]:
        """In llama.cpp's Q4_1, [outputs, bytes of a row]: what is of four bits at most, in groups of a multiple of 32.

        Scales and minima are rounded to float16: by 0.05 % at most, where they are above 6e-5.
        """
        rows, inputs = self.q.shape
        out = np.empty((rows, inputs // 32, 20), np.uint8)
        with np.errstate(over="ignore"):  # who reads them refuses what is infinite
            halves = np.stack((self.scale, self.minimum), axis=-1).astype(np.float16)
        out[:, :, :4] = np.repeat(halves, self.group // 32, axis=1).view(np.uint8)
        codes = self.q.reshape(rows, -1, 2, 16)
        np.bitwise_or(codes[:, :, 0], codes[:, :, 1] << 4, out=out[:, :, 4:])
        return out.reshape(rows, -1)
