"""Flash decoding: near the formula, and row by row the same bits whatever the pass."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl
from kernel_support import DEVICE, close, make, paged, state_of
from kernel_twins import attention_twin
from triton.runtime import interpreter

import ppsd_rt.triton_kernels.attention as attention_module
from ppsd_rt.triton_kernels.attention import SPANS, Partials, attention
from ppsd_rt.triton_kernels.cache import PAGE

ROUND = 4 * PAGE  # positions that four programs go round in; most tests have so many, to need fewer positions


@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(attention_module, "SPANS", 4)
    monkeypatch.setattr(attention_module, "_SPANS", tl.constexpr(4))


def cache_of(kv_heads, capacity, head_dim):
    return make(kv_heads, capacity, head_dim, seed=1), make(kv_heads, capacity, head_dim, seed=2)


def attend(queries, keys, values, start, rows, window=None):
    """The first `rows` of the queries, with all that the pass must not read made NaN."""
    padded, keys, values = torch.full_like(make(16, *queries.shape[1:]), torch.nan), keys.clone(), values.clone()
    padded[:rows] = queries[:rows]
    keys[:, start + rows :], values[:, start + rows :] = torch.nan, torch.nan
    partials = Partials(queries.shape[1], len(keys), queries.shape[2], DEVICE)
    for part in (partials.sums, partials.tops):
        part.fill_(torch.nan)
    out = torch.full_like(padded, 7.0)
    attention(padded, paged(keys, values), partials, out, state_of(rows, start), window=window)
    assert (out[rows:] == 7.0).all(), "rows beyond the count must stay as they are"
    assert not partials.arrived.any(), "the counters are as the next launch needs them"
    return out[:rows]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(4, 4, 16), (4, 2, 16), (6, 2, 32), (5, 1, 16), (20, 1, 16), (2, 1, 48), (9, 3, 64), (6, 1, 128)],
)
def test_attention_is_near_the_formula(heads, kv_heads, head_dim, four):
    keys, values = cache_of(kv_heads, 3 * ROUND, head_dim)
    queries = make(16, heads, head_dim, seed=3)
    at = [(ROUND - 9, 16), (0, 1), (0, 16), (2 * ROUND + 40, 3), (PAGE - 3, 5), (ROUND - 1, 1), (ROUND, 1)]
    for start, rows in at if (heads, head_dim) in ((4, 16), (20, 16)) else at[::3]:
        close(attend(queries, keys, values, start, rows), attention_twin(queries[:rows], keys, values, start))


@pytest.mark.parametrize("window", [1, 7, PAGE + 3, ROUND + 30])
def test_a_row_sees_its_window_alone(window, four):
    keys, values = cache_of(1, 3 * ROUND, 16)
    queries = make(16, 2, 16, seed=3)
    for start, rows in [(0, 3), (ROUND - 9, 16), (2 * ROUND + 40, 3), (2 * ROUND + 70, 16)]:
        together = attend(queries, keys, values, start, rows, window=window)
        close(together, attention_twin(queries[:rows], keys, values, start, window))
        for row in (0, rows - 1):
            alone = attend(queries[row:], keys, values, start + row, 1, window=window)
            assert torch.equal(alone, together[row : row + 1])


@pytest.mark.parametrize("end", [16, PAGE + 5, ROUND, ROUND + 1, ROUND + 7])
def test_rows_do_not_depend_on_their_company(end, four):
    """Rows at the 16 positions before `end`: all at once, alone, in other numbers (across a round: all)."""
    keys, values = cache_of(1, 2 * ROUND, 16)
    queries = make(16, 2, 16, seed=3)
    together = attend(queries, keys, values, end - 16, 16)
    for rows in range(1, 17) if end == ROUND + 7 else (1, 6):
        assert torch.equal(attend(queries[16 - rows :], keys, values, end - rows, rows), together[16 - rows :])
        assert torch.equal(attend(queries, keys, values, end - 16, rows), together[:rows])


def test_large_scores_and_far_apart_tiles(four):
    """Later tiles whose scores dwarf the earlier ones, and the other way round, neither overflow nor vanish."""
    for near, far in [(1.0, 60.0), (60.0, 1.0)]:
        keys, values = cache_of(1, 2 * ROUND, 16)
        keys[:, :ROUND] *= near
        keys[:, ROUND:] *= far
        queries = 10 * make(16, 2, 16, seed=3)
        close(attend(queries, keys, values, ROUND + 10, 4), attention_twin(queries[:4], keys, values, ROUND + 10))


@pytest.mark.skipif(DEVICE != "cpu", reason="only the interpreter says which program comes when")
@pytest.mark.parametrize("window", [None, PAGE + 3])
def test_the_last_program_to_arrive_may_be_any(window, four, monkeypatch):
    keys, values = cache_of(1, 2 * ROUND, 16)
    queries = make(16, 2, 16, seed=3)
    there = [attend(queries, keys, values, start, 16, window) for start in (PAGE, ROUND - 9, ROUND + 40)]
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z, at=builder.set_grid_idx: at(x, 3 - y, z))
    back = [attend(queries, keys, values, start, 16, window) for start in (PAGE, ROUND - 9, ROUND + 40)]
    assert all(torch.equal(a, b) for a, b in zip(there, back, strict=True))


def test_more_tiles_than_programs():
    keys, values = cache_of(1, (SPANS + 2) * PAGE, 16)
    queries, start = make(16, 2, 16, seed=3), (SPANS + 1) * PAGE - 3
    together = attend(queries, keys, values, start, 6)
    close(together, attention_twin(queries[:6], keys, values, start))
    assert torch.equal(attend(queries[5:], keys, values, start + 5, 1), together[5:])
