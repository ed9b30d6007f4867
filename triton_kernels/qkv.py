"""RMSNorm, the three attention projections, norms of heads, rotation, and the KV cache's new rows: one kernel.

    (q | k | v) = norm(x) W^T (+ bias)          x [16 or capacity, hidden], W [(heads + 2 kv_heads) * head_dim, hidden]
    q, k rotated to positions start + r:  (a, b) -> (a cos - b sin, b cos + a sin), channels c and c + head_dim / 2
    queries [16, heads, head_dim];  keys, values [kv_heads, capacity, head_dim] at the rows' positions

int4 leaves keys and values int8, for most of the error would be theirs: W is then of the queries alone, and the rest is
a matrix of its own, which the programs of keys and values multiply.

A program computes BLOCK / 2 channels of a head and their rotary partners, so that the rotation stays inside it and the
checkpoint's rows keep their order. v goes the same way, unrotated.

With norms of heads (HeadNorms), q and k are first divided by the root mean square of their head's channels. A program
then computes a whole head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .linear import (
    RUNS,
    Tiling,
    Weight,
    at_positions,
    below,
    block_of,
    dot_type,
    launch,
    multiply,
    program_outputs,
    tiles_of,
    tiling_of,
)
from .state import MAX_ROWS, START, WORDS
from .texts import POSITION, SEAT, TEXT_WORDS, Texts

_START, _WORDS = tl.constexpr(START), tl.constexpr(WORDS)
_MAX_ROWS = tl.constexpr(MAX_ROWS)
_POSITION, _SEAT, _TEXT_WORDS = tl.constexpr(POSITION), tl.constexpr(SEAT), tl.constexpr(TEXT_WORDS)


class HeadNorms(NamedTuple):
    """RMSNorms of each head of the queries and of the keys: two vectors [head_dim]."""

    queries: Tensor
    keys: Tensor

    def to(self, device: torch.device | str) -> "HeadNorms":
        return HeadNorms(self.queries.to(device), self.keys.to(device))


@triton.jit
def normed_head(a, b, norm, channel, eps, HEAD_DIM: tl.constexpr):
    """The two halves [HEAD_DIM / 2, rows] of a head, times `norm` over the root mean square of each row's channels."""
    scale = tl.rsqrt(tl.sum(a * a + b * b, axis=0) / HEAD_DIM + eps)[None, :]
    first, second = tl.load(norm + channel), tl.load(norm + HEAD_DIM // 2 + channel)
    return a * scale * first.to(tl.float32), b * scale * second.to(tl.float32)


@triton.jit
def qkv_kernel(
    x, norm, eps, weight, scale, kv_weight, kv_scale, bias, query_norm, key_norm, cosines, sines,
    queries, keys, values, state, texts, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, PARTS: tl.constexpr, SLICES: tl.constexpr, RUN: tl.constexpr,
    EVEN: tl.constexpr, FORMAT: tl.constexpr, KV: tl.constexpr, KV_STEPS: tl.constexpr, KV_AHEAD: tl.constexpr,
    KV_RUN: tl.constexpr, KV_EVEN: tl.constexpr, KV_FORMAT: tl.constexpr,
    BIAS: tl.constexpr, NORMS: tl.constexpr, ROTARY: tl.constexpr,
    X_AT: tl.constexpr, TEXTS: tl.constexpr, TILES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (TILES * outputs / BLOCK): BLOCK / 2 channels of a head with their partners; with NORMS all of a head's."""
    HALF: tl.constexpr = BLOCK // 2
    OF_HEAD: tl.constexpr = HEAD_DIM // BLOCK
    program = tl.program_id(0)
    if TILES > 1:
        tile, program = program % TILES, program // TILES
        state += tile * _WORDS
        texts += tile * (_MAX_ROWS * _TEXT_WORDS)
        x += tile * (_MAX_ROWS * INPUTS)
        queries += tile * (_MAX_ROWS * HEADS * HEAD_DIM)
    head, part = program // OF_HEAD, program % OF_HEAD
    first = head * HEAD_DIM + part * HALF
    lane = program_outputs(BLOCK, PARTS, SLICES)
    outputs, live = first + lane % HALF + (lane // HALF) * (HEAD_DIM // 2), below(lane, BLOCK, BLOCK)
    if KV and head >= HEADS:
        y, rows = multiply(
            x, norm, eps, kv_weight, kv_scale, outputs - HEADS * HEAD_DIM, live, state, 0, INPUTS,
            INPUTS, KV_STEPS, KV_AHEAD, PARTS, SLICES, KV_RUN, KV_EVEN, KV_FORMAT, True, X_AT, DOT, PDL,
        )  # fmt: skip
    else:
        y, rows = multiply(
            x, norm, eps, weight, scale, outputs, live, state, 0, INPUTS,
            INPUTS, STEPS, AHEAD, PARTS, SLICES, RUN, EVEN, FORMAT, True, X_AT, DOT, PDL,
        )  # fmt: skip
    if BIAS:
        lane = tl.arange(0, BLOCK)
        y += tl.load(bias + first + lane % HALF + (lane // HALF) * (HEAD_DIM // 2)).to(tl.float32)[:, None]
    a, b = tl.split(y.reshape([2, HALF, _MAX_ROWS]).permute(1, 2, 0))  # [HALF, 16] each
    channel = (part * HALF + tl.arange(0, HALF))[:, None]
    row = tl.arange(0, _MAX_ROWS)[None, :]
    if TEXTS:
        place = tl.load(texts + row * _TEXT_WORDS + _SEAT, mask=row < rows, other=0)
        position = tl.load(texts + row * _TEXT_WORDS + _POSITION, mask=row < rows, other=0)
    else:
        place = tl.load(state + _START, volatile=True) + row  # again: it need not wait in a register meanwhile
    live = (row < rows) & (channel < HEAD_DIM)
    if NORMS and head < HEADS + KV_HEADS:
        a, b = normed_head(a, b, query_norm if head < HEADS else key_norm, channel, eps, HEAD_DIM)
    if ROTARY and head < HEADS + KV_HEADS:
        if not TEXTS:
            position = place
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
        cell = cache + (kv_head.to(tl.int64) * capacity + place) * HEAD_DIM + channel
        tl.store(cell, a.to(keys.dtype.element_ty), mask=live)
        tl.store(cell + HEAD_DIM // 2, b.to(keys.dtype.element_ty), mask=live)


def qkv_tiling(weight: Weight, outputs: int, head_dim: int, *, whole_heads: bool = False) -> Tiling:
    """Whole heads, or parts of them; a head whose channels are no power of two goes sixteen at a time.

    outputs: of all programs.
    """
    block = head_dim if whole_heads else min(block_of(outputs), head_dim)
    return tiling_of(weight, block if head_dim % block == 0 else 16)


def qkv(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None, cosines: Tensor, sines: Tensor,
    queries: Tensor, keys: Tensor, values: Tensor, state: Tensor, *,
    kv: Weight | None = None, norms: HeadNorms | None = None, rotary: bool = True, texts: Texts | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """queries [16, heads, head_dim]; keys, values [kv_heads, capacity, head_dim]; tables [capacity, head_dim / 2].

    kv: the matrix of keys and values, where `weight` has only the queries' rows. texts: rows of several texts,
    [16 * tiles, n], and keys and values by seat.
    """
    heads, head_dim = queries.shape[1:]
    assert head_dim % 16 == 0, "a head's channels are computed sixteen at a time"
    outputs = weight.outputs + (kv.outputs if kv else 0)
    cut = qkv_tiling(weight, outputs, head_dim, whole_heads=norms is not None)
    query_norm, key_norm = norms or (None, None)
    other = kv or weight
    crowded = norms is not None or kv is not None
    # Warps share the outputs of keys and values as they share the queries': one program has one arrangement.
    how = launch(other, cut._replace(run=RUNS[other.format]), x, pdl, crowded)
    of_kv = {f"KV_{name}": how[name] for name in ("STEPS", "AHEAD", "RUN", "EVEN", "FORMAT")}
    # Or the assembler spills some registers to make room for one more program. int8 spills with a limit.
    tight = norms is not None or x.dtype == torch.float32
    limits = {"plain": 255, "int4": 255, "fp8": 168} if tight else {} if pdl else {"int4": 168}
    limit = {"maxnreg": limits[weight.format]} if weight.format in limits else {}
    qkv_kernel[(tiles_of(texts) * outputs // cut.block,)](
        x, norm, eps, weight.values, weight.scales, *(kv or (None, None))[:2], bias, query_norm, key_norm,
        cosines, sines, queries, keys, values, state, texts.rows if texts else None, keys.shape[1],
        HEADS=heads, KV_HEADS=keys.shape[0], HEAD_DIM=head_dim, INPUTS=weight.inputs, KV=kv is not None,
        BIAS=bias is not None, NORMS=norms is not None, ROTARY=rotary,
        X_AT=at_positions(x, texts), TEXTS=texts is not None, TILES=tiles_of(texts),
        DOT=dot_type(weight), PDL=pdl, **of_kv, **{**launch(weight, cut, x, pdl, crowded), **limit},
    )  # fmt: skip
