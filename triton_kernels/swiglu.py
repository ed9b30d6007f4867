"""RMSNorm, gate and up projections, SwiGLU: one kernel.

    out = silu(norm(x) G^T) * (norm(x) U^T)      x [16 or capacity, hidden], out [16, inner]

W = (G | U) [2 * inner, hidden].

A program computes BLOCK / 2 rows of G and the same rows of U.
"""

import triton
import triton.language as tl
from torch import Tensor

from .linear import (
    Weight,
    at_positions,
    below,
    dot_type,
    launch,
    multiply,
    program_outputs,
    tiles_of,
    tiling,
)
from .state import MAX_ROWS, WORDS
from .texts import Texts

_MAX_ROWS, _WORDS = tl.constexpr(MAX_ROWS), tl.constexpr(WORDS)


@triton.jit
def swiglu_kernel(
    x, norm, eps, weight, scale, out, state,
    INNER: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, PARTS: tl.constexpr, SLICES: tl.constexpr, RUN: tl.constexpr,
    EVEN: tl.constexpr, FORMAT: tl.constexpr, X_AT: tl.constexpr, TILES: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (TILES * inner / (BLOCK / 2))."""
    HALF: tl.constexpr = BLOCK // 2
    program = tl.program_id(0)
    if TILES > 1:
        tile, program = program % TILES, program // TILES
        state += tile * _WORDS
        x += tile * (_MAX_ROWS * INPUTS)
        out += tile * (_MAX_ROWS * INNER)
    first, lane = program * HALF, program_outputs(BLOCK, PARTS, SLICES)
    inner = first + lane % HALF
    y, rows = multiply(
        x, norm, eps, weight, scale, inner + (lane // HALF) * INNER, below(inner, INNER, HALF), state, 0, INPUTS,
        INPUTS, STEPS, AHEAD, PARTS, SLICES, RUN, EVEN, FORMAT, True, X_AT, DOT, PDL,
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
    inner, cut = weight.outputs // 2, tiling(weight)._replace(splits=1)
    swiglu_kernel[(tiles_of(texts) * triton.cdiv(inner, cut.block // 2),)](
        x, norm, eps, weight.values, weight.scales, out, state,
        INNER=inner, INPUTS=weight.inputs, X_AT=at_positions(x, texts), TILES=tiles_of(texts), DOT=dot_type(weight),
        PDL=pdl,
        **launch(weight, cut, x, pdl),
    )  # fmt: skip
