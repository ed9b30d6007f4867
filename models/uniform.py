"""Uniform quantisation of a matrix: whole numbers, and one scale and one offset for each group of inputs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Uniform:
    """A matrix [outputs, inputs] whose values are `q * scale + minimum`, as its file has them.

    q: uint8 [outputs, inputs], of 4 bits (0 to 15) or 8. scale, minimum: float32 [outputs, inputs / group]; the minimum
    is what q = 0 stands for: `-zero_point * scale` in AWQ, GPTQ and compressed-tensors, `-8 * scale` in Q4_0.
    group: inputs that share a scale, one after the other; it divides their number.
    """

    q: NDArray[np.uint8]
    scale: NDArray[np.float32]
    minimum: NDArray[np.float32]
    group: int

    def blocks(self) -> NDArray[np.uint8]:
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
