"""Linear layer for 1..16 rows: one padded kernel, one configuration, so the same bits for every number of rows.

    y = x W^T (+ bias) (+ residual)        x [16, inputs], W [outputs, inputs], y [16, outputs]

    with NORM: x is first normalised, x / sqrt(mean(x^2) + eps) * norm; the division comes after the product, because
    it is the same number for all of a row, and so the sum of squares is gathered on the way: one pass over x.

Rows stand either as those of the pass, [16, n], or each at its position, [capacity, n] (`at_positions`): the exit
hidden states stay where draft steps leave them, and verification reads them there.

The weights are the left operand, the rows the 16 columns of the right one. Rows from state[ROWS] on are zeros and are
not stored. K is cut twice, both cuts fixed by the shape of W: into SLICES that the warps of a program take side by side
and add up at the end, and into SPLITS programs whose float32 sums `reduce_splits` adds in order. No atomics.

int8: W is int8 with a float16 scale for every 32 inputs [outputs, inputs / 32]; a weight is int8 * scale, rounded to
the type that the matrix instruction takes. Rows keep their precision.

Launched as a programmatic dependent (PDL), a program has its first weights on the way before it waits for the kernel
ahead, whose results are the rows. The wait stands before the loop: inside a pipelined one it comes too late. Every
kernel waits before it lets the next one start, so that all kernels ahead, not only the last one, have finished.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .state import MAX_ROWS, ROWS, START

INT8_BLOCK = 32
MAX_REGISTERS = 128  # of a thread: with eight warps half of what a multiprocessor has, so that two programs share it
_ROWS, _START = tl.constexpr(ROWS), tl.constexpr(START)
_MAX_ROWS = tl.constexpr(MAX_ROWS)


class Tiling(NamedTuple):
    """How a matrix is cut. It depends on the matrix alone: never on the number of rows."""

    block: int  # outputs of a program
    slices: int  # parts of K that its warps take side by side
    slice: int  # inputs of a part in one step
    splits: int  # programs that share the K of an output
    warps: int
    stages: int

    def steps(self, inputs: int) -> int:
        """Of one program."""
        return triton.cdiv(inputs, self.slices * self.slice * self.splits)


@triton.jit
def weight_tile(
    weight, scale, outputs, live, k,
    INPUTS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, INT8: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Weights of `outputs` [N] and the inputs from k on -> [SLICES, N, SLICE]."""
    ks = k + tl.arange(0, SLICES)[:, None, None] * SLICE + tl.arange(0, SLICE)[None, None, :]
    rows = outputs.to(tl.int64)[None, :, None]
    here = live[None, :, None]
    w = tl.load(weight + rows * INPUTS + ks, mask=here & (ks < INPUTS), other=0, eviction_policy="evict_first")
    if INT8:
        blocks: tl.constexpr = SLICE // 32
        ks = k // 32 + tl.arange(0, SLICES)[:, None, None] * blocks + tl.arange(0, blocks)[None, None, :]
        scales = tl.load(scale + rows * (INPUTS // 32) + ks, mask=here & (ks < INPUTS // 32), other=0)
        parts = w.to(tl.float32).reshape([SLICES, w.shape[1], blocks, 32]) * scales.to(tl.float32)[:, :, :, None]
        return parts.reshape([SLICES, w.shape[1], SLICE]).to(DOT)
    return w.to(DOT)


@triton.jit
def row_tile(
    x, norm, rows, k,
    INPUTS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, NORM: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The rows, transposed, times the norm's weights [SLICES, SLICE, 16]; the sums of their squares [SLICES, 16]."""
    ks = k + tl.arange(0, SLICES)[:, None, None] * SLICE + tl.arange(0, SLICE)[None, :, None]
    row = tl.arange(0, _MAX_ROWS)[None, None, :]
    values = tl.load(x + row * INPUTS + ks, mask=(row < rows) & (ks < INPUTS), other=0)
    if NORM:
        wide = values.to(tl.float32)
        weights = tl.load(norm + ks, mask=ks < INPUTS, other=0).to(tl.float32)
        return (wide * weights).to(DOT), tl.sum(wide * wide, axis=1)
    else:
        return values.to(DOT), tl.zeros([SLICES, _MAX_ROWS], tl.float32)


@triton.jit
def placed(rows, state, WIDTH: tl.constexpr, AT: tl.constexpr):
    """Where the pass's first row is: at the beginning, or at its position."""
    if AT:
        rows += tl.load(state + _START) * WIDTH  # less than 2^31: 128 k positions of 16 k
    return rows


@triton.jit
def multiply(
    x, norm, eps, weight, scale, outputs, live, state, first,
    INPUTS: tl.constexpr, STEPS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr,
    NORM: tl.constexpr, X_AT: tl.constexpr, INT8: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """W x for those `outputs` [N] that are `live`, STEPS steps from input `first` on -> [N, 16], and how many rows."""
    STEP: tl.constexpr = SLICES * SLICE
    w = weight_tile(weight, scale, outputs, live, first, INPUTS, SLICES, SLICE, INT8, DOT)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.load(state + _ROWS)
    x = placed(x, state, INPUTS, X_AT)
    columns, squares = row_tile(x, norm, rows, first, INPUTS, SLICES, SLICE, NORM, DOT)
    sums = tl.dot(w, columns, input_precision="ieee")
    for step in tl.range(1, STEPS):
        k = first + step * STEP
        w = weight_tile(weight, scale, outputs, live, k, INPUTS, SLICES, SLICE, INT8, DOT)
        columns, more = row_tile(x, norm, rows, k, INPUTS, SLICES, SLICE, NORM, DOT)
        sums = tl.dot(w, columns, sums, input_precision="ieee")
        squares += more
    y = tl.sum(sums, axis=0)
    if NORM:
        y = y * tl.rsqrt(tl.sum(squares, axis=0) / INPUTS + eps)[None, :]
    return y, rows


@triton.jit
def linear_kernel(
    x, norm, eps, weight, scale, bias, residual, out, state,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    SLICES: tl.constexpr, SLICE: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    X_AT: tl.constexpr, ADD_AT: tl.constexpr, OUT_AT: tl.constexpr,
    INT8: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (outputs / BLOCK, SPLITS). With SPLITS > 1 `out` is the partial sums, float32 [SPLITS, 16, outputs]."""
    outputs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    split = tl.program_id(1)
    live = outputs < OUTPUTS
    y, rows = multiply(
        x, norm, eps, weight, scale, outputs, live, state, split * (STEPS * SLICES * SLICE),
        INPUTS, STEPS, SLICES, SLICE, NORM, X_AT, INT8, DOT, PDL,
    )  # fmt: skip
    row = tl.arange(0, _MAX_ROWS)[None, :]
    place, mask = row * OUTPUTS + outputs[:, None], live[:, None] & (row < rows)
    if SPLITS > 1:
        tl.store(out + split * (_MAX_ROWS * OUTPUTS) + place, y, mask=mask)
    else:
        if BIAS:
            y += tl.load(bias + outputs, mask=live, other=0).to(tl.float32)[:, None]
        if ADD:
            y = tl.load(placed(residual, state, OUTPUTS, ADD_AT) + place, mask=mask, other=0).to(tl.float32) + y
        tl.store(placed(out, state, OUTPUTS, OUT_AT) + place, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def reduce_splits_kernel(
    partial, bias, residual, out, state,
    OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, ADD_AT: tl.constexpr, OUT_AT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = (residual +) partial[0] + partial[1] + ... (+ bias), in that order. Grid (outputs / BLOCK, 16)."""
    outputs, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    live = outputs < OUTPUTS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if row < tl.load(state + _ROWS):
        place = row * OUTPUTS + outputs
        y = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            y += tl.load(partial + split * (_MAX_ROWS * OUTPUTS) + place, mask=live, other=0)
        if BIAS:
            y += tl.load(bias + outputs, mask=live, other=0).to(tl.float32)
        if ADD:
            y = tl.load(placed(residual, state, OUTPUTS, ADD_AT) + place, mask=live, other=0).to(tl.float32) + y
        tl.store(placed(out, state, OUTPUTS, OUT_AT) + place, y.to(out.dtype.element_ty), mask=live)


class Weight(NamedTuple):
    """A matrix [outputs, inputs] as the kernels take it: as it is, or int8 with scales [outputs, inputs / 32]."""

    values: Tensor
    scales: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.values.shape[1]

    def to(self, device: torch.device | str) -> "Weight":
        return Weight(self.values.to(device), None if self.scales is None else self.scales.to(device))

    def wide(self) -> Tensor:
        """float32 [outputs, inputs]."""
        if self.scales is None:
            return self.values.float()
        parts = self.values.float().unflatten(1, (-1, INT8_BLOCK)) * self.scales.float()[:, :, None]
        return parts.flatten(1)


def tiling(weight: Weight) -> Tiling:
    """Programs for a whole GPU where the matrix is large enough; wide ones where they suffice: each reads all rows."""
    block = 32 if weight.outputs >= 128 * 32 else 16
    splits = 4 if weight.outputs < 64 * block and weight.inputs >= 2048 else 1
    slice = 64 if block == 16 else 32
    if block == 16 and weight.inputs <= 1024:
        # Plain: all weights are on the way before the wait. int8: as much as fits the registers on Ampere.
        slice = 128 if weight.scales is None else 32
    return Tiling(block, 8, slice, splits, 8, 3)


def quantise(weight: Tensor) -> Weight:
    """int8 with a float16 scale for every 32 inputs: the largest of them becomes 127."""
    blocks = weight.float().unflatten(1, (-1, INT8_BLOCK))
    scales = (blocks.abs().amax(-1) / 127).to(torch.float16)
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    values = (blocks * inverse[:, :, None]).round().clamp(-127, 127).to(torch.int8)
    return Weight(values.flatten(1), scales)


def dot_type(weight: Weight, x: Tensor) -> tl.dtype:
    """What the matrix instruction takes: the type of the weights; for int8 bfloat16, in the interpreter float32."""
    wide = weight.values.dtype == torch.float32 or (weight.scales is not None and x.device.type == "cpu")
    return tl.float32 if wide else tl.bfloat16


def at_positions(rows: Tensor) -> bool:
    """Does every row stand at its position ([capacity, n]), or are they those of a pass ([16, n])?"""
    return len(rows) > MAX_ROWS


def linear(
    x: Tensor, weight: Weight, out: Tensor, state: Tensor, *,
    norm: Tensor | None = None, eps: float = 0.0, bias: Tensor | None = None, residual: Tensor | None = None,
    partial: Tensor | None = None, cut: Tiling | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """out [16, outputs] = (residual +) norm(x) W^T (+ bias) for the first state[ROWS] rows; out may be the residual.

    x, residual and out may also be [capacity, n], with every row at its position.

    partial: float32 [splits, 16, outputs], where the matrix is cut along K (`tiling(weight).splits` > 1).
    """
    cut = cut or tiling(weight)
    shared = {"OUTPUTS": weight.outputs, "BIAS": bias is not None, "ADD": residual is not None, "PDL": pdl}
    shared |= {"ADD_AT": residual is not None and at_positions(residual), "OUT_AT": at_positions(out)}
    target = out if cut.splits == 1 else partial
    assert target is not None, "a matrix cut along K needs room for its partial sums"
    assert cut.splits == 1 or norm is None, "the norm's sum of squares spans all of K"
    linear_kernel[(triton.cdiv(weight.outputs, cut.block), cut.splits)](
        x, norm, eps, weight.values, weight.scales, bias, residual, target, state,
        INPUTS=weight.inputs, BLOCK=cut.block, STEPS=cut.steps(weight.inputs), SLICES=cut.slices, SLICE=cut.slice,
        SPLITS=cut.splits, NORM=norm is not None, X_AT=at_positions(x),
        INT8=weight.scales is not None, DOT=dot_type(weight, x),
        num_warps=cut.warps, num_stages=cut.stages, maxnreg=MAX_REGISTERS, launch_pdl=pdl, **shared,
    )  # fmt: skip
    if cut.splits > 1:
        reduce_splits_kernel[(triton.cdiv(weight.outputs, 128), MAX_ROWS)](
            partial, bias, residual, out, state, SPLITS=cut.splits, BLOCK=128, num_warps=4, launch_pdl=pdl, **shared
        )


def normalise_twin(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()


def linear_twin(
    x: Tensor, weight: Weight, *, norm: Tensor | None = None, eps: float = 0.0,
    bias: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [rows, inputs] -> float32 [rows, outputs]."""
    y = (x.float() if norm is None else normalise_twin(x, norm, eps)) @ weight.wide().t()
    y = y if bias is None else y + bias.float()
    return y if residual is None else residual.float() + y
