"""Attention of 1..16 new rows to the KV cache (flash decoding), grouped queries, any length, the same bits in any pass.

    out[r, h] = softmax(q[r, h] k[h / group, :start + r + 1]^T / sqrt(head_dim)) v[h / group, :start + r + 1]

    queries, out [16, heads, head_dim]     keys, values [kv_heads, capacity, head_dim]

The positions are cut every SPLIT, counted from position 0, whatever the pass; a program takes one split of one KV head,
for all rows and all heads of the group at once (of a large group, GROUP of its heads), in tiles of TILE positions with
a running maximum (online softmax, Milakov and Gimelshein, arXiv 1805.02867), all in float32. `combine_kernel` adds the
splits in order. A tile or a split that a row cannot see leaves the row's numbers as they are, to the bit: that is why
neighbours do not matter. With a window a row sees its last `window` positions alone, its own included.

The grid spans the capacity; programs beyond the length end at once. So a captured launch serves every length.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .state import MAX_ROWS, ROWS, START

SPLIT, TILE, BATCH = 256, 64, 16

_ROWS, _START = tl.constexpr(ROWS), tl.constexpr(START)
_MAX_ROWS = tl.constexpr(MAX_ROWS)


@triton.jit
def attention_kernel(
    queries, keys, values, sums, tops, totals, state, capacity, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads * PARTS, splits) -> sums [splits, heads, 16, head_dim], tops and totals [splits, heads, 16].

    WIDTH is head_dim, rounded up to a power of two; PARTS programs take the heads of a group, GROUP each.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    PARTS: tl.constexpr = (HEADS // KV_HEADS + GROUP - 1) // GROUP
    kv_head, part, split = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    rows, start = tl.load(state + _ROWS), tl.load(state + _START)
    first = split * SPLIT
    concerns = (rows > 0) & (first < start + rows)
    if WINDOW:
        concerns = concerns & (first + SPLIT > start - WINDOW + 1)
    if concerns:
        column = tl.arange(0, GROUP * _MAX_ROWS)  # as in the linear layers the rows are columns, now for every head
        member, row = part * GROUP + column // _MAX_ROWS, column % _MAX_ROWS
        head = kv_head * (HEADS // KV_HEADS) + member
        live = (member < HEADS // KV_HEADS) & (row < rows)
        channel = tl.arange(0, WIDTH)
        wide = channel < HEAD_DIM
        here = (row * HEADS + head)[None, :] * HEAD_DIM + channel[:, None]
        q = tl.load(queries + here, mask=live[None, :] & wide[:, None], other=0).to(DOT)  # [WIDTH, columns]
        top = tl.full([GROUP * _MAX_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([GROUP * _MAX_ROWS], tl.float32)
        mixed = tl.zeros([WIDTH, GROUP * _MAX_ROWS], tl.float32)
        base = kv_head.to(tl.int64) * capacity * HEAD_DIM
        # A tile that no row of the pass sees would change nothing, to the bit.
        begin = 0
        if WINDOW:
            begin = tl.maximum(start - WINDOW + 1 - first, 0) // TILE
        for tile in tl.range(begin, tl.minimum(SPLIT // TILE, tl.cdiv(start + rows - first, TILE))):
            position = first + tile * TILE + tl.arange(0, TILE)
            known = (position < start + rows)[:, None] & wide[None, :]  # what lies beyond may be anything, NaN too
            cell = base + position[:, None] * HEAD_DIM + channel[None, :]
            k = tl.load(keys + cell, mask=known, other=0).to(DOT)
            v = tl.load(values + cell, mask=known, other=0).to(DOT)
            score = tl.dot(k, q, input_precision="ieee") * scale  # [TILE, columns]
            score = tl.where(position[:, None] <= (start + row)[None, :], score, float("-inf"))
            if WINDOW:
                score = tl.where(position[:, None] > (start + row - WINDOW)[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, axis=0))
            anchor = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf would be NaN
            weight = tl.exp2(score - anchor[None, :])
            keep = tl.exp2(top - anchor)
            total = total * keep + tl.sum(weight, axis=0)
            mixed = mixed * keep[None, :] + tl.dot(tl.trans(v), weight.to(DOT), input_precision="ieee")
            top = higher
        place = (split * HEADS + head) * _MAX_ROWS + row
        tl.store(tops + place, top, mask=live)
        tl.store(totals + place, total, mask=live)
        tl.store(sums + place[None, :] * HEAD_DIM + channel[:, None], mixed, mask=live[None, :] & wide[:, None])


@triton.jit
def combine_kernel(
    sums, tops, totals, out, state,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, BATCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, 16): the splits that a row sees, in order, BATCH at a time."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head, row = tl.program_id(0), tl.program_id(1)
    if row < tl.load(state + _ROWS):
        channel = tl.arange(0, WIDTH)
        wide = channel < HEAD_DIM
        position = tl.load(state + _START) + row
        seen = position // SPLIT + 1
        top, total, mixed = float("-inf"), 0.0, tl.zeros([WIDTH], tl.float32)
        first = 0
        if WINDOW:
            first = tl.maximum(position - WINDOW + 1, 0) // SPLIT
        while first < seen:
            split = first + tl.arange(0, BATCH)
            place = (split * HEADS + head) * _MAX_ROWS + row
            its_top = tl.load(tops + place, mask=split < seen, other=float("-inf"))
            its_total = tl.load(totals + place, mask=split < seen, other=0)
            cells = place[:, None] * HEAD_DIM + channel[None, :]
            its_sums = tl.load(sums + cells, mask=(split < seen)[:, None] & wide[None, :], other=0)
            higher = tl.maximum(top, tl.max(its_top, axis=0))
            keep, its = tl.exp2(top - higher), tl.exp2(its_top - higher)
            total = total * keep + tl.sum(its_total * its, axis=0)
            mixed = mixed * keep + tl.sum(its_sums * its[:, None], axis=0)
            top = higher
            first += BATCH
        result = mixed / total
        tl.store(out + (row * HEADS + head) * HEAD_DIM + channel, result.to(out.dtype.element_ty), mask=wide)


class Partials:
    """What the splits leave: float32 sums [splits, heads, 16, head_dim], tops and totals [splits, heads, 16]."""

    def __init__(self, capacity: int, heads: int, head_dim: int, device: torch.device | str) -> None:
        shape = (triton.cdiv(capacity, SPLIT), heads, MAX_ROWS)
        self.sums = torch.empty(*shape, head_dim, device=device)
        self.tops, self.totals = torch.empty(shape, device=device), torch.empty(shape, device=device)


def attention(
    queries: Tensor, keys: Tensor, values: Tensor, partials: Partials, out: Tensor, state: Tensor, *,
    window: int | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """out [16, heads, head_dim] for the rows at positions state[START].., whose keys and values are in the cache."""
    (heads, head_dim), (kv_heads, capacity) = queries.shape[1:], keys.shape[:2]
    dot = tl.float32 if keys.dtype == torch.float32 else tl.bfloat16
    shared = {
        "HEADS": heads,
        "HEAD_DIM": head_dim,
        "WIDTH": triton.next_power_of_2(head_dim),
        "WINDOW": window or 0,
        "SPLIT": SPLIT,
        "PDL": pdl,
    }
    # As many heads at once as what a program adds up leaves registers for.
    group = min(triton.next_power_of_2(heads // kv_heads), max(1, 8192 // (MAX_ROWS * shared["WIDTH"])))
    attention_kernel[(kv_heads * triton.cdiv(heads // kv_heads, group), len(partials.tops))](
        queries, keys, values, partials.sums, partials.tops, partials.totals, state, capacity, score_scale(head_dim),
        KV_HEADS=kv_heads, GROUP=group, TILE=TILE, DOT=dot, num_warps=4, num_stages=2, launch_pdl=pdl, **shared,
    )  # fmt: skip
    combine_kernel[(heads, MAX_ROWS)](
        partials.sums, partials.tops, partials.totals, out, state, BATCH=BATCH, num_warps=4, launch_pdl=pdl, **shared
    )


def score_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim), and log2(e) so that the kernels may use powers of two."""
    return head_dim**-0.5 * 1.4426950408889634


def attention_twin(queries: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None = None) -> Tensor:
    """queries [rows, heads, head_dim] at positions start.. -> float32 [rows, heads, head_dim], by the formula."""
    rows, heads, head_dim = queries.shape
    length, group = start + rows, heads // len(keys)
    k, v = (cache[:, :length].float().repeat_interleave(group, 0) for cache in (keys, values))
    scores = torch.einsum("rhd,hpd->hrp", queries.float(), k) * head_dim**-0.5
    behind = start + torch.arange(rows, device=k.device)[:, None] - torch.arange(length, device=k.device)
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return torch.einsum("hrp,hpd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
