"""Siblings: the exit head's second choices, verified beside its first ones (docs/design/loop.md#siblings).

The last early step of a round takes a row for each of them, after those of the text, and so does the pass. Such a row
stands at the next free *place*: there are its token, hidden states, keys and values, which the text's later rows
overwrite. Its *position* is that of its draft token: so it is rotated, draws its noise, and sees the text before it.

If the verdict finds a sibling right, `adopt` copies what its row left from its place to its position, before the next
launch reads anything there. Rows pass through the same kernels as all others, and get the same bits.

There are siblings only where drafting waits for verdicts, on one device: all launches are in the order of one stream.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import state as words
from .ptx import gdc_launch_dependents, gdc_wait

_SIBLINGS, _POSITIONS = tl.constexpr(words.SIBLINGS), tl.constexpr(words.SIBLING_POSITIONS)
_ADOPTED, _ADOPTED_AT = tl.constexpr(words.ADOPTED), tl.constexpr(words.ADOPTED_AT)


@triton.jit
def position_of(place, row, rows, siblings, SIBLINGS: tl.constexpr):
    """In the text, of the rows of a pass."""
    position = place
    if SIBLINGS:
        number = row - (rows - tl.load(siblings + _SIBLINGS))
        beside = (number >= 0) & (row < rows)
        position = tl.where(beside, tl.load(siblings + _POSITIONS + number, mask=beside, other=0), place)
    return position


@triton.jit
def adopt_kernel(
    caches, exit_hidden, last_hidden, siblings, capacity,
    KV_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HEARS: tl.constexpr, TYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (caches). HEADS, WIDTH and BLOCK: KV_HEADS, HEAD_DIM and HIDDEN, rounded up to powers of two."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    place, position = tl.load(siblings + _ADOPTED), tl.load(siblings + _ADOPTED_AT)
    if place >= 0:
        cache = tl.load(caches + tl.program_id(0)).to(tl.pointer_type(TYPE))
        head, channel = tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
        here = (head < KV_HEADS) & (channel < HEAD_DIM)
        line = cache + head.to(tl.int64) * capacity * HEAD_DIM + channel
        tl.store(line + position * HEAD_DIM, tl.load(line + place * HEAD_DIM, mask=here), mask=here)
        if tl.program_id(0) == 0:
            number = tl.arange(0, BLOCK)
            wide = number < HIDDEN
            row = tl.load(exit_hidden + place * HIDDEN + number, mask=wide)
            tl.store(exit_hidden + position * HIDDEN + number, row, mask=wide)
            if HEARS:
                row = tl.load(last_hidden + place * HIDDEN + number, mask=wide)
                tl.store(last_hidden + position * HIDDEN + number, row, mask=wide)


def adopt(
    caches: Tensor, like: Tensor, exit_hidden: Tensor, last_hidden: Tensor, siblings: Tensor, *, pdl: bool = False
) -> None:
    """What the sibling that was right has left, to its position. caches int64 [n]: the addresses of keys and of values,
    each like [kv_heads, capacity, head_dim]; last_hidden: no rows where no head asks for them."""
    (kv_heads, capacity, head_dim), hidden = like.shape, exit_hidden.shape[1]
    power = triton.next_power_of_2
    adopt_kernel[(len(caches),)](
        caches, exit_hidden, last_hidden, siblings, capacity,
        KV_HEADS=kv_heads, HEADS=power(kv_heads), HEAD_DIM=head_dim, WIDTH=power(head_dim), HIDDEN=hidden,
        BLOCK=power(hidden), HEARS=len(last_hidden) > 0, TYPE=TYPES[like.dtype], PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
