"""Attention of the rows of a prompt to the KV cache, any number of them: the formula and the shapes of attention.py.

    out[r, h] = softmax(q[r, h] k[h / group, :start + r + 1]^T / sqrt(head_dim)) v[h / group, :start + r + 1]

    queries, out [rows, heads, head_dim]     keys, values [kv_heads, capacity, head_dim]

A program takes ROWS_BLOCK rows of one head through the positions from 0 on, in tiles of TILE, with a running maximum in
float32. A tile that a row cannot see leaves the row's numbers as they are, to the bit, so a row gets the same wherever
the pass begins and whatever rows it has beside.
"""

import triton
import triton.language as tl
from torch import Tensor

from .attention import score_scale
from .texts import PAGE

ROWS_BLOCK, TILE = 128, 64


@triton.jit(do_not_specialize=["rows", "start"])
def prompt_attention_kernel(
    queries, keys, values, out, pages, rows, start, capacity, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, ROWS_BLOCK: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows / ROWS_BLOCK), the longest rows first. WIDTH: head_dim, rounded up to a power of two."""
    head, first = tl.program_id(0), (tl.num_programs(1) - 1 - tl.program_id(1)) * ROWS_BLOCK
    row, channel = first + tl.arange(0, ROWS_BLOCK), tl.arange(0, WIDTH)
    wide = channel < HEAD_DIM
    place = (row.to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + channel[None, :]
    mask = (row < rows)[:, None] & wide[None, :]
    q = tl.load(queries + place, mask=mask, other=0).to(DOT)
    top = tl.full([ROWS_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([ROWS_BLOCK], tl.float32)
    mixed = tl.zeros([ROWS_BLOCK, WIDTH], tl.float32)
    end = start + tl.minimum(first + ROWS_BLOCK, rows)
    base = (head // (HEADS // KV_HEADS)).to(tl.int64) * capacity * HEAD_DIM
    seen_from = 0
    if WINDOW:
        seen_from = tl.maximum(start + first - WINDOW + 1, 0) // TILE * TILE
    for begin in tl.range(seen_from, end, TILE):
        position = begin + tl.arange(0, TILE)
        known = position < end
        if PAGED:
            seat = tl.load(pages + begin // TILE) * TILE + tl.arange(0, TILE)
        else:
            seat = position
        cell = base + seat.to(tl.int64)[:, None] * HEAD_DIM + channel[None, :]
        k = tl.load(keys + cell, mask=known[:, None] & wide[None, :], other=0).to(DOT)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        score = tl.where(position[None, :] <= (start + row)[:, None], score, float("-inf"))
        if WINDOW:
            behind = start + tl.minimum(row, rows - 1) - WINDOW  # of rows that are not there: like the last one's
            score = tl.where(position[None, :] > behind[:, None], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=1))
        anchor = higher  # position 0 is seen by every row: it is finite
        if WINDOW:
            anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row may see nothing of the first tiles
        weight = tl.exp2(score - anchor[:, None])
        keep = tl.exp2(top - anchor)
        total = total * keep + tl.sum(weight, axis=1)
        v = tl.load(values + cell, mask=known[:, None] & wide[None, :], other=0).to(DOT)
        mixed = mixed * keep[:, None] + tl.dot(weight.to(DOT), v, input_precision="ieee")
        top = higher
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)


def prompt_attention(
    queries: Tensor, keys: Tensor, values: Tensor, out: Tensor, start: int, window: int | None = None,
    pages: Tensor | None = None,
) -> None:  # fmt: skip
    """out [rows, heads, head_dim] for rows at positions start.., whose keys and values are in the cache.

    pages: the text's page table; keys and values are by seat (texts.py).
    """
    assert pages is None or TILE == PAGE
    rows, heads, head_dim = queries.shape
    kv_heads, capacity = keys.shape[:2]
    dot = tl.float32 if queries.element_size() == 4 and keys.element_size() == 4 else tl.bfloat16
    prompt_attention_kernel[(heads, triton.cdiv(rows, ROWS_BLOCK))](
        queries, keys, values, out, pages, rows, start, capacity, score_scale(head_dim),
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, WIDTH=triton.next_power_of_2(head_dim),
        WINDOW=window or 0, ROWS_BLOCK=ROWS_BLOCK, TILE=TILE, PAGED=pages is not None, DOT=dot,
        num_warps=8, num_stages=2,
    )  # fmt: skip
