"""Gumbel noise keyed by (seed, position, token id): the device's csrc/core/noise.h.

`uniform` gives the CPU's numbers to the bit. The logarithm is ours (Cephes, as in csrc/cpu/kernels/vector_math.h): the
GPU's own fast one loses the digits of numbers near 1, and the interpreter has no other.
"""

import triton
import triton.language as tl


@triton.jit
def uniform(seed_low, seed_high, position, ids):
    """float32 in (0, 1). The seed's words are uint32; position and ids int32 of one shape."""
    zero = ids.to(tl.uint32) * 0
    words, _, _, _ = tl.philox_impl(
        ids.to(tl.uint32), position.to(tl.uint32) + zero, zero, zero, seed_low + zero, seed_high + zero
    )
    return tl.minimum(words.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)


@triton.jit
def coin_word(seed_low, seed_high, position):
    """uint32, one for a position: what oracles toss (`coin` of csrc/core/noise.h, its first word)."""
    zero = position.to(tl.uint32) * 0
    words, _, _, _ = tl.philox_impl(zero, position.to(tl.uint32), zero + 2, zero, seed_low + zero, seed_high + zero)
    return words


@triton.jit
def log(x):
    """Natural logarithm of normal positive float32, to an ulp or two."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)  # [0.5, 1)
    small = mantissa < 0.707106781186547524
    exponent = ((bits >> 23) - 126).to(tl.float32) - tl.where(small, 1.0, 0.0)
    m = mantissa + tl.where(small, mantissa, 0.0) - 1.0
    z = m * m
    p = m * 7.0376836292e-2 - 1.1514610310e-1
    p = p * m + 1.1676998740e-1
    p = p * m - 1.2420140846e-1
    p = p * m + 1.4249322787e-1
    p = p * m - 1.6668057665e-1
    p = p * m + 2.0000714765e-1
    p = p * m - 2.4999993993e-1
    p = p * m + 3.3333331174e-1
    return m + (p * m * z - exponent * 2.12194440e-4 - 0.5 * z) + exponent * 0.693359375


@triton.jit
def gumbel(seed_low, seed_high, position, ids):
    """-log(-log1p(-u)), without losing small u, which make the winners (Kahan)."""
    u = uniform(seed_low, seed_high, position, ids)
    w = 1.0 - u
    gone = 1.0 - w  # what of u is left in w; w is u's complement where nothing is
    scaled = log(w) * u / tl.maximum(gone, 2.0**-40)
    return -log(-tl.where(gone > 0, scaled, -u))
