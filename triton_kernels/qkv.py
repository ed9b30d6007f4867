"""RMSNorm, the three attention projections, rotation, and the KV cache's new rows: one kernel.

    (q | k | v) = norm(x) W^T (+ bias)          x [16 or capacity, hidden], W [(heads + 2 kv_heads) * head_dim, hidden]
    q, k rotated to positions start + r:  (a, b) -> (a cos - b sin, b cos + a sin), channels c and c + head_dim / 2
    queries [16, heads, head_dim];  keys, values [kv_heads, capacity, head_dim] at the rows' positions

A program computes BLOCK / 2 channels of a head and their rotary partners, so that the rotation stays inside it and the
checkpoint's rows keep their order. v goes the same way, unrotated.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear import MAX_REGISTERS, Tiling, Weight, at_positions, dot_type, linear_twin, multiply, tiling
from .state import MAX_ROWS, START

_START = tl.constexpr(START)
_MAX_ROWS = tl.constexpr(MAX_ROWS)


@triton.jit
def qkv_kernel(
    x, norm, eps, weight, scale, bias, cosines, sines, queries, keys, values, state, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
    BIAS: tl.constexpr, X_AT: tl.constexpr, INT8: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (outputs / BLOCK): BLOCK / 2 channels of a head with their partners."""
    HALF: tl.constexpr = BLOCK // 2
    PARTS: tl.constexpr = HEAD_DIM // BLOCK
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    lane = tl.arange(0, BLOCK)
    outputs = head * HEAD_DIM + part * HALF + lane % HALF + (lane // HALF) * (HEAD_DIM // 2)
    y, rows = multiply(
        x, norm, eps, weight, scale, outputs, lane < BLOCK, state, 0,
        INPUTS, STEPS, SLICES, SLICE, True, X_AT, INT8, DOT, PDL,
    )  # fmt: skip
    if BIAS:
        y += tl.load(bias + outputs).to(tl.float32)[:, None]
    a, b = tl.split(y.reshape([2, HALF, _MAX_ROWS]).permute(1, 2, 0))  # [HALF, 16] each
    channel = (part * HALF + tl.arange(0, HALF))[:, None]
    row = tl.arange(0, _MAX_ROWS)[None, :]
    position = tl.load(state + _START, volatile=True) + row  # again: it need not wait in a register meanwhile
    live = (row < rows) & (channel < HEAD_DIM)
    if head < HEADS + KV_HEADS:
        angle = position * (HEAD_DIM // 2) + channel
        cos, sin = tl.load(cosines + angle, mask=live, other=0), tl.load(sines + angle, mask=live, other=0)
        a, b = a * cos - b * sin, b * cos + a * sin
    if head < HEADS:
        query = queries + (row * HEADS + head) * HEAD_DIM + channel
        tl.store(query, a.to(queries.dtype.element_ty), mask=live)
        tl.store(query + HEAD_DIM // 2, b.to(queries.dtype.element_ty), mask=live)
    else:
        kv_head = (head - HEADS) % KV_HEADS
        cache = keys if head < HEADS + KV_HEADS else values
        cell = cache + (kv_head.to(tl.int64) * capacity + position) * HEAD_DIM + channel
        tl.store(cell, a.to(keys.dtype.element_ty), mask=live)
        tl.store(cell + HEAD_DIM // 2, b.to(keys.dtype.element_ty), mask=live)


def qkv_tiling(weight: Weight, head_dim: int) -> Tiling:
    cut = tiling(weight)
    return cut._replace(block=cut.block if head_dim % cut.block == 0 else 16, splits=1)


def qkv(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None, cosines: Tensor, sines: Tensor,
    queries: Tensor, keys: Tensor, values: Tensor, state: Tensor, *, pdl: bool = False,
) -> None:  # fmt: skip
    """queries [16, heads, head_dim]; keys, values [kv_heads, capacity, head_dim]; tables [capacity, head_dim / 2]."""
    heads, head_dim = queries.shape[1:]
    assert head_dim % 16 == 0, "a head's channels are computed sixteen at a time"
    cut = qkv_tiling(weight, head_dim)
    qkv_kernel[(weight.outputs // cut.block,)](
        x, norm, eps, weight.values, weight.scales, bias, cosines, sines, queries, keys, values, state, keys.shape[1],
        HEADS=heads, KV_HEADS=keys.shape[0], HEAD_DIM=head_dim, INPUTS=weight.inputs, BLOCK=cut.block,
        STEPS=cut.steps(weight.inputs), SLICES=cut.slices, SLICE=cut.slice, BIAS=bias is not None,
        X_AT=at_positions(x), INT8=weight.scales is not None, DOT=dot_type(weight, x), PDL=pdl,
        num_warps=cut.warps, num_stages=cut.stages, maxnreg=MAX_REGISTERS, launch_pdl=pdl,
    )  # fmt: skip


def qkv_twin(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None, cosines: Tensor, sines: Tensor,
    heads: int, kv_heads: int, start: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [rows, hidden] -> float32 queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim]."""
    y = linear_twin(x, weight, norm=norm, eps=eps, bias=bias).unflatten(1, (heads + 2 * kv_heads, -1))
    where = slice(start, start + len(x))
    cos, sin = cosines[where, None], sines[where, None]
    a, b = y.chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return turned[:, :heads], turned[:, heads : heads + kv_heads], y[:, heads + kv_heads :]
