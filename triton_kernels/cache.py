"""The KV cache of a layer: pages of 64 positions, wherever these are.

    cache  [pages, 2 * kv_heads, PAGE, head_dim]: of each page the keys of every KV head, then the values

A text's page table says which pages are its: position p stands in page table[p / PAGE], at p % PAGE there. An answer
alone has pages that follow each other; its decoding kernels need no table.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

PAGE = 64  # positions: a tile of attention

_PAGE = tl.constexpr(PAGE)


class Heads(NamedTuple):
    """What the kernels of attention are compiled for. group: query heads of a KV head."""

    queries: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.queries // self.kv

    @property
    def columns(self) -> int:
        """Queries of a row and a KV head, as they are dealt to programs: a power of two."""
        return int(triton.next_power_of_2(self.group))

    @property
    def width(self) -> int:
        """Of a block that holds a head's channels."""
        return int(triton.next_power_of_2(self.dim))

    @property
    def of_page(self) -> int:
        """Numbers that a head has there."""
        return PAGE * self.dim

    @property
    def scale(self) -> float:
        """1 / sqrt(dim), and log2(e) so that the kernels may use powers of two."""
        return float(self.dim**-0.5 * 1.4426950408889634)


def heads_of(queries: Tensor, cache: Tensor) -> Heads:
    """queries [rows, heads, head_dim]."""
    assert cache.shape[2:] == (PAGE, queries.shape[2])
    return Heads(queries.shape[1], cache.shape[1] // 2, queries.shape[2])


@triton.jit
def head_of_page(page, head, HEADS: tl.constexpr):
    """Where the keys of a KV head begin in a page, or (HEADS.kv + head) its values."""
    return (page.to(tl.int64) * (2 * HEADS.kv) + head) * HEADS.of_page


@triton.jit
def cell_of_seat(seat, head, HEADS: tl.constexpr):
    """Where the key of a KV head (or, as above, its value) is. A seat is a page's number * PAGE, and a place there."""
    return head_of_page(seat // _PAGE, head, HEADS) + seat % _PAGE * HEADS.dim
