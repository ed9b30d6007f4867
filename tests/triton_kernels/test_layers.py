"""The linear kernels: near their twins, and row by row the same bits whatever the company."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import DEVICE, FORMATS, ROW_COUNTS, close, in_format, make, matrix, state_of, table, unpaged
from kernel_twins import feedback_twin, linear_twin, qkv_twin, swiglu_twin
from support import slow

import ppsd_rt.triton_kernels.linear as linear_module
from ppsd_rt.triton_kernels.cache import PAGE
from ppsd_rt.triton_kernels.feedback import feedback
from ppsd_rt.triton_kernels.linear import RUNS, Tiling, Weight, linear, quantise, quantise_fp8, tiling
from ppsd_rt.triton_kernels.qkv import qkv
from ppsd_rt.triton_kernels.swiglu import swiglu

EPS = 1e-5
SMALL = Tiling(16, 1, 1, RUNS["plain"])
formats = pytest.mark.parametrize("format", FORMATS)


@formats
@pytest.mark.parametrize(
    ("outputs", "inputs", "cut"),
    [
        (64, 64, SMALL),
        (64, 64, SMALL._replace(slices=2)),
        (64, 96, SMALL._replace(block=64, parts=2)),  # its warps share inputs
        (40, 96, SMALL),  # neither a whole block of outputs nor whole steps of inputs
        (48, 192, SMALL._replace(splits=3)),
        (16, 160, SMALL._replace(splits=2)),  # the second split is shorter
        (32, 416, SMALL._replace(block=32, slices=2)),  # in int4 more than a group, and a part of one
        slow(576, 1536, None),  # `down` of the default model
    ],
)
def test_linear(outputs, inputs, cut, format):
    x, weight = make(16, inputs, seed=1), matrix(outputs, inputs, format)
    cut = cut and cut._replace(run=RUNS[weight.format])
    bias, residual = make(outputs, seed=2), make(16, outputs, seed=3)
    splits = (cut or tiling(weight)).splits
    partial = torch.full((splits, 16, outputs), torch.nan, device=DEVICE)
    for rows in ROW_COUNTS if format == "fp32" else (1, 16):
        out = residual.clone()
        linear(x, weight, out, state_of(rows), bias=bias, residual=out, partial=partial, cut=cut)
        close(out[:rows], linear_twin(x, weight, bias=bias, residual=residual)[:rows])
        assert torch.equal(out[rows:], residual[rows:]), "rows beyond the count must stay as they are"
        if rows == ROW_COUNTS[0]:
            first = out[:rows].clone()
        assert torch.equal(out[: len(first)], first)


@formats
@pytest.mark.parametrize(("inputs", "splits"), [slow(8, 1), (10, 1), (23, 2), slow(13, 1)])
def test_more_steps_than_are_on_the_way(inputs, splits, format, monkeypatch):
    """Whole rounds of steps, and a last one that is short; with splits, and with inputs that end within a step."""
    three = 3 * 16 * 4 * 16  # steps of SMALL, in bytes
    monkeypatch.setattr(linear_module, "WHOLE_BYTES", three)
    monkeypatch.setattr(linear_module, "AHEAD_BYTES", dict.fromkeys(RUNS.values(), (three, three)))
    inputs *= {"fp32": 32, "int8": 32, "int4": 96, "fp8": 32}[format]
    x, weight, gain = make(16, inputs, seed=1), matrix(32, inputs, format), 1 + 0.1 * make(inputs, seed=2)
    cut = SMALL._replace(run=RUNS[weight.format], splits=splits)
    assert cut.ahead(inputs) < cut.steps(inputs)
    partial, out = torch.full((splits, 16, 32), torch.nan, device=DEVICE), torch.zeros(16, 32, device=DEVICE)
    linear(x, weight, out, state_of(16), partial=partial, cut=cut)
    close(out, linear_twin(x, weight))
    if splits == 1:
        linear(x, weight, out, state_of(16), norm=gain, eps=EPS, cut=cut)
        close(out, linear_twin(x, weight, norm=gain, eps=EPS))


# A normalised product is not cut: its sum of squares spans all of K.
@pytest.mark.parametrize(("norm", "splits"), [(False, 1), (False, 2), (True, 1)])
def test_linear_rows_do_not_depend_on_count_or_place(norm, splits):
    weight, gain = matrix(32, 160), 1 + 0.1 * make(160, seed=4)
    cut, partial = SMALL._replace(splits=splits), torch.zeros(splits, 16, 32, device=DEVICE)
    x = make(16, 160, seed=5)

    def run(rows):
        padded, out = torch.full_like(x, torch.nan), torch.zeros(16, 32, device=DEVICE)
        padded[: len(rows)] = rows
        linear(padded, weight, out, state_of(len(rows)), norm=gain if norm else None, eps=EPS, partial=partial, cut=cut)
        return out[: len(rows)]

    together = run(x)
    for count in range(1, 17) if norm else ROW_COUNTS:
        assert torch.equal(run(x[:count]), together[:count])
        assert torch.equal(run(x[16 - count :]), together[16 - count :])
    if norm:
        close(together, linear_twin(x, weight, norm=gain, eps=EPS))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "hidden", "bias", "format", "normed", "rotary"),
    [
        (4, 2, 16, 64, False, "fp32", False, True),
        (4, 1, 32, 96, True, "fp32", False, True),
        (3, 3, 48, 64, False, "int8", False, True),
        (3, 3, 48, 160, True, "int4", False, True),
        (3, 3, 48, 96, True, "fp8", False, True),
        (9, 3, 64, 576, False, "fp32", False, True),  # the default model
        (4, 2, 32, 64, False, "fp32", False, False),
        (4, 1, 32, 96, True, "fp32", True, True),
        (2, 1, 128, 64, False, "int8", True, True),
        (2, 1, 128, 64, False, "int4", True, True),
    ],
)
def test_qkv(heads, kv_heads, head_dim, hidden, bias, format, normed, rotary):
    capacity, of_queries, of_others = 128, heads * head_dim, 2 * kv_heads * head_dim
    outputs = of_queries + of_others
    x, norm, kv = make(16, hidden, seed=1), 1 + 0.1 * make(hidden, seed=2), None
    weight = matrix(of_queries if format == "int4" else outputs, hidden, format)
    if format == "int4":  # which leaves keys and values int8
        kv = matrix(of_others, hidden, "int8", seed=6)
    offset = make(outputs, seed=3) if bias else None
    norms = 1 + 0.3 * make(2, head_dim, seed=4) if normed else None
    rotations = table(capacity, head_dim) if rotary else None
    alone, how = None, {"kv": kv, "norms": norms}
    passes = [(1, 9), (16, 9), (5, 0), (2, 9), (16, 56)]
    for rows, start in passes if format == "fp32" else passes[:3]:
        queries = torch.zeros(16, heads, head_dim, device=DEVICE)
        cache = torch.zeros(capacity // PAGE, 2 * kv_heads, PAGE, head_dim, device=DEVICE)
        qkv(x, norm, EPS, weight, offset, rotations, queries, cache, state_of(rows, start), **how)
        keys, values = unpaged(cache)
        twin = qkv_twin(x[:rows], norm, EPS, weight, offset, rotations, heads, kv_heads, start, **how)
        inside = slice(start, start + rows)
        found = queries[:rows], keys[:, inside].transpose(0, 1), values[:, inside].transpose(0, 1)
        for ours, theirs in zip(found, twin, strict=True):
            close(ours, theirs)
        assert not queries[rows:].any()
        for cache in (keys, values):
            assert not cache[:, :start].any()
            assert not cache[:, start + rows :].any()
        if alone is None:
            alone = [t[:1].clone() for t in found]
        elif start == 9:
            assert all(torch.equal(t[:1], one) for t, one in zip(found, alone, strict=True))


@pytest.mark.parametrize(
    ("inner", "hidden", "format"),
    [(96, 64, "fp32"), (44, 96, "fp32"), (64, 64, "int8"), (44, 96, "int4"), (44, 96, "fp8"), slow(1536, 576, "fp32")],
)
def test_swiglu(inner, hidden, format):
    x, norm, weight = make(16, hidden, seed=1), 1 + 0.1 * make(hidden, seed=2), matrix(2 * inner, hidden, format)
    twin = swiglu_twin(x, norm, EPS, weight)
    whole = None
    for rows in (16, 7, 1):
        out = torch.zeros(16, inner, device=DEVICE)
        swiglu(x, norm, EPS, weight, out, state_of(rows))
        close(out[:rows], twin[:rows])
        assert not out[rows:].any()
        whole = out if whole is None else whole
        assert torch.equal(out[:rows], whole[:rows])


@pytest.mark.parametrize("splits", [1, 2])
def test_rows_are_left_rounded_for_the_kernels_after(splits):
    """Those of the pass, wherever the rows themselves stand."""
    x, weight, start = make(16, 160, seed=1), matrix(32, 160), 9
    partial, cut = torch.zeros(splits, 16, 32, device=DEVICE), SMALL._replace(splits=splits)
    residual = make(40, 32, seed=3)
    out, rounded = residual.clone(), torch.full((16, 32), torch.nan, device=DEVICE)
    linear(x, weight, out, state_of(7, start), residual=out, rounded=rounded, partial=partial, cut=cut)
    assert torch.equal(rounded[:7], out[start : start + 7])
    assert rounded[7:].isnan().all()
    assert not torch.equal(out[start : start + 7], residual[start : start + 7])


@pytest.mark.skipif(DEVICE != "cuda", reason="Triton's interpreter gets bfloat16 wrong")
@pytest.mark.gpu
def test_rows_have_the_same_bits_when_they_are_rounded_already():
    x, gain, weight = make(16, 576, seed=1), 1 + 0.1 * make(576, seed=2).bfloat16(), Weight(make(96, 576).bfloat16())
    whole, again = torch.zeros(2, 16, 96, device=DEVICE)
    linear(x, weight, whole, state_of(16), norm=gain, eps=EPS)
    linear(x.bfloat16(), weight, again, state_of(16), norm=gain, eps=EPS)
    assert torch.equal(whole, again)


def test_int8_is_near_and_its_scales_are_the_blocks_maxima():
    weight = make(64, 96)
    packed = quantise(weight)
    assert packed.values.abs().amax() == 127
    step = weight.unflatten(1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
    assert ((packed.wide() - weight).unflatten(1, (-1, 32)).abs() <= 0.56 * step).all()


def test_fp8_is_near_and_its_scales_are_the_rows_maxima():
    weight = make(64, 96)
    weight[5] = 0.0
    packed = quantise_fp8(weight)
    assert torch.equal(packed.wide().abs().amax(1) > 0, weight.abs().amax(1) > 0)
    assert (packed.values.float().abs().amax(1)[torch.arange(64) != 5] == 448).all()
    least = weight.abs().amax(1, keepdim=True) / 448 * 2**-10  # half of the smallest float8
    assert ((packed.wide() - weight).abs() <= weight.abs() / 16 * 1.0001 + least).all()


@formats
def test_feedback(format):
    """What a feedback head receives: from every distance, and nothing from further."""
    hidden, distances = 64, 3
    weight = in_format(make(distances * hidden, hidden, seed=1) / 8, format)
    x, last, norm = make(40, hidden, seed=2), make(40, hidden, seed=3), 1 + 0.1 * make(hidden, seed=4)
    heard = {}
    for rows, start, known in [(1, 9, 9), (1, 10, 9), (3, 9, 9), (4, 9, 9), (2, 0, 0), (5, 20, 22), (16, 3, 18)]:
        clean = last.clone()
        clean[known:] = torch.nan  # rows that no verdict has come to yet
        out = torch.full((16, hidden), 7.0, device=DEVICE)
        feedback(x, clean, norm, EPS, weight, out, state_of(rows, start, known))
        close(out[:rows], feedback_twin(x, last, norm, EPS, weight, start, rows, known))
        assert (out[rows:] == 7.0).all()
        assert torch.equal(out[: rows - 1], x[start : start + rows - 1])
        if known:
            heard[start + rows - known] = not torch.equal(out[rows - 1], x[start + rows - 1])
    assert heard == {1: True, 2: True, 3: True, 4: False}
