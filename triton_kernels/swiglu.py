"""RMSNorm, gate and up projections, SwiGLU: one kernel.

    out = silu(norm(x) G^T) * (norm(x) U^T)      x [16 or capacity, hidden], out [16, inner]

W = (G | U) [2 * inner, hidden].

A program computes BLOCK / 2 rows of G and the same rows of U.
"""

import triton
import triton.language as tl
from torch import Tensor

from .linear import Weight, at_positions, below, launch, multiply, program_outputs, tiles_of, tiling
from .state import MAX_ROWS, WORDS
from .texts import Texts, tile_of_program

_MAX_ROWS, _WORDS = tl.constexpr(MAX_ROWS), tl.constexpr(WORDS)


@triton.jit
def swiglu_kernel(
    x, norm, eps, weight, scale, out, state, W: tl.constexpr, X_AT: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Grid (TILES * inner / (W.block / 2))."""
    HALF: tl.constexpr = W.block // 2
    INNER: tl.constexpr = W.outputs // 2
    tile, program = tile_of_program(TILES)
    x += tile * (_MAX_ROWS * W.inputs)
    out += tile * (_MAX_ROWS * INNER)
    first, lane = program * HALF, program_outputs(W)
    inner = first + lane % HALF
    y, rows = multiply(
        x, norm, eps, weight, scale, inner + (lane // HALF) * INNER, below(inner, INNER, HALF), state + tile * _WORDS,
        0, W.inputs, W, True, X_AT,
    )  # fmt: skip
    gate, up = tl.split(y.reshape([2, HALF, _MAX_ROWS]).permute(1, 2, 0))  # [HALF, 16] each
    row = tl.arange(0, _MAX_ROWS)[None, :]
    inner = (first + tl.arange(0, HALF))[:, None]
    mixed = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * INNER + inner, mixed.to(out.dtype.element_ty), mask=(row < rows) & (inner < INNER))


def swiglu(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, out: Tensor, state: Tensor, *,
    texts: Texts | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """out [16, inner] for the first state[ROWS] rows. texts: as in `linear`."""
    cut = tiling(weight)._replace(splits=1)
    swiglu_kernel[(tiles_of(texts) * triton.cdiv(weight.outputs // 2, cut.block // 2),)](
        x, norm, eps, weight.values, weight.scales, out, state,
        X_AT=at_positions(x, texts), TILES=tiles_of(texts), **launch(weight, cut, x, pdl),
    )  # fmt: skip
