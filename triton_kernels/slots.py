"""Attention of many texts side by side, one new row of each, to a KV cache of each text's own.

    q, k rotated to position p[s]:  (a, b) -> (a cos - b sin, b cos + a sin), channels c and c + head_dim / 2
    keys[s, :, p[s]], values[s, :, p[s]] = k, v
    out[s, h] = softmax(q[s, h] keys[s, h / group, :p[s] + 1]^T / sqrt(head_dim)) values[s, h / group, :p[s] + 1]

    q, out [slots, heads, head_dim]     k, v [slots, kv_heads, head_dim]      positions [slots] int64
    keys, values [slots, kv_heads, capacity, head_dim]                        cos, sin [capacity, head_dim / 2] float32

Each text costs what it is long: a program reads TILE positions at a time of one KV head of one text, for all heads of
the group, with a running maximum (online softmax, arXiv 1805.02867). A window hides all but the last positions.
Positions are read when the kernels run, so that a captured launch serves all lengths.

Unlike attention.py, whose bits are the same in any company, this one samples training text, where slots are thousands.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cache import Heads

TILE = 64
LEAST_QUERIES = 16  # that tl.dot takes


@triton.jit
def place_kernel(
    q, k, v, keys, values, positions, cosines, sines, capacity,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Grid (slots, heads + 2 kv_heads): a head of q, which stays where it is, of k or of v. WIDTH: of half a head,
    rounded up to a power of two."""
    HALF: tl.constexpr = HEAD_DIM // 2
    slot, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + slot)
    channel = tl.arange(0, WIDTH)
    live = channel < HALF
    if head < HEADS:
        source = q + (slot * HEADS + head) * HEAD_DIM
        target = source
    else:
        kv_head = (head - HEADS) % KV_HEADS
        cell = ((slot * KV_HEADS + kv_head) * capacity + position) * HEAD_DIM
        if head < HEADS + KV_HEADS:
            source = k + (slot * KV_HEADS + kv_head) * HEAD_DIM
            target = keys + cell
        else:
            source = v + (slot * KV_HEADS + kv_head) * HEAD_DIM
            target = values + cell
    a = tl.load(source + channel, mask=live, other=0).to(tl.float32)
    b = tl.load(source + HALF + channel, mask=live, other=0).to(tl.float32)
    if ROTARY and head < HEADS + KV_HEADS:
        cos = tl.load(cosines + position * HALF + channel, mask=live, other=0)
        sin = tl.load(sines + position * HALF + channel, mask=live, other=0)
        a, b = a * cos - b * sin, b * cos + a * sin
    tl.store(target + channel, a.to(keys.dtype.element_ty), mask=live)
    tl.store(target + HALF + channel, b.to(keys.dtype.element_ty), mask=live)


@triton.jit
def slots_kernel(
    q, keys, values, out, positions, capacity, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (slots, kv_heads). QUERIES, WIDTH: the group and head_dim, rounded up to powers of two that tl.dot takes."""
    slot, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.load(positions + slot).to(tl.int32) + 1
    first = tl.maximum(end - WINDOW, 0) if WINDOW else 0
    member, channel, place = tl.arange(0, QUERIES), tl.arange(0, WIDTH), tl.arange(0, TILE)
    wide = channel < HEAD_DIM
    live = (member < GROUP)[:, None] & wide[None, :]
    here = (slot * KV_HEADS + kv_head) * GROUP * HEAD_DIM + member[:, None] * HEAD_DIM + channel[None, :]
    query = tl.load(q + here, mask=live, other=0)
    base = (slot * KV_HEADS + kv_head) * capacity * HEAD_DIM
    top = tl.full([QUERIES], -1e30, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    for tile in tl.range(first // TILE * TILE, end, TILE):
        position = tile + place
        seen = (position >= first) & (position < end)
        cell = base + position[None, :] * HEAD_DIM + channel[:, None]
        k = tl.load(keys + cell, mask=seen[None, :] & wide[:, None], other=0)
        score = tl.dot(query, k, input_precision="ieee").to(tl.float32) * scale
        score = tl.where(seen[None, :], score, -1e30)
        higher = tl.maximum(top, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        keep = tl.exp2(top - higher)
        total = total * keep + tl.sum(weight, axis=1)
        cell = base + position[:, None] * HEAD_DIM + channel[None, :]
        v = tl.load(values + cell, mask=seen[:, None] & wide[None, :], other=0)
        mixed = mixed * keep[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = higher
    tl.store(out + here, (mixed / total[:, None]).to(out.dtype.element_ty), mask=live)


def attend_slots(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, positions: Tensor, cos: Tensor, sin: Tensor,
    *, rotary: bool = True, window: int | None = None,
) -> Tensor:  # fmt: skip
    """-> out; q is rotated where it is, and keys and values get their new rows."""
    (slots, heads, head_dim), (kv_heads, capacity) = q.shape, keys.shape[1:3]
    place_kernel[(slots, heads + 2 * kv_heads)](
        q, k, v, keys, values, positions, cos, sin, capacity, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim // 2), ROTARY=rotary, num_warps=1,
    )  # fmt: skip
    out = torch.empty_like(q)
    group = heads // kv_heads
    slots_kernel[(slots, kv_heads)](
        q, keys, values, out, positions, capacity, Heads(heads, kv_heads, head_dim).scale, KV_HEADS=kv_heads,
        GROUP=group, QUERIES=max(LEAST_QUERIES, triton.next_power_of_2(group)), HEAD_DIM=head_dim,
        WIDTH=max(LEAST_QUERIES, triton.next_power_of_2(head_dim)), WINDOW=window or 0, TILE=TILE,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
