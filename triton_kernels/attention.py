"""Attention of 1..16 new rows to the KV cache (flash decoding), grouped queries, any length, the same bits in any pass.

    out[r, h] = softmax(q[r, h] k[h / group, :start + r + 1]^T / sqrt(head_dim)) v[h / group, :start + r + 1]

    queries, out [16, heads, head_dim]     keys, values [kv_heads, capacity, head_dim]

The positions are cut into tiles of TILE, counted from position 0, whatever the pass. Of SPANS programs each takes every
SPANS-th tile of one KV head for COLUMNS queries, pairs of a row and a head of the group, with a running maximum (online
softmax, Milakov and Gimelshein, arXiv 1805.02867), all in float32. The last program to arrive adds the SPANS results in
their order, so that it does not matter which one is the last; where a single tile is all there is, nothing is added.
A tile or a span that a row cannot see leaves the row's numbers as they are, to the bit: that is why neighbours do not
matter. With a window a row sees its last `window` positions alone, its own included.

The grid is the same for every length; programs without a tile or without a live row end at once. So a captured launch
serves every length, and what the spans leave does not grow with it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import state as words
from .ptx import gdc_launch_dependents, gdc_wait
from .state import MAX_ROWS, ROWS, START
from .texts import PAGE, POSITION, TABLE, TEXT_WORDS, Texts

TILE, SPANS, COLUMNS = 64, 16, 16

_ROWS, _START = tl.constexpr(ROWS), tl.constexpr(START)
_WORDS, _MAX_ROWS, _TEXT_WORDS = tl.constexpr(words.WORDS), tl.constexpr(MAX_ROWS), tl.constexpr(TEXT_WORDS)
_POSITION, _TABLE = tl.constexpr(POSITION), tl.constexpr(TABLE)


@triton.jit
def attention_kernel(
    queries, keys, values, sums, tops, arrived, out, state, texts, tables, capacity, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, SPANS: tl.constexpr, COLUMNS: tl.constexpr,
    TEXT_TILES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (kv_heads * TEAMS, SPANS). WIDTH and GROUP: head_dim and heads a KV head, rounded up to powers of two.
    TEXT_TILES: of rows of several texts, each of which has programs of its own; 0: the rows are one text's.

    Queries go row by row, the heads of a group together, so that few rows fill few chunks of COLUMNS.

    sums [grid, COLUMNS, head_dim], tops (and totals) [grid, COLUMNS, 2]: of programs with others beside them. arrived
    [kv_heads * TEAMS]: how many of these have stored theirs; 0 between launches.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    ALONE: tl.constexpr = GROUP // COLUMNS if GROUP > COLUMNS else 1  # chunks of a row that has its own
    TEAMS: tl.constexpr = 16 * TEXT_TILES * ALONE if TEXT_TILES else 16 * GROUP // COLUMNS
    team, span = tl.program_id(0), tl.program_id(1)
    kv_head, chunk = team // TEAMS, team % TEAMS
    if TEXT_TILES > 0:
        its = chunk // ALONE  # the row
        there = its % _MAX_ROWS < tl.load(state + its // _MAX_ROWS * _WORDS + _ROWS)
        rows = tl.where(there, its + 1, 0)
        start = tl.load(texts + its * _TEXT_WORDS + _POSITION) - its  # so that the row stands at its position
        tables += tl.load(texts + its * _TEXT_WORDS + _TABLE)
    else:
        rows, start = tl.load(state + _ROWS), tl.load(state + _START)
    begin = chunk * COLUMNS  # the first of the queries
    if TEXT_TILES > 0:
        begin = its * GROUP + chunk % ALONE * COLUMNS
    low = begin // GROUP  # the first and the last row of the chunk
    high = tl.minimum((begin + COLUMNS - 1) // GROUP, rows - 1)
    first = tl.maximum(start + low - WINDOW + 1, 0) // TILE if WINDOW else 0
    tiles = (start + high) // TILE + 1 - first  # that the chunk sees
    own = (span - first % SPANS + SPANS) % SPANS  # the first of them that is this span's
    if (low < rows) & (own < tiles):
        column = begin + tl.arange(0, COLUMNS)  # as in the linear layers the queries are columns
        row, member = column // GROUP, column % GROUP
        head = kv_head * (HEADS // KV_HEADS) + member
        live = (member < HEADS // KV_HEADS) & (row < rows)
        channel = tl.arange(0, WIDTH)
        wide = channel < HEAD_DIM
        here = (row * HEADS + head)[None, :] * HEAD_DIM + channel[:, None]
        q = tl.load(queries + here, mask=live[None, :] & wide[:, None], other=0).to(DOT)  # [WIDTH, COLUMNS]
        top = tl.full([COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        mixed = tl.zeros([WIDTH, COLUMNS], tl.float32)
        base = kv_head.to(tl.int64) * capacity * HEAD_DIM
        for tile in tl.range(first + own, first + tiles, SPANS):
            position = tile * TILE + tl.arange(0, TILE)
            known = (position < start + rows)[:, None] & wide[None, :]  # what lies beyond may be anything, NaN too
            if TEXT_TILES > 0:
                page = tl.load(tables + tile)
                seat = page * TILE + tl.arange(0, TILE)
            else:
                seat = position
            cell = base + seat[:, None] * HEAD_DIM + channel[None, :]
            k = tl.load(keys + cell, mask=known, other=0).to(DOT)
            v = tl.load(values + cell, mask=known, other=0).to(DOT)
            score = tl.dot(k, q, input_precision="ieee") * scale  # [TILE, COLUMNS]
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
        seeing = tl.minimum(tiles, SPANS)  # programs that see something
        if seeing == 1:
            result = (mixed + 0.0) / tl.where(live, total, 1.0)[
                None, :
            ]  # with no negative zeros, as if others had been added
            tl.store(out + here, result.to(out.dtype.element_ty), mask=live[None, :] & wide[:, None])
        else:
            place = (team * SPANS + span) * COLUMNS + tl.arange(0, COLUMNS)
            tl.store(tops + 2 * place, top, mask=live)
            tl.store(tops + 2 * place + 1, total, mask=live)
            tl.store(sums + place[None, :] * HEAD_DIM + channel[:, None], mixed, mask=live[None, :] & wide[:, None])
            tl.debug_barrier()  # of all threads, before one of them says so
            if tl.atomic_add(arrived + team, 1, sem="acq_rel", scope="gpu") == seeing - 1:
                tl.store(arrived + team, 0)  # for the next launch, which waits for the end of this one
                combine(
                    sums, tops, out, team, begin, kv_head, rows, first, tiles,
                    HEADS, KV_HEADS, HEAD_DIM, WIDTH, GROUP, SPANS, COLUMNS,
                )  # fmt: skip


@triton.jit
def combine(
    sums, tops, out, team, begin, kv_head, rows, first, tiles,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    SPANS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What the spans have left of a team's queries, in order. They are read past the multiprocessor's own cache.

    In blocks [COLUMNS, threads, WIDTH / 32, 4], so that a thread loads all that it needs itself.
    """
    LONG: tl.constexpr = WIDTH // 32 if WIDTH > 32 else 1
    THREADS: tl.constexpr = WIDTH // (4 * LONG)
    lane = tl.arange(0, COLUMNS)[:, None, None, None]
    thread = tl.arange(0, THREADS)[None, :, None, None]
    channel = thread * 4 + tl.arange(0, LONG)[None, None, :, None] * (4 * THREADS)
    channel += tl.arange(0, 4)[None, None, None, :]
    column = begin + lane
    row, member = column // GROUP, column % GROUP
    live = (member < HEADS // KV_HEADS) & (row < rows)
    every = live & (thread >= 0)  # for each thread
    wide = live & (channel < HEAD_DIM)
    top = tl.full([COLUMNS, THREADS, 1, 1], float("-inf"), tl.float32)
    for span in tl.static_range(SPANS):
        seen = (span - first % SPANS + SPANS) % SPANS < tiles
        place = (team * SPANS + span) * COLUMNS + lane + thread * 0
        its_top = tl.load(tops + 2 * place, mask=every & seen, other=float("-inf"), cache_modifier=".cg")
        top = tl.maximum(top, its_top)
    top = tl.where(live, top, 0.0)
    total = tl.zeros([COLUMNS, THREADS, 1, 1], tl.float32)
    mixed = tl.zeros([COLUMNS, THREADS, LONG, 4], tl.float32)
    for span in tl.static_range(SPANS):
        seen = (span - first % SPANS + SPANS) % SPANS < tiles
        place = (team * SPANS + span) * COLUMNS + lane + thread * 0
        its_top = tl.load(tops + 2 * place, mask=every & seen, other=float("-inf"), cache_modifier=".cg")
        its_total = tl.load(tops + 2 * place + 1, mask=every & seen, other=0, cache_modifier=".cg")
        its_sums = tl.load(sums + place * HEAD_DIM + channel, mask=wide & seen, other=0, cache_modifier=".cg")
        keep = tl.exp2(its_top - top)
        total += its_total * keep
        mixed += its_sums * keep
    head = kv_head * (HEADS // KV_HEADS) + member
    result = mixed / tl.where(live, total, 1.0)
    tl.store(out + (row * HEADS + head) * HEAD_DIM + channel, result.to(out.dtype.element_ty), mask=wide)


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
    queries: Tensor, keys: Tensor, values: Tensor, partials: Partials, out: Tensor, state: Tensor, *,
    window: int | None = None, texts: Texts | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """out [16, heads, head_dim] for the rows at positions state[START].., whose keys and values are in the cache.

    texts: rows of several texts, [16 * tiles, ...], with keys and values by seat.
    """
    tiles = texts.tiles if texts else 0
    assert not tiles or TILE == PAGE
    (heads, head_dim), (kv_heads, capacity) = queries.shape[1:], keys.shape[:2]
    attention_kernel[(kv_heads * chunks(heads, kv_heads, tiles), SPANS)](
        queries, keys, values, partials.sums, partials.tops, partials.arrived, out, state,
        *((texts.rows, texts.tables) if texts else (None, None)), capacity,
        score_scale(head_dim), HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim), GROUP=triton.next_power_of_2(heads // kv_heads), WINDOW=window or 0,
        TILE=TILE, SPANS=SPANS, COLUMNS=COLUMNS, TEXT_TILES=tiles,
        DOT=tl.float32 if keys.dtype == torch.float32 else tl.bfloat16, PDL=pdl,
        num_warps=4, num_stages=2, launch_pdl=pdl,
    )  # fmt: skip


def score_scale(head_dim: int) -> float:
    """1 / sqrt(head_dim), and log2(e) so that the kernels may use powers of two."""
    return head_dim**-0.5 * 1.4426950408889634
