"""Rows of several texts in one launch, up to 64 in tiles of 16: what each row is, and where its keys and values lie.

    rows    int32 [16 * tiles, TEXT_WORDS]: of each row its position, the seat of its key and value, where its text's
            page table begins in `tables`, and how a token is drawn from it
    tables  int32: page tables (cache.py) one after the other; a seat is table[position / PAGE] * PAGE + position % PAGE

A pass's words (state.py) are then [tiles, WORDS], of which ROWS counts: rows [16 t, 16 t + ROWS) are live. Programs of
the same weights stand side by side in the grid, one for each tile, so that these come from memory once.

A row has the bits that it has alone, and that the kernels of one text give it: no tile sees another, and in attention
each row has programs of its own.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .state import MAX_ROWS, START

POSITION, SEAT, TABLE = 0, 1, 2
SEED = 3  # and the next word
INVERSE = 5  # bits of 1 / T, float32; 0: greedy
TEXT_WORDS = 8

MOST_TILES = 4
MOST_ROWS = MOST_TILES * MAX_ROWS

_START, _TEXT_WORDS = tl.constexpr(START), tl.constexpr(TEXT_WORDS)
_POSITION, _SEAT = tl.constexpr(POSITION), tl.constexpr(SEAT)


class Texts(NamedTuple):
    tiles: int
    rows: Tensor
    tables: Tensor


@triton.jit
def tile_of_program(TILES: tl.constexpr):
    """Which tile of rows a program has, and its number among the tile's; those of the same weights are neighbours."""
    program = tl.program_id(0)
    if TILES > 1:
        return program % TILES, program // TILES
    else:
        return 0, program


@triton.jit
def stands_at(texts, state, row, rows):
    """Of each row its position, and the seat of its key and value. texts: of the tile; None: all are one text's."""
    if texts is None:
        position = tl.load(state + _START, volatile=True) + row  # again: it need not wait in a register meanwhile
        return position, position
    else:
        place = texts + row * _TEXT_WORDS
        return tl.load(place + _POSITION, mask=row < rows, other=0), tl.load(place + _SEAT, mask=row < rows, other=0)
