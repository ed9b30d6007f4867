"""The linear layers of a prompt: as linear.py, qkv.py and swiglu.py, for any number of rows at once.

    normalise:  y = x / sqrt(mean(x^2) + eps) * norm                      x [rows, hidden] float32
    linear:     out = (residual +) y W^T (+ bias)                         float32 [rows, outputs]
    qkv:        as in qkv.py, for rows at positions start + r
    swiglu:     out = silu(y G^T) * (y U^T)

A program computes OUTPUTS_BLOCK outputs of ROWS_BLOCK rows: the weights are the left operand, the rows the columns of
the right one, as for a decoding step, and all of K in one go, in steps of STEP, in float32. What a row gets depends on
nothing but the row: not on where the pass begins, nor on how many rows it has. Launched eagerly, once an answer.

Quantised weights are the right operand: they are made floating point in registers, and a left operand stays there while
Hopper's matrix instructions read it, which ptxas before 13.3 does not wait for (triton-lang/triton issue 9433).
"""

import triton
import triton.language as tl
from torch import Tensor

from . import int4
from .cache import PAGE, cell_of_seat, heads_of
from .linear import Weight, dot_type
from .qkv import left, normed, turned

OUTPUTS_BLOCK, ROWS_BLOCK, STEP = 128, 128, 64
WARPS, STAGES = 8, {"plain": 3, "int8": 3, "int4": 2, "fp8": 3}  # a step of int4 is twice as long
_ROWS_BLOCK, _STEP, _GROUP, _PAGE = map(tl.constexpr, (ROWS_BLOCK, STEP, int4.GROUP, PAGE))


@triton.jit
def normalise_kernel(x, norm, eps, out, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """Grid (rows). WIDTH: HIDDEN, rounded up to a power of two."""
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    wide = channel < HIDDEN
    values = tl.load(x + row * HIDDEN + channel, mask=wide, other=0)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / HIDDEN + eps)
    values = values * scale * tl.load(norm + channel, mask=wide, other=0).to(tl.float32)
    tl.store(out + row * HIDDEN + channel, values.to(out.dtype.element_ty), mask=wide)


@triton.jit
def int4_weights(weight, scale, output, here, step, INPUTS: tl.constexpr, DOT: tl.constexpr):
    """A group of inputs from `step` on, [N, 128]; output and here: [N, 1]."""
    N: tl.constexpr = output.shape[0]
    GROUPS: tl.constexpr = (INPUTS + _GROUP - 1) // _GROUP
    group = output * GROUPS + step // _GROUP
    levels = int4.levels_of(tl.load(weight + group * 16 + tl.arange(0, 16)[None, :], mask=here, other=0), DOT)
    factor, more = int4.factors_of(tl.load(scale + group * 4 + tl.arange(0, 4)[None, :], mask=here, other=0))
    blocks = levels.to(tl.float32).reshape([N, 4, 4, 8]).permute(0, 2, 1, 3).reshape([N, 4, 32])
    return (blocks * factor[:, :, None] + more[:, :, None]).reshape([N, _GROUP])


@triton.jit
def product(
    x, weight, scale, outputs, live, first, rows, INPUTS: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """W x for those `outputs` [N] that are `live` and ROWS_BLOCK rows from `first` on -> float32 [N, ROWS_BLOCK]."""
    output, row = outputs.to(tl.int64)[:, None], (first + tl.arange(0, _ROWS_BLOCK))[None, :]
    sums = tl.zeros([outputs.shape[0], _ROWS_BLOCK], tl.float32)
    turned = tl.zeros([_ROWS_BLOCK, outputs.shape[0]], tl.float32)
    STEP: tl.constexpr = _GROUP if FORMAT == "int4" else _STEP
    for step in tl.range(0, INPUTS, STEP):
        k = step + tl.arange(0, STEP)
        if FORMAT == "int4":
            w = int4_weights(weight, scale, output, live[:, None], step, INPUTS, DOT)
        else:
            nothing: tl.constexpr = 0.0 if FORMAT == "fp8" else 0
            here = live[:, None] & (k < INPUTS)[None, :]
            w = tl.load(weight + output * INPUTS + k[None, :], mask=here, other=nothing)
        if FORMAT == "int8":
            block = step // 32 + tl.arange(0, STEP // 32)
            whole = live[:, None] & (block < INPUTS // 32)[None, :]
            scales = tl.load(scale + output * (INPUTS // 32) + block[None, :], mask=whole, other=0).to(tl.float32)
            parts = w.to(tl.float32).reshape([outputs.shape[0], STEP // 32, 32]) * scales[:, :, None]
            w = parts.reshape([outputs.shape[0], STEP])
        cell = row.to(tl.int64) * INPUTS + k[:, None]
        columns = tl.load(x + cell, mask=(row < rows) & (k < INPUTS)[:, None], other=0)
        if FORMAT == "plain":
            sums = tl.dot(w.to(DOT), columns.to(DOT), sums, input_precision="ieee")
        else:
            turned = tl.dot(tl.trans(columns.to(DOT)), tl.trans(w.to(DOT)), turned, input_precision="ieee")
    if FORMAT == "fp8":
        return tl.trans(turned) * tl.load(scale + outputs, mask=live, other=0)[:, None]
    if FORMAT != "plain":
        return tl.trans(turned)
    return sums


@triton.jit(do_not_specialize=["rows"])
def prompt_linear_kernel(
    x, weight, scale, bias, residual, out, rows,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Grid (outputs / BLOCK, rows / ROWS_BLOCK)."""
    outputs, first = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * _ROWS_BLOCK
    live = outputs < OUTPUTS
    y = product(x, weight, scale, outputs, live, first, rows, INPUTS, FORMAT, DOT)
    row = (first + tl.arange(0, _ROWS_BLOCK))[None, :]
    place, mask = row.to(tl.int64) * OUTPUTS + outputs[:, None], live[:, None] & (row < rows)
    if bias is not None:
        y += tl.load(bias + outputs, mask=live, other=0).to(tl.float32)[:, None]
    if residual is not None:
        y = tl.load(residual + place, mask=mask, other=0).to(tl.float32) + y
    tl.store(out + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def prompt_swiglu_kernel(
    x, weight, scale, out, rows,
    INNER: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Grid (inner / (BLOCK / 2), rows / ROWS_BLOCK)."""
    HALF: tl.constexpr = BLOCK // 2
    begin, lane, first = tl.program_id(0) * HALF, tl.arange(0, BLOCK), tl.program_id(1) * _ROWS_BLOCK
    inner = begin + lane % HALF
    y = product(x, weight, scale, inner + (lane // HALF) * INNER, inner < INNER, first, rows, INPUTS, FORMAT, DOT)
    gate, up = tl.split(y.reshape([2, HALF, _ROWS_BLOCK]).permute(1, 2, 0))
    row, inner = (first + tl.arange(0, _ROWS_BLOCK))[None, :], (begin + tl.arange(0, HALF))[:, None]
    mixed = gate / (1.0 + tl.exp(-gate)) * up
    place = row.to(tl.int64) * INNER + inner
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=(row < rows) & (inner < INNER))


@triton.jit(do_not_specialize=["rows", "start"])
def prompt_qkv_kernel(
    x, weight, scale, kv_weight, kv_scale, bias, norms, eps, rotations, queries, cache, pages, rows, start,
    HEADS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, KV_FORMAT: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Grid (outputs / BLOCK, rows / ROWS_BLOCK): as in qkv.py."""
    HALF: tl.constexpr = BLOCK // 2
    PARTS: tl.constexpr = HEADS.dim // BLOCK
    head, part, first = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1) * _ROWS_BLOCK
    lane = tl.arange(0, BLOCK)
    outputs = head * HEADS.dim + part * HALF + lane % HALF + (lane // HALF) * (HEADS.dim // 2)
    if kv_weight is not None and head >= HEADS.queries:
        other = outputs - HEADS.queries * HEADS.dim
        y = product(x, kv_weight, kv_scale, other, lane < BLOCK, first, rows, INPUTS, KV_FORMAT, DOT)
    else:
        y = product(x, weight, scale, outputs, lane < BLOCK, first, rows, INPUTS, FORMAT, DOT)
    if bias is not None:
        y += tl.load(bias + outputs).to(tl.float32)[:, None]
    a, b = tl.split(y.reshape([2, HALF, _ROWS_BLOCK]).permute(1, 2, 0))
    channel = (part * HALF + tl.arange(0, HALF))[:, None]
    row = (first + tl.arange(0, _ROWS_BLOCK))[None, :]
    position, live = start + row, (row < rows) & (channel < HEADS.dim)
    if head < HEADS.queries + HEADS.kv:
        if norms is not None:
            a, b = normed(a, b, norms + (head >= HEADS.queries) * HEADS.dim, channel, eps, HEADS.dim)
        if rotations is not None:
            a, b = turned(a, b, rotations, position, channel, live, HEADS.dim)
    if head < HEADS.queries:
        left(queries + (row.to(tl.int64) * HEADS.queries + head) * HEADS.dim + channel, a, b, live, HEADS.dim)
    else:
        seat = tl.load(pages + position // _PAGE, mask=row < rows, other=0) * _PAGE + position % _PAGE
        left(cache + cell_of_seat(seat, head - HEADS.queries, HEADS) + channel, a, b, live, HEADS.dim)


def normalise(x: Tensor, norm: Tensor, eps: float, out: Tensor) -> None:
    rows, hidden = x.shape
    normalise_kernel[(rows,)](x, norm, eps, out, HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden), num_warps=4)


def prompt_linear(
    x: Tensor, weight: Weight, out: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None
) -> None:
    """x [rows, inputs] -> out [rows, outputs], which may be the residual."""
    grid = (triton.cdiv(weight.outputs, OUTPUTS_BLOCK), triton.cdiv(len(x), ROWS_BLOCK))
    prompt_linear_kernel[grid](
        x, weight.values, weight.scales, bias, residual, out, len(x), OUTPUTS=weight.outputs, INPUTS=weight.inputs,
        BLOCK=OUTPUTS_BLOCK, FORMAT=weight.format, DOT=dot_type(weight), num_warps=WARPS,
        num_stages=STAGES[weight.format],
    )  # fmt: skip


def prompt_swiglu(x: Tensor, weight: Weight, out: Tensor) -> None:
    """x [rows, hidden] -> out [rows, inner]."""
    inner = weight.outputs // 2
    prompt_swiglu_kernel[(triton.cdiv(inner, OUTPUTS_BLOCK // 2), triton.cdiv(len(x), ROWS_BLOCK))](
        x, weight.values, weight.scales, out, len(x), INNER=inner, INPUTS=weight.inputs, BLOCK=OUTPUTS_BLOCK,
        FORMAT=weight.format, DOT=dot_type(weight), num_warps=WARPS, num_stages=STAGES[weight.format],
    )  # fmt: skip


def prompt_qkv(
    x: Tensor, weight: Weight, bias: Tensor | None, rotations: Tensor | None, queries: Tensor, cache: Tensor,
    pages: Tensor, start: int, *, kv: Weight | None = None, norms: Tensor | None = None, eps: float = 0.0,
) -> None:  # fmt: skip
    """As `qkv`: queries [rows, heads, head_dim]. pages: the text's page table. eps: of the norms of heads."""
    heads = heads_of(queries, cache)
    block = next(size for size in (OUTPUTS_BLOCK, 64, 32, 16) if heads.dim % size == 0)
    assert norms is None or block == heads.dim, "a head that has a norm is computed by one program"
    outputs = weight.outputs + (kv.outputs if kv else 0)
    prompt_qkv_kernel[(outputs // block, triton.cdiv(len(x), ROWS_BLOCK))](
        x, weight.values, weight.scales, *(kv or (None, None))[:2], bias, norms, eps, rotations, queries, cache, pages,
        len(x), start, HEADS=heads, INPUTS=weight.inputs, BLOCK=block, FORMAT=weight.format,
        KV_FORMAT=(kv or weight).format, DOT=dot_type(weight),
        num_warps=WARPS if block >= 64 else 4, num_stages=STAGES[(kv or weight).format],
    )  # fmt: skip
