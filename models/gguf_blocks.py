"""A matrix that is stored in blocks of values with common scales."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")  # at even distances (csrc/cpu/gguf_blocks.cpp)


class Blocks(NamedTuple):
    """data: [rows, bytes of a row], mapped from the file. kind: llama.cpp's name of the type, such as `Q4_K`.

    neighbours: head_dim, where the channels that rotate together lie side by side, as in q and k of some GGUF files; 0:
    half a head apart, as in Hugging Face's.
    """

    data: npt.NDArray[np.uint8]
    kind: str
    columns: int
    neighbours: int
