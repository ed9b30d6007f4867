"""RMSNorm, the three attention projections, norms of heads, rotation, and the KV cache's new rows: one kernel.

    (q | k | v) = norm(x) W^T (+ bias)          x [16 or capacity, hidden], W [(heads + 2 kv_heads) * head_dim, hidden]
    q, k rotated to positions start + r:  (a, b) -> (a cos - b sin, b cos + a sin), channels c and c + head_dim / 2
    queries [16, heads, head_dim];  keys and values go to the cache (cache.py)

int4 leaves keys and values int8, for most of the error would be theirs: W is then of the queries alone, and the rest is
a matrix of its own, which the programs of keys and values multiply.

A program computes BLOCK / 2 channels of a head and their rotary partners, so that the rotation stays inside it and the
checkpoint's rows keep their order. v goes the same way, unrotated.

With norms of heads, q and k are first divided by the root mean square of their head's channels. A program then computes
a whole head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cache import cell_of_seat, heads_of
from .linear import (
    RUNS,
    Tiling,
    Weight,
    at_positions,
    below,
    block_of,
    launch,
    multiply,
    program_outputs,
    tiles_of,
    tiling_of,
)
from .state import MAX_ROWS, WORDS
from .texts import TEXT_WORDS, Texts, stands_at, tile_of_program

_WORDS, _MAX_ROWS, _TEXT_WORDS = tl.constexpr(WORDS), tl.constexpr(MAX_ROWS), tl.constexpr(TEXT_WORDS)


@triton.jit
def normed(a, b, norm, channel, eps, HEAD_DIM: tl.constexpr):
    """The two halves [HEAD_DIM / 2, rows] of a head, times `norm` over the root mean square of each row's channels."""
    scale = tl.rsqrt(tl.sum(a * a + b * b, axis=0) / HEAD_DIM + eps)[None, :]
    first, second = tl.load(norm + channel), tl.load(norm + HEAD_DIM // 2 + channel)
    return a * scale * first.to(tl.float32), b * scale * second.to(tl.float32)


@triton.jit
def turned(a, b, rotations, position, channel, live, HEAD_DIM: tl.constexpr):
    """The same, rotated to the rows' positions. rotations: of each position cosines, then sines."""
    angle = rotations + position * HEAD_DIM + channel
    cos, sin = tl.load(angle, mask=live, other=0), tl.load(angle + HEAD_DIM // 2, mask=live, other=0)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def left(cell, a, b, live, HEAD_DIM: tl.constexpr):
    tl.store(cell, a.to(cell.dtype.element_ty), mask=live)
    tl.store(cell + HEAD_DIM // 2, b.to(cell.dtype.element_ty), mask=live)


@triton.jit
def qkv_kernel(
    x, norm, eps, weight, scale, kv_weight, kv_scale, bias, norms, rotations, queries, cache, state, texts,
    HEADS: tl.constexpr, W: tl.constexpr, KV: tl.constexpr, X_AT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid (TILES * outputs / W.block): W.block / 2 channels of a head with their partners; with `norms` a whole head.

    KV: of the matrix of keys and values, where these have one of their own, else None.
    """
    HALF: tl.constexpr = W.block // 2
    OF_HEAD: tl.constexpr = HEADS.dim // W.block
    tile, program = tile_of_program(TILES)
    state += tile * _WORDS
    x += tile * (_MAX_ROWS * W.inputs)
    queries += tile * (_MAX_ROWS * HEADS.queries * HEADS.dim)
    if texts is not None:
        texts += tile * (_MAX_ROWS * _TEXT_WORDS)
    head, part = program // OF_HEAD, program % OF_HEAD
    first = head * HEADS.dim + part * HALF
    lane = program_outputs(W)
    outputs, live = first + lane % HALF + (lane // HALF) * (HEADS.dim // 2), below(lane, W.block, W.block)
    if KV is not None and head >= HEADS.queries:
        y, rows = multiply(
            x, norm, eps, kv_weight, kv_scale, outputs - HEADS.queries * HEADS.dim, live, state, 0, W.inputs,
            KV, True, X_AT,
        )  # fmt: skip
    else:
        y, rows = multiply(x, norm, eps, weight, scale, outputs, live, state, 0, W.inputs, W, True, X_AT)
    if bias is not None:
        lane = tl.arange(0, W.block)
        y += tl.load(bias + first + lane % HALF + (lane // HALF) * (HEADS.dim // 2)).to(tl.float32)[:, None]
    a, b = tl.split(y.reshape([2, HALF, _MAX_ROWS]).permute(1, 2, 0))  # [HALF, 16] each
    channel = (part * HALF + tl.arange(0, HALF))[:, None]
    row = tl.arange(0, _MAX_ROWS)[None, :]
    position, seat = stands_at(texts, state, row, rows)
    live = (row < rows) & (channel < HEADS.dim)
    if head < HEADS.queries + HEADS.kv:
        if norms is not None:
            a, b = normed(a, b, norms + (head >= HEADS.queries) * HEADS.dim, channel, eps, HEADS.dim)
        if rotations is not None:
            a, b = turned(a, b, rotations, position, channel, live, HEADS.dim)
    if head < HEADS.queries:
        left(queries + (row * HEADS.queries + head) * HEADS.dim + channel, a, b, live, HEADS.dim)
    else:
        left(cache + cell_of_seat(seat, head - HEADS.queries, HEADS) + channel, a, b, live, HEADS.dim)


def qkv_tiling(weight: Weight, outputs: int, head_dim: int, *, whole_heads: bool = False) -> Tiling:
    """Whole heads, or parts of them; a head whose channels are no power of two goes sixteen at a time.

    outputs: of all programs.
    """
    block = head_dim if whole_heads else min(block_of(outputs), head_dim)
    return tiling_of(weight, block if head_dim % block == 0 else 16)


def qkv(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None, rotations: Tensor | None,
    queries: Tensor, cache: Tensor, state: Tensor, *,
    kv: Weight | None = None, norms: Tensor | None = None, texts: Texts | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """queries [16, heads, head_dim]; cache: the layer's; rotations [capacity, head_dim], None: rows stay as they are.

    kv: the matrix of keys and values, where `weight` has only the queries' rows. norms: of the heads of queries and of
    keys, [2, head_dim]. texts: rows of several texts, [16 * tiles, n].
    """
    heads = heads_of(queries, cache)
    assert heads.dim % 16 == 0, "a head's channels are computed sixteen at a time"
    outputs = weight.outputs + (kv.outputs if kv else 0)
    cut = qkv_tiling(weight, outputs, heads.dim, whole_heads=norms is not None)
    crowded = norms is not None or kv is not None
    # Warps share the outputs of keys and values as they share the queries': one program has one arrangement.
    of_kv = launch(kv, cut._replace(run=RUNS[kv.format]), x, pdl, crowded)["W"] if kv else None
    # Or the assembler spills some registers to make room for one more program. int8 spills with a limit.
    tight = norms is not None or x.dtype == torch.float32
    limits = {"plain": 255, "int4": 255, "fp8": 168} if tight else {} if pdl else {"int4": 168}
    limit = {"maxnreg": limits[weight.format]} if weight.format in limits else {}
    qkv_kernel[(tiles_of(texts) * outputs // cut.block,)](
        x, norm, eps, weight.values, weight.scales, *(kv or (None, None))[:2], bias, norms, rotations,
        queries, cache, state, texts.rows if texts else None, HEADS=heads, KV=of_kv,
        X_AT=at_positions(x, texts), TILES=tiles_of(texts), **{**launch(weight, cut, x, pdl, crowded), **limit},
    )  # fmt: skip
