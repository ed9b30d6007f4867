"""Attention of the rows of a prompt to the KV cache, any number of them: the formula and the shapes of attention.py.

    out[r, h] = softmax(q[r, h] k[h / group, :start + r + 1]^T / sqrt(head_dim)) v[h / group, :start + r + 1]

    queries, out [rows, heads, head_dim]     k and v are in the cache (cache.py)

A program takes ROWS_BLOCK rows of one head through the positions from 0 on, page by page, with a running maximum in
float32. A page that a row cannot see leaves the row's numbers as they are, to the bit, so a row gets the same wherever
the pass begins and whatever rows it has beside.
"""

import triton
import triton.language as tl
from torch import Tensor

from .cache import PAGE, head_of_page, heads_of

ROWS_BLOCK = 128

_ROWS_BLOCK, _PAGE = tl.constexpr(ROWS_BLOCK), tl.constexpr(PAGE)


@triton.jit(do_not_specialize=["rows", "start"])
def prompt_attention_kernel(
    queries, cache, out, pages, rows, start, HEADS: tl.constexpr, WINDOW: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """Grid (heads, rows / ROWS_BLOCK), the longest rows first."""
    head, first = tl.program_id(0), (tl.num_programs(1) - 1 - tl.program_id(1)) * _ROWS_BLOCK
    row, channel = first + tl.arange(0, _ROWS_BLOCK), tl.arange(0, HEADS.width)
    wide = channel < HEADS.dim
    place = (row.to(tl.int64)[:, None] * HEADS.queries + head) * HEADS.dim + channel[None, :]
    mask = (row < rows)[:, None] & wide[None, :]
    q = tl.load(queries + place, mask=mask, other=0).to(DOT)
    top = tl.full([_ROWS_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([_ROWS_BLOCK], tl.float32)
    mixed = tl.full([_ROWS_BLOCK, HEADS.width], 0.0, tl.float32)
    end = start + tl.minimum(first + _ROWS_BLOCK, rows)
    cell = tl.arange(0, _PAGE)[:, None] * HEADS.dim + channel[None, :]
    seen_from = 0
    if WINDOW:
        seen_from = tl.maximum(start + first - WINDOW + 1, 0) // _PAGE * _PAGE
    for begin in tl.range(seen_from, end, _PAGE):
        position = begin + tl.arange(0, _PAGE)
        known = position < end
        keys = cache + head_of_page(tl.load(pages + begin // _PAGE), head // HEADS.group, HEADS)
        k = tl.load(keys + cell, mask=known[:, None] & wide[None, :], other=0).to(DOT)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * HEADS.scale
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
        v = tl.load(keys + (HEADS.kv * HEADS.of_page) + cell, mask=known[:, None] & wide[None, :], other=0).to(DOT)
        mixed = mixed * keep[:, None] + tl.dot(weight.to(DOT), v, input_precision="ieee")
        top = higher
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=mask)


def prompt_attention(
    queries: Tensor, cache: Tensor, pages: Tensor, out: Tensor, start: int, window: int | None = None
) -> None:  # fmt: skip
    """out [rows, heads, head_dim] for rows at positions start.., whose keys and values are in these pages."""
    rows, heads = len(queries), heads_of(queries, cache)
    dot = tl.float32 if queries.element_size() == 4 and cache.element_size() == 4 else tl.bfloat16
    prompt_attention_kernel[(heads.queries, triton.cdiv(rows, ROWS_BLOCK))](
        queries, cache, out, pages, rows, start, HEADS=heads, WINDOW=window or 0, DOT=dot, num_warps=8, num_stages=2
    )
