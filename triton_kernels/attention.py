"""Attention of 1..16 new rows to the KV cache (flash decoding), grouped queries, any length, the same bits in any pass.

    out[r, h] = softmax(q[r, h] k[h / group, :start + r + 1]^T / sqrt(head_dim)) v[h / group, :start + r + 1]

    queries, out [16, heads, head_dim]     k and v are in the cache (cache.py)

Of SPANS programs each takes every SPANS-th page of one KV head, counted from position 0, whatever the pass, for COLUMNS
queries, pairs of a row and a head of the group, with a running maximum (online softmax, Milakov and Gimelshein, arXiv
1805.02867), all in float32. The last program to arrive adds the SPANS results in their order, so that it does not
matter which one is the last; where a single page is all there is, nothing is added. A page or a span that a row cannot
see leaves the row's numbers as they are, to the bit: that is why neighbours do not matter. With a window a row sees its
last `window` positions alone, its own included.

The grid is the same for every length; programs without a page or without a live row end at once. So a captured launch
serves every length, and what the spans leave does not grow with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import state as words
from .cache import PAGE, head_of_page, heads_of
from .ptx import gdc_launch_dependents, gdc_wait
from .state import MAX_ROWS, ROWS, START
from .texts import POSITION, TABLE, TEXT_WORDS, Texts

SPANS, COLUMNS = 16, 16

_ROWS, _START, _PAGE = tl.constexpr(ROWS), tl.constexpr(START), tl.constexpr(PAGE)
_WORDS, _MAX_ROWS, _TEXT_WORDS = tl.constexpr(words.WORDS), tl.constexpr(MAX_ROWS), tl.constexpr(TEXT_WORDS)
_POSITION, _TABLE = tl.constexpr(POSITION), tl.constexpr(TABLE)
_SPANS, _COLUMNS = tl.constexpr(SPANS), tl.constexpr(COLUMNS)


@triton.jit
def queries_of_chunk(chunk, state, texts, HEADS: tl.constexpr, ALONE: tl.constexpr):
    """The first of a chunk's queries, how many rows there are, and the first one's position. Of several texts a row has
    chunks of its own, ALONE of them; rows up to it count, the first one's position being such that it has its own."""
    if texts is None:
        return chunk * _COLUMNS, tl.load(state + _ROWS), tl.load(state + _START)
    else:
        row = chunk // ALONE
        there = row % _MAX_ROWS < tl.load(state + row // _MAX_ROWS * _WORDS + _ROWS)
        start = tl.load(texts + row * _TEXT_WORDS + _POSITION) - row
        return row * HEADS.columns + chunk % ALONE * _COLUMNS, tl.where(there, row + 1, 0), start


@triton.jit
def first_page(span, first):
    """The first page of a span, counted from page `first`."""
    return (span - first % _SPANS + _SPANS) % _SPANS


@triton.jit
def attention_kernel(
    queries, cache, sums, tops, arrived, out, state, texts, tables,
    HEADS: tl.constexpr, WINDOW: tl.constexpr, TEXT_TILES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads * TEAMS, SPANS). TEXT_TILES: of rows of several texts, each of which has programs of its own; 0:
    the rows are one text's.

    Queries go row by row, the heads of a group together, so that few rows fill few chunks of COLUMNS.

    sums [grid, COLUMNS, head_dim], tops (and totals) [grid, COLUMNS, 2]: of programs with others beside them. arrived
    [kv_heads * TEAMS]: how many of these have stored theirs; 0 between launches.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ALONE: tl.constexpr = HEADS.columns // _COLUMNS if HEADS.columns > _COLUMNS else 1  # chunks of a row
    TEAMS: tl.constexpr = 16 * TEXT_TILES * ALONE if TEXT_TILES else 16 * HEADS.columns // _COLUMNS
    team, span = tl.program_id(0), tl.program_id(1)
    kv_head, chunk = team // TEAMS, team % TEAMS
    begin, rows, start = queries_of_chunk(chunk, state, texts, HEADS, ALONE)
    if texts is not None:
        tables += tl.load(texts + chunk // ALONE * _TEXT_WORDS + _TABLE)
    low = begin // HEADS.columns  # the first and the last row of the chunk
    high = tl.minimum((begin + _COLUMNS - 1) // HEADS.columns, rows - 1)
    first = tl.maximum(start + low - WINDOW + 1, 0) // _PAGE if WINDOW else 0
    pages = (start + high) // _PAGE + 1 - first  # that the chunk sees
    own = first_page(span, first)  # of them, this span's
    if (low < rows) & (own < pages):
        column = begin + tl.arange(0, _COLUMNS)  # as in the linear layers the queries are columns
        row, member = column // HEADS.columns, column % HEADS.columns
        head = kv_head * HEADS.group + member
        live = (member < HEADS.group) & (row < rows)
        channel = tl.arange(0, HEADS.width)
        wide = channel < HEADS.dim
        here = (row * HEADS.queries + head)[None, :] * HEADS.dim + channel[:, None]
        q = tl.load(queries + here, mask=live[None, :] & wide[:, None], other=0).to(DOT)  # [width, COLUMNS]
        top = tl.full([_COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([_COLUMNS], tl.float32)
        mixed = tl.full([HEADS.width, _COLUMNS], 0.0, tl.float32)
        cell = tl.arange(0, _PAGE)[:, None] * HEADS.dim + channel[None, :]
        for number in tl.range(first + own, first + pages, _SPANS):
            position = number * _PAGE + tl.arange(0, _PAGE)
            known = (position < start + rows)[:, None] & wide[None, :]  # what lies beyond may be anything, NaN too
            page = tl.load(tables + number) if texts is not None else number
            keys = cache + head_of_page(page, kv_head, HEADS)
            k = tl.load(keys + cell, mask=known, other=0).to(DOT)
            v = tl.load(keys + (HEADS.kv * HEADS.of_page) + cell, mask=known, other=0).to(DOT)
            score = tl.dot(k, q, input_precision="ieee") * HEADS.scale  # [PAGE, COLUMNS]
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
        seeing = tl.minimum(pages, _SPANS)  # programs that see something
        if seeing == 1:
            # With no negative zeros, as if others had been added.
            result = (mixed + 0.0) / tl.where(live, total, 1.0)[None, :]
            tl.store(out + here, result.to(out.dtype.element_ty), mask=live[None, :] & wide[:, None])
        else:
            place = (team * _SPANS + span) * _COLUMNS + tl.arange(0, _COLUMNS)
            tl.store(tops + 2 * place, top, mask=live)
            tl.store(tops + 2 * place + 1, total, mask=live)
            tl.store(sums + place[None, :] * HEADS.dim + channel[:, None], mixed, mask=live[None, :] & wide[:, None])
            tl.debug_barrier()  # of all threads, before one of them says so
            if tl.atomic_add(arrived + team, 1, sem="acq_rel", scope="gpu") == seeing - 1:
                tl.store(arrived + team, 0)  # for the next launch, which waits for the end of this one
                combine(sums, tops, out, team, begin, kv_head, rows, first, pages, HEADS)


@triton.jit
def combine(sums, tops, out, team, begin, kv_head, rows, first, pages, HEADS: tl.constexpr):
    """What the spans have left, added in their order. It is read from the second-level cache, not from this
    multiprocessor's own cache.

    In blocks [COLUMNS, threads, width / 32, 4], so that a thread loads all that it needs itself.
    """
    LONG: tl.constexpr = HEADS.width // 32 if HEADS.width > 32 else 1
    THREADS: tl.constexpr = HEADS.width // (4 * LONG)
    lane = tl.arange(0, _COLUMNS)[:, None, None, None]
    thread = tl.arange(0, THREADS)[None, :, None, None]
    channel = thread * 4 + tl.arange(0, LONG)[None, None, :, None] * (4 * THREADS)
    channel += tl.arange(0, 4)[None, None, None, :]
    column = begin + lane
    row, member = column // HEADS.columns, column % HEADS.columns
    live = (member < HEADS.group) & (row < rows)
    every = live & (thread >= 0)  # for each thread
    wide = live & (channel < HEADS.dim)
    top = tl.full([_COLUMNS, THREADS, 1, 1], float("-inf"), tl.float32)
    for span in tl.static_range(_SPANS):
        seen = first_page(span, first) < pages
        place = (team * _SPANS + span) * _COLUMNS + lane + thread * 0
        its_top = tl.load(tops + 2 * place, mask=every & seen, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, its_top)
    top = tl.where(live, top, 0.0)
    total = tl.zeros([_COLUMNS, THREADS, 1, 1], tl.float32)
    mixed = tl.zeros([_COLUMNS, THREADS, LONG, 4], tl.float32)
    for span in tl.static_range(_SPANS):
        seen = first_page(span, first) < pages
        place = (team * _SPANS + span) * _COLUMNS + lane + thread * 0
        its_top = tl.load(tops + 2 * place, mask=every & seen, other=float("-inf"), cache_modifier=".cg")
        its_total = tl.load(tops + 2 * place + 1, mask=every & seen, other=0, cache_modifier=".cg")
        its_sums = tl.load(sums + place * HEADS.dim + channel, mask=wide & seen, other=0, cache_modifier=".cg")
        keep = tl.exp2(its_top - top)
        total += its_total * keep
        mixed += its_sums * keep
    head = kv_head * (HEADS.group) + member
    result = mixed / tl.where(live, total, 1.0)
    tl.store(out + (row * HEADS.queries + head) * HEADS.dim + channel, result.to(out.dtype.element_ty), mask=wide)


class Partials:
    """What the spans leave, and how many have: see `attention_kernel`. Its size depends on the heads alone."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, device: torch.device | str, tiles: int = 0) -> None:
        """tiles: at most, of rows of several texts."""
        teams = kv_heads * chunks(heads, kv_heads, tiles)
        shape = (teams, SPANS, COLUMNS)
        self.sums = torch.empty(*shape, head_dim, device=device)
        self.tops = torch.empty(*shape, 2, device=device)
        self.arrived = torch.zeros(teams, dtype=torch.int32, device=device)


def chunks(heads: int, kv_heads: int, tiles: int = 0) -> int:
    """Of COLUMNS queries: what 16 rows of a KV head's group are cut into, or each row of so many tiles."""
    group = triton.next_power_of_2(heads // kv_heads)
    if tiles:
        return tiles * MAX_ROWS * max(group // COLUMNS, 1)
    return MAX_ROWS * group // COLUMNS


def attention(
    queries: Tensor, cache: Tensor, partials: Partials, out: Tensor, state: Tensor, *,
    window: int | None = None, texts: Texts | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """out [16, heads, head_dim] for the rows at positions state[START].., whose keys and values are in the cache.

    texts: rows of several texts, [16 * tiles, ...].
    """
    heads, tiles = heads_of(queries, cache), texts.tiles if texts else 0
    attention_kernel[(heads.kv * chunks(heads.queries, heads.kv, tiles), SPANS)](
        queries, cache, partials.sums, partials.tops, partials.arrived, out, state,
        *((texts.rows, texts.tables) if texts else (None, None)), HEADS=heads, WINDOW=window or 0, TEXT_TILES=tiles,
        DOT=tl.float32 if cache.dtype == torch.float32 else tl.bfloat16, PDL=pdl,
        num_warps=4, num_stages=2, launch_pdl=pdl,
    )  # fmt: skip
