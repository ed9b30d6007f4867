"""Rows of several texts in one launch, up to 64 in tiles of 16: what each row is, and where its keys and values lie.

    rows    int32 [16 * tiles, TEXT_WORDS]: of each row its position, the seat of its key and value, where its text's
            page table begins in `tables`, and how a token is drawn from it
    tables  int32: page tables one after the other; position p of a text has seat table[p / PAGE] * PAGE + p % PAGE
    keys, values  [kv_heads, pages * PAGE, head_dim], by seat

A pass's words (state.py) are then [tiles, WORDS], of which ROWS counts: rows [16 t, 16 t + ROWS) are live. Programs of
the same weights stand side by side in the grid, one for each tile, so that these come from memory once.

A row has the bits that it has alone, and that the kernels of one text give it: no tile sees another, and in attention
each row has programs of its own.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .state import MAX_ROWS

POSITION, SEAT, TABLE = 0, 1, 2
SEED = 3  # and the next word
INVERSE = 5  # bits of 1 / T, float32; 0: greedy
TEXT_WORDS = 8

PAGE = 64  # positions of a page; as attention's tiles, so that one lookup serves a tile
MOST_TILES = 4
MOST_ROWS = MOST_TILES * MAX_ROWS


class Texts(NamedTuple):
    tiles: int
    rows: Tensor
    tables: Tensor


@triton.jit
def seat_of(tables, position, PAGE: tl.constexpr, mask):
    """Of positions of one text."""
    return tl.load(tables + position // PAGE, mask=mask, other=0) * PAGE + position % PAGE
