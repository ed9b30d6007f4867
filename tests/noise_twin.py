"""The readable twin of csrc/core/noise.h and triton_kernels/noise.py: noise that depends on its place alone.

Draft and verification must see the same noise for the same token at the same position (shared-noise coupling, Daliri
et al., arXiv 2408.07978), whatever the order and the number of rows they are computed in. So there is no generator
state: a number is a hash of its place, by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC 2011) with

    key = (key low, key high)    counter = (token id, position, stream, 0)    number = first word of the output

Streams keep uses apart: 0 is sampling, 1 the stop rules.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

SAMPLING = 0

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF

Words = npt.NDArray[np.uint64]  # 32-bit words in 64-bit lanes, so that products do not overflow


def philox(key: tuple[int, int], counter: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10: four output words for a counter of four words, each an int or an array of `Words`."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int, ids: npt.NDArray[np.integer], stream: int = SAMPLING) -> npt.NDArray[np.float32]:
    """-> [len(ids)] float32 in (0, 1), equal to the bit on every backend.

    The 32-bit word is converted to float32 *before* scaling: small numbers keep all their precision, and it is the
    small ones that `gumbel` turns into the winners.
    """
    words: Words = philox(_key(seed), (ids.astype(np.uint64), position, stream, 0))[0]
    scaled = words.astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    return np.minimum(scaled, np.float32(1 - 2.0**-24))


def gumbel(seed: int, position: int, ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
    """-> [len(ids)] float32 of standard Gumbel noise: argmax(logits + gumbel) samples softmax(logits)."""
    return -np.log(-np.log1p(-uniform(seed, position, ids)))


def _key(seed: int) -> tuple[int, int]:
    return seed & _MASK, (seed >> 32) & _MASK
