"""The kernels of a prompt pass: near a decoding step's twins; a row's bits do not depend on the others."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from kernel_support import DEVICE, FORMATS, close, make, matrix, paged, table, unpaged
from kernel_twins import attention_twin, linear_twin, qkv_twin, swiglu_twin

from ppsd_rt.triton_kernels.cache import PAGE
from ppsd_rt.triton_kernels.linear import normalise_twin
from ppsd_rt.triton_kernels.prompt_attention import ROWS_BLOCK, prompt_attention
from ppsd_rt.triton_kernels.prompt_layers import normalise, prompt_linear, prompt_qkv, prompt_swiglu

EPS = 1e-5
formats = pytest.mark.parametrize("format", FORMATS)


def shuffled(capacity):
    """A page table."""
    return torch.randperm(capacity // PAGE, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.int32)


def test_normalise():
    x, norm = make(5, 96, seed=1), 1 + 0.1 * make(96, seed=2)
    out = torch.full((5, 96), torch.nan, device=DEVICE)
    normalise(x, norm, EPS, out)
    close(out, normalise_twin(x, norm, EPS))


@formats
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 96), (150, 160)])
def test_linear(outputs, inputs, format):
    x, weight = make(200, inputs, seed=1), matrix(outputs, inputs, format)
    bias, residual = make(outputs, seed=2), make(200, outputs, seed=3)
    twin = linear_twin(x, weight, bias=bias, residual=residual)
    whole = residual.clone()
    prompt_linear(x, weight, whole, bias=bias, residual=whole)
    close(whole, twin)
    for first, last in [(0, 1), (7, 150), (130, 200)]:
        out = torch.full((last - first, outputs), torch.nan, device=DEVICE)
        prompt_linear(x[first:last], weight, out, bias=bias, residual=residual[first:last])
        assert torch.equal(out, whole[first:last])


@formats
def test_swiglu(format):
    x, norm, weight = make(133, 64, seed=1), 1 + 0.1 * make(64, seed=2), matrix(2 * 96, 64, format)
    normed, out = torch.empty_like(x), torch.full((133, 96), torch.nan, device=DEVICE)
    normalise(x, norm, EPS, normed)
    prompt_swiglu(normed, weight, out)
    close(out, swiglu_twin(x, norm, EPS, weight))
    alone = torch.full((3, 96), torch.nan, device=DEVICE)
    prompt_swiglu(normed[60:63], weight, alone)
    assert torch.equal(alone, out[60:63])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "bias", "format", "normed", "rotary"),
    [
        (4, 2, 16, False, "fp32", False, True),
        (3, 1, 48, True, "int8", False, True),
        (3, 1, 48, True, "int4", False, True),
        (3, 1, 48, True, "fp8", False, True),
        (2, 1, 32, True, "fp32", True, True),
        (2, 1, 16, False, "fp32", False, False),
    ],
)
def test_qkv(heads, kv_heads, head_dim, bias, format, normed, rotary):
    capacity, rows, start, hidden = 256, 140, 37, 64
    x, norm = make(rows, hidden, seed=1), 1 + 0.1 * make(hidden, seed=2)
    outputs, kv = (heads + 2 * kv_heads) * head_dim, None
    weight = matrix(heads * head_dim if format == "int4" else outputs, hidden, format)
    if format == "int4":  # which leaves keys and values int8
        kv = matrix(2 * kv_heads * head_dim, hidden, "int8", seed=6)
    offset = make(outputs, seed=3) if bias else None
    norms = 1 + 0.3 * make(2, head_dim, seed=4) if normed else None
    rotations = table(capacity, head_dim) if rotary else None
    y, queries = torch.empty_like(x), torch.zeros(rows, heads, head_dim, device=DEVICE)
    cache, pages = torch.zeros(capacity // PAGE, 2 * kv_heads, PAGE, head_dim, device=DEVICE), shuffled(capacity)
    normalise(x, norm, EPS, y)
    how = {"kv": kv, "norms": norms}
    prompt_qkv(y, weight, offset, rotations, queries, cache, pages, start, eps=EPS, **how)
    keys, values = unpaged(cache[pages.long()])
    twin = qkv_twin(x, norm, EPS, weight, offset, rotations, heads, kv_heads, start, **how)
    inside = slice(start, start + rows)
    for ours, theirs in zip(
        (queries, keys[:, inside].transpose(0, 1), values[:, inside].transpose(0, 1)), twin, strict=True
    ):
        close(ours, theirs)
    for cache in (keys, values):
        assert not cache[:, :start].any()
        assert not cache[:, start + rows :].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"), [(2, 2, 16, None), (3, 1, 48, None), (2, 1, 16, 5), (2, 1, 16, 100)]
)
def test_attention(heads, kv_heads, head_dim, window):
    rows, start, pages = ROWS_BLOCK + 20, PAGE - 7, shuffled(256)
    keys, values = make(kv_heads, 256, head_dim, seed=1), make(kv_heads, 256, head_dim, seed=2)
    keys[:, start + rows :] = values[:, start + rows :] = torch.nan  # must not be read
    queries = 3 * make(rows, heads, head_dim, seed=3)
    out, cache = torch.full_like(queries, torch.nan), paged(keys, values)[pages.argsort()]
    prompt_attention(queries, cache, pages, out, start, window)
    close(out, attention_twin(queries, keys, values, start, window))
    for first, last in [(0, 1), (5, 77), (100, rows)]:
        alone = torch.full_like(queries[first:last], torch.nan)
        prompt_attention(queries[first:last], cache, pages, alone, start + first, window)
        assert torch.equal(alone, out[first:last])
