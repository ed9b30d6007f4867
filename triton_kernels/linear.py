"""Linear layer for 1..16 rows: one padded kernel, one configuration, so the same bits for every number of rows.

    y = x W^T (+ bias) (+ residual)        x [16, inputs], W [outputs, inputs], y [16, outputs]

    with NORM: x is first normalised, x / sqrt(mean(x^2) + eps) * norm; the division comes after the product, because
    it is the same number for all of a row, and so the sum of squares is gathered on the way, as the product of the rows
    with themselves: one pass over x.

Rows stand either as those of the pass, [16, n], or each at its position, [capacity, n] (`at_positions`): the exit
hidden states stay where draft steps leave them, and verification reads them there.

The weights are the left operand, the rows the 16 columns of the right one. Rows from state[ROWS] on are zeros and are
not stored. K is cut twice, both cuts fixed by the shape of W: into SLICES that the warps of a program take side by side
and add up at the end, and into SPLITS programs whose float32 sums `reduce_splits` adds in order. No atomics.

Weights and rows go from memory to the registers where a matrix instruction takes them (`in_order`): the loop needs no
shared memory. Rows are rounded to the type of that instruction before anything else. So squares of bfloat16 are exact,
and a row has the same bits whether it is read in float32 or rounded already.

int8: W is int8 with a float16 scale for every 32 inputs [outputs, inputs / 32]; a weight is int8 * scale, rounded to
the type that the matrix instruction takes.

int4: W and its scales as in int4.py. Codes are exact in the type of the matrix instruction: it multiplies these, and
what it has added up for a block of 32 inputs is multiplied by the block's scale. The minimum comes to the sum of the
rows' values.

fp8: W is float8 (e4m3, exact in bfloat16) with a float32 scale for each output, by which its sum is multiplied.

Launched as a programmatic dependent (PDL), a program has its first weights on the way before it waits for the kernel
ahead, whose results are the rows: AHEAD steps, which is all of K where it is short. From then on each step asks for
the weights of the step that is AHEAD of it. Every kernel waits before it lets the next one start, so that all kernels
ahead, not only the last one, have finished.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import int4
from .ptx import gdc_launch_dependents, gdc_wait, in_turn
from .state import MAX_ROWS, ROWS, START, WORDS
from .texts import Texts, tile_of_program

INT8_BLOCK = 32
# Weights that a thread loads at once: 16 bytes, or 32 of float32.
RUNS = {"plain": 8, "int8": 16, "int4": 32, "fp8": 16}
WARPS = 4  # of a program: whatever registers they take, two programs share a multiprocessor
# Programs for a GPU: three for each multiprocessor of an H200, measured. Latency is hidden by programs rather than by
# what one has on the way, for the assembler waits for all of a warp's loads at once.
ENOUGH = 384
# Weights that a program has on the way, in registers: a short K as a whole (not quantised), or parts of a long one, by
# RUNS; of 16 outputs, of more. Chosen by 710 variants in bfloat16 and int8 on an H200; fp8 has int8's, and int4's are
# as they were: neither has been timed. A crowded kernel has other uses for its registers.
WHOLE_BYTES = 48 * 1024
AHEAD_BYTES = {8: (32 * 1024, 16 * 1024), 16: (16 * 1024, 8 * 1024), 32: (8 * 1024, 8 * 1024)}
CROWDED = {"int8": 2 / 3, "int4": 1 / 2}  # of these bytes
_ROWS, _START, _WORDS = tl.constexpr(ROWS), tl.constexpr(START), tl.constexpr(WORDS)
_MAX_ROWS, _GROUP = tl.constexpr(MAX_ROWS), tl.constexpr(int4.GROUP)


class Tiling(NamedTuple):
    """How a matrix is cut. It depends on the matrix alone: never on the number of rows."""

    block: int  # outputs of a program
    parts: int  # into which its warps cut them
    slices: int  # parts of K that its warps take side by side
    run: int  # inputs that a thread loads at once
    splits: int = 1  # programs that share the K of an output

    @property
    def warps(self) -> int:
        return self.parts * self.slices

    @property
    def step(self) -> int:
        """Inputs that a program takes at once: four threads share a row of a matrix instruction's operand."""
        return self.slices * 4 * self.run

    def steps(self, inputs: int) -> int:
        """Of one program."""
        return triton.cdiv(inputs, self.step * self.splits)

    def ahead(self, inputs: int, share: float = 1) -> int:
        """Steps whose weights are on the way: all, or as many as there is room for. share: of the usual room."""
        steps, size = self.steps(inputs), self.block * self.step * 16 // self.run
        part = round(AHEAD_BYTES[self.run][self.block > 16] * share)
        whole = WHOLE_BYTES if self.run == RUNS["plain"] else part
        return steps if steps * size <= whole else max(1, part // size)


class Matrix(NamedTuple):
    """What a kernel is compiled for: the weights W that it multiplies by, and how."""

    outputs: int
    inputs: int
    format: str
    block: int  # as of the Tiling, up to `run`
    parts: int
    slices: int
    run: int
    steps: int  # of a program's loop over K
    ahead: int  # of them, whose weights are on the way
    even: bool  # are the inputs whole steps?
    dot: tl.dtype  # what the matrix instruction takes
    pdl: bool

    @property
    def step(self) -> int:
        return self.slices * 4 * self.run

    @property
    def warps(self) -> int:
        return self.parts * self.slices

    @property
    def scaled(self) -> bool:
        """By blocks of inputs?"""
        return self.format in ("int8", "int4")


@triton.jit
def program_outputs(W: tl.constexpr):
    """Which of a program's outputs stand where in a tile of weights: [N / 8 * warps * 8 * 4, 1]."""
    GROUPS: tl.constexpr = W.block // W.parts // 8
    at = tl.arange(0, GROUPS * W.warps * 32)[:, None]
    return (at // 32 % W.parts * GROUPS + at // (32 * W.warps)) * 8 + at // 4 % 8


@triton.jit
def thread_inputs(first, COUNT: tl.constexpr, PIECE: tl.constexpr, W: tl.constexpr):
    """The first of a thread's inputs in COUNT tiles: [COUNT * warps * 32, 1]. PIECE: how many stand side by side."""
    at = tl.arange(0, COUNT * W.warps * 32)[:, None]
    return first + at // 32 % W.warps // W.parts * (4 * W.run) + at % 4 * PIECE


@triton.jit
def stored(inputs, W: tl.constexpr):
    """How many weights of a row there are for so many inputs."""
    return (inputs + _GROUP - 1) // _GROUP * _GROUP if W.format == "int4" else inputs


@triton.jit
def in_order(values, RUN: tl.constexpr, TOGETHER: tl.constexpr):
    """[warps, N, 4 * RUN], by thread and input -> the same, as matrix instructions take them.

    Such an instruction takes sixteen inputs, four of each thread: which ones is free, as long as weights and rows have
    the same order. So they are four of the RUN consecutive ones that the thread has loaded. TOGETHER: how many elements
    the compiler gives a thread one after the other, 4 for products with weights, where an instruction takes the first
    two of two such fours, then the last two of both: of eight inputs the first four, then the last four.
    """
    WARPS: tl.constexpr = values.shape[0]
    N: tl.constexpr = values.shape[1]
    if TOGETHER == 2:
        return values.reshape(WARPS, N, 4, RUN // TOGETHER, TOGETHER).permute(0, 1, 3, 2, 4).reshape(WARPS, N, 4 * RUN)
    else:
        values = values.reshape(WARPS, N, 4, RUN // 8, 2, 2, 2).permute(0, 1, 3, 5, 2, 4, 6)
        return values.reshape(WARPS, N, 4 * RUN)


@triton.jit
def of_block(w, scales, BLOCK: tl.constexpr, W: tl.constexpr):
    """Of a tile that has parts of four blocks (int4) the words and scales of one of them, [N / 8, warps, 8, 4, 1]."""
    if W.format == "int4":
        # Sums of one element each, and no tl.split: from 3.7 on that gives its results to other threads.
        word = tl.arange(0, 4)[None, None, None, None, :]
        words = tl.sum(tl.where(word == BLOCK, w, 0), axis=4, keep_dims=True)
        return words, tl.sum(tl.where(word == BLOCK, scales, 0), axis=4, keep_dims=True)
    else:
        return w, scales


@triton.jit
def scaled(sums, scales):
    """Sums [warps, N, 16] times scales [N / 8, warps, 8, 4, 1]: who has rows of an output has loaded its scale."""
    WARPS: tl.constexpr = sums.shape[0]
    N: tl.constexpr = sums.shape[1]
    factors = scales.to(tl.float32).permute(1, 0, 2, 4, 3)[:, :, :, :, :, None]
    return (sums.reshape(WARPS, N // 8, 8, 2, 4, 2) * factors).reshape(WARPS, N, _MAX_ROWS)


@triton.jit
def weight_tile(words, scales, live, ks, end, step, WORDS: tl.constexpr, W: tl.constexpr):
    """Weights from where the pointers say, int32 [N / 8 * warps * 8 * 4, WORDS], and their scales.

    Four threads with RUN inputs each, times eight with an output each, are a warp. Two axes, one of them what a thread
    loads at once: so every Triton gives the other to lanes, then to warps, then to registers. Words, because from step
    to step it would carry each weight in a register of its own.
    """
    here = live & (step < W.steps if W.even else ks < end)
    w = tl.load(words + tl.arange(0, WORDS), mask=here, other=0, eviction_policy="evict_first")
    if W.scaled:
        return w, tl.load(scales + tl.arange(0, 4 if W.format == "int4" else 1), mask=here, other=0)
    else:
        return w, w


@triton.jit
def left_operand(w, scales, RUN: tl.constexpr, W: tl.constexpr):
    """A tile of weights, RUN of each thread -> [warps, N, 4 * RUN]; of int4 128 and their codes."""
    WARPS: tl.constexpr = w.shape[1]
    N: tl.constexpr = w.shape[0] * 8
    if W.format == "int4":
        values = int4.levels_of(w, W.dot).permute(1, 0, 2, 3, 4, 5, 6, 7)
    elif W.format == "int8":
        even, odd = tl.join(w << 24, w << 8), tl.join(w << 16, w)  # the sign is that of the highest bit
        values = (tl.join(even, odd) >> 24).to(tl.float32)  # [N / 8, warps, 8, 4, WORDS, 2, 2]
        values = (values * scales.to(tl.float32)[:, :, :, :, :, None, None]).to(W.dot).permute(1, 0, 2, 3, 4, 5, 6)
    elif W.format == "fp8":
        bytes = tl.join(tl.join(w, w >> 16), tl.join(w >> 8, w >> 24)).to(tl.int8)  # [N / 8, warps, 8, 4, WORDS, 2, 2]
        values = bytes.to(tl.float8e4nv, bitcast=True).to(W.dot).permute(1, 0, 2, 3, 4, 5, 6)
    elif w.shape[4] < RUN:
        halves = tl.join(w.to(tl.int16), (w >> 16).to(tl.int16))
        values = halves.to(tl.bfloat16, bitcast=True).permute(1, 0, 2, 3, 4, 5)
    else:
        values = w.to(tl.float32, bitcast=True).permute(1, 0, 2, 3, 4)
    return in_order(values.reshape(WARPS, N, 4 * RUN), RUN, 4)


@triton.jit
def first_tiles(weight, scale, outputs, live, first, end, W: tl.constexpr):
    """AHEAD steps of weights from input `first` on, asked for, and where the next ones and their scales are.

    Of fp8 the outputs' scales themselves.
    """
    AHEAD: tl.constexpr = W.ahead
    WORDS: tl.constexpr = 4 if W.format != "plain" else W.run * weight.dtype.element_ty.primitive_bitwidth // 32
    EACH: tl.constexpr = W.run // WORDS
    GROUPS: tl.constexpr = outputs.shape[0] // (W.warps * 32)
    ks, row, end = thread_inputs(first, GROUPS, W.run, W), stored(W.inputs, W), stored(end, W)
    words = weight.to(tl.pointer_type(tl.int32), bitcast=True) + (outputs.to(tl.int64) * (row // EACH) + ks // EACH)
    scales = words
    if W.format == "fp8":
        scales = tl.load(scale + (outputs + ks * 0), mask=live, other=0)
    if W.scaled:
        scales = scale + (outputs.to(tl.int64) * (row // 32) + (ks // _GROUP * 4 if W.format == "int4" else ks // 32))
    tiles = (weight_tile(words, scales, live, ks, end, 0, WORDS, W),)
    for number in tl.static_range(1, AHEAD):
        place, of_it = words + number * (W.step // EACH), scales
        if W.scaled:
            of_it = scales + number * (W.step // 32)
        tile = weight_tile(place, of_it, live, ks + number * W.step, end, number, WORDS, W)
        tiles = tiles + (tile,)  # type: ignore[assignment]  # noqa: RUF005
    return tiles, words, scales


@triton.jit
def within(inputs, step, number, at, end, W: tl.constexpr):
    """Which inputs of a step there are."""
    if not W.even:
        return inputs + (step * W.step + at) < end
    elif W.steps % W.ahead:
        return (inputs >= 0) & (step + number < W.steps)
    else:
        return inputs >= 0


@triton.jit
def product(tiles, words, scales, live, x, norm, eps, rows, first, end, W: tl.constexpr, NORM: tl.constexpr):
    """A program's weights times the rows at x -> [W.block, 16]. `tiles`, `words`, `scales`: of `first_tiles`."""
    WARPS: tl.constexpr = W.warps
    AHEAD: tl.constexpr = W.ahead
    GROUPS: tl.constexpr = words.shape[0] // (WARPS * 32)
    N: tl.constexpr = GROUPS * 8
    WORDS: tl.constexpr = tiles[0][0].shape[1]
    VECTOR: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    BLOCKS: tl.constexpr = 4 if W.format == "int4" else 1  # of inputs that a thread has some of
    PIECE: tl.constexpr = W.run // BLOCKS
    # Not in the interpreter, which knows no assembly and multiplies in float32.
    IN_TURN: tl.constexpr = (W.format == "plain" or (W.format == "int8" and not W.pdl)) and W.dot is tl.bfloat16
    RUNS_OF: tl.constexpr = PIECE // VECTOR  # loads of a row that give a thread its inputs
    ks, last = thread_inputs(first, GROUPS, W.run, W), stored(end, W)
    at_rows, at_gains = tl.arange(0, RUNS_OF * WARPS * 64)[:, None], tl.arange(0, RUNS_OF * WARPS * 32)[:, None]
    inputs = thread_inputs(first, RUNS_OF * 2, PIECE, W) + at_rows // (WARPS * 64) * VECTOR
    gained = thread_inputs(first, RUNS_OF, PIECE, W) + at_gains // (WARPS * 32) * VECTOR
    element = tl.arange(0, VECTOR)[None, :]
    row = at_rows // 4 % 8 + at_rows // (WARPS * 32) % 2 * 8
    cells = x + (row * W.inputs + inputs)  # of [RUNS_OF, 2, warps, 8, 4]
    gains = norm + gained if NORM else cells  # of [RUNS_OF, 1, warps, 8, 4]: a thread loads what it needs
    sums = tl.zeros([WARPS, N, _MAX_ROWS], tl.float32)
    squares = tl.zeros([WARPS, _MAX_ROWS, _MAX_ROWS], tl.float32)
    for step in tl.range(0, W.steps, AHEAD, num_stages=1):
        for number in tl.static_range(AHEAD):
            if W.steps > AHEAD and number % ((AHEAD + 1) // 2) == 0 and IN_TURN:
                # Or the compiler puts off all loads of weights to the end of the loop; without dependents int8 spills.
                in_turn()
            for block in tl.static_range(BLOCKS):
                at = number * W.step + block * 4 * PIECE
                w, scale = tiles[0][0].reshape(GROUPS, WARPS, 8, 4, WORDS), tiles[0][1]
                scale = scale.reshape(GROUPS, WARPS, 8, 4, scale.shape[1])
                w, scale = of_block(w, scale, block, W)
                w = left_operand(w, scale, PIECE, W)
                inside = within(inputs, step, number, at, end, W)
                values = tl.load(cells + (at + element), mask=(row < rows) & inside, other=0).to(W.dot)
                values = values.reshape(RUNS_OF, 2, WARPS, 8, 4, VECTOR)
                if NORM:
                    columns = values.permute(2, 1, 3, 4, 0, 5).reshape(WARPS, _MAX_ROWS, 4 * PIECE)
                    columns = in_order(columns, PIECE, 2)
                    squares = tl.dot(columns, columns.permute(0, 2, 1), squares, input_precision="ieee")
                    inside = within(gained, step, number, at, end, W)
                    gain = tl.load(gains + (at + element), mask=inside, other=0).to(tl.float32)
                    values = (values.to(tl.float32) * gain.reshape(RUNS_OF, 1, WARPS, 8, 4, VECTOR)).to(W.dot)
                values = values.permute(2, 1, 3, 4, 0, 5).reshape(WARPS, _MAX_ROWS, 4 * PIECE)
                columns = in_order(values, PIECE, 4).permute(0, 2, 1)
                if W.format == "int4":
                    ones, same = tl.full([WARPS, N, 4 * PIECE], 1, W.dot), in_order(values, PIECE, 2).permute(0, 2, 1)
                    factor, more = int4.factors_of(scale)
                    sums += scaled(tl.dot(w, columns, input_precision="ieee"), factor)
                    sums += scaled(tl.dot(ones, same, input_precision="ieee"), more)
                else:
                    sums = tl.dot(w, columns, sums, input_precision="ieee")
            if W.steps > AHEAD:
                place = words + (number + AHEAD) * (W.step * WORDS // W.run)
                of_it = scales + (number + AHEAD) * (W.step // 32) if W.scaled else scales
                there, later = ks + (step + number + AHEAD) * W.step, step + number + AHEAD
                tile = weight_tile(place, of_it, live, there, last, later, WORDS, W)
                tiles = tiles[1:] + (tile,)  # noqa: RUF005
            else:
                tiles = tiles[1:] + (tiles[0],)  # noqa: RUF005
        words += AHEAD * (W.step * WORDS // W.run)
        if W.scaled:
            scales += AHEAD * (W.step // 32)
        cells += AHEAD * W.step
        gains += AHEAD * W.step
    if W.format == "fp8":
        sums = scaled(sums, scales.reshape(GROUPS, WARPS, 8, 4, 1))
    y = tl.sum(sums.reshape(W.slices, W.parts, N, _MAX_ROWS), axis=0).reshape(W.parts * N, _MAX_ROWS)
    if NORM:
        # Each row times itself; the warps of W.parts have all added up the same, so that this is a multiple, exactly.
        one = tl.arange(0, _MAX_ROWS)
        square = tl.sum(tl.where(one[:, None] == one[None, :], tl.sum(squares, axis=0), 0.0), axis=0)
        y = y * tl.rsqrt(square * (1.0 / W.parts) / W.inputs + eps)[None, :]
    return y


@triton.jit
def placed(rows, state, WIDTH: tl.constexpr, AT: tl.constexpr):
    """Where the pass's first row is: at the beginning, or at its position."""
    if AT:
        rows += tl.load(state + _START) * WIDTH  # less than 2^31: 128 k positions of 16 k
    return rows


@triton.jit
def multiply(
    x, norm, eps, weight, scale, outputs, live, state, first, end,
    W: tl.constexpr, NORM: tl.constexpr, X_AT: tl.constexpr,
):  # fmt: skip
    """W x for those `outputs` (of `program_outputs`) that are `live`, inputs from `first` to `end` -> [W.block, 16].

    And how many rows there are.
    """
    tiles, words, scales = first_tiles(weight, scale, outputs, live, first, end, W)
    if W.pdl:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.load(state + _ROWS)
    y = product(tiles, words, scales, live, placed(x, state, W.inputs, X_AT), norm, eps, rows, first, end, W, NORM)
    return y, rows


@triton.jit
def below(outputs, LIMIT: tl.constexpr, BLOCK: tl.constexpr):
    """outputs < LIMIT; where programs of BLOCK outputs leave no choice, as a constant."""
    if LIMIT % BLOCK == 0:
        return tl.full(outputs.shape, 1, tl.int1)
    else:
        return outputs < LIMIT


@triton.jit
def linear_kernel(
    x, norm, eps, weight, scale, bias, residual, out, rounded, state,
    W: tl.constexpr, SPLITS: tl.constexpr, X_AT: tl.constexpr, ADD_AT: tl.constexpr, OUT_AT: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Grid (TILES * outputs / W.block, SPLITS). With SPLITS > 1 `out` is the partial sums, float32 [TILES, SPLITS, 16,
    outputs]."""
    OF_SPLIT: tl.constexpr = W.steps * W.step
    tile, program = tile_of_program(TILES)
    split = tl.program_id(1)
    state += tile * _WORDS
    outputs = program * W.block + program_outputs(W)
    end = W.inputs if SPLITS == 1 else tl.minimum((split + 1) * OF_SPLIT, W.inputs)
    y, rows = multiply(
        x + tile * (_MAX_ROWS * W.inputs), norm, eps, weight, scale, outputs, below(outputs, W.outputs, W.block), state,
        split * OF_SPLIT, end, W, norm is not None, X_AT,
    )  # fmt: skip
    outputs = program * W.block + tl.arange(0, W.block)
    live = outputs < W.outputs
    row = tl.arange(0, _MAX_ROWS)[None, :]
    place, mask = row * W.outputs + outputs[:, None], live[:, None] & (row < rows)
    if SPLITS > 1:
        tl.store(out + (tile * SPLITS + split) * (_MAX_ROWS * W.outputs) + place, y, mask=mask)
    else:
        place += tile * (_MAX_ROWS * W.outputs)
        if bias is not None:
            y += tl.load(bias + outputs, mask=live, other=0).to(tl.float32)[:, None]
        left(y, residual, out, rounded, place, mask, state, W.outputs, ADD_AT, OUT_AT)


@triton.jit
def left(
    y, residual, out, rounded, place, mask, state, OUTPUTS: tl.constexpr, ADD_AT: tl.constexpr, OUT_AT: tl.constexpr
):  # fmt: skip
    """What a linear layer leaves of its sums: the rows, and these rounded."""
    if residual is not None:
        y = tl.load(placed(residual, state, OUTPUTS, ADD_AT) + place, mask=mask, other=0).to(tl.float32) + y
    tl.store(placed(out, state, OUTPUTS, OUT_AT) + place, y.to(out.dtype.element_ty), mask=mask)
    if rounded is not None:
        tl.store(rounded + place, y.to(rounded.dtype.element_ty), mask=mask)


@triton.jit
def reduce_splits_kernel(
    partial, bias, residual, out, rounded, state, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    ADD_AT: tl.constexpr, OUT_AT: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = (residual +) partial[0] + partial[1] + ... (+ bias), in that order. Grid (outputs / BLOCK, 16 * TILES)."""
    outputs, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    live = outputs < OUTPUTS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile = row // _MAX_ROWS if TILES > 1 else 0
    if row - tile * _MAX_ROWS < tl.load(state + tile * _WORDS + _ROWS):
        place = row * OUTPUTS + outputs
        partial += tile * ((SPLITS - 1) * _MAX_ROWS * OUTPUTS)
        y = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            y += tl.load(partial + split * (_MAX_ROWS * OUTPUTS) + place, mask=live, other=0)
        if bias is not None:
            y += tl.load(bias + outputs, mask=live, other=0).to(tl.float32)
        left(y, residual, out, rounded, place, live, state, OUTPUTS, ADD_AT, OUT_AT)


class Weight(NamedTuple):
    """A matrix [outputs, inputs] as the kernels take it: as it is, or int8 with scales [outputs, inputs / 32], or int4
    (values and scales as `int4.packed` makes them, and of how many inputs), or float8 with scales [outputs]."""

    values: Tensor
    scales: Tensor | None = None
    of_inputs: int | None = None

    @property
    def format(self) -> str:
        if self.scales is None:
            return "plain"
        return {torch.int8: "int8", torch.int32: "int4", torch.float8_e4m3fn: "fp8"}[self.values.dtype]

    @property
    def outputs(self) -> int:
        return self.values.shape[0]

    @property
    def inputs(self) -> int:
        return self.of_inputs or self.values.shape[1]

    def rows(self, ids: Tensor | slice) -> "Weight":
        """Those outputs; a slice stays in the same memory."""
        scales = None if self.scales is None else self.scales[ids]
        return self._replace(values=self.values[ids], scales=scales)

    def to(self, device: torch.device | str) -> "Weight":
        scales = None if self.scales is None else self.scales.to(device)
        return self._replace(values=self.values.to(device), scales=scales)

    def wide(self) -> Tensor:
        """float32 [outputs, inputs]."""
        if self.scales is None:
            return self.values.float()
        if self.format == "fp8":
            return self.values.float() * self.scales[:, None]
        if self.of_inputs is not None:
            return int4.unpacked(self.values, self.scales, self.of_inputs)
        parts = self.values.float().unflatten(1, (-1, INT8_BLOCK)) * self.scales.float()[:, :, None]
        return parts.flatten(1)


def tiling(weight: Weight) -> Tiling:
    """Wide programs, for each reads all rows; but enough of them for a whole GPU."""
    block = block_of(weight.outputs)
    splits = 4 if weight.outputs < 64 * block and weight.inputs >= 2048 else 1
    return tiling_of(weight, block, splits)


def block_of(outputs: int) -> int:
    """Outputs of a program, where a launch has so many."""
    return next((block for block in (64, 32) if outputs >= ENOUGH * block), 16)


def tiling_of(weight: Weight, block: int, splits: int = 1) -> Tiling:
    each = 16 if weight.format == "int4" else 32  # outputs that a warp adds up: they fit its registers
    parts = min(WARPS, max(1, block // each))
    return Tiling(block, parts, WARPS // parts, RUNS[weight.format], splits)


def quantise(weight: Tensor) -> Weight:
    """int8 with a float16 scale for every 32 inputs: the largest of them becomes 127."""
    blocks = weight.float().unflatten(1, (-1, INT8_BLOCK))
    scales = (blocks.abs().amax(-1) * (1 / 127)).to(torch.float16)  # no division: a GPU's is another, in torch
    inverse = torch.where(scales > 0, 1 / scales.float(), 0.0)
    values = (blocks * inverse[:, :, None]).round().clamp(-127, 127).to(torch.int8)
    return Weight(values.flatten(1), scales)


def quantise_int4(weight: Tensor, importance: Tensor | None = None) -> Weight:
    """importance: see `int4.packed`."""
    return Weight(*int4.packed(weight, importance), weight.shape[1])


def quantise_fp8(weight: Tensor) -> Weight:
    """float8 (e4m3) with a float32 scale for each output: its largest weight becomes 448, the largest float8."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp(min=1e-30) * (1 / 448)  # as above
    return Weight((wide / scales[:, None]).to(torch.float8_e4m3fn), scales)


def dot_type(weight: Weight) -> tl.dtype:
    """What the matrix instruction takes: the weights' type; for quantised ones bfloat16, in the interpreter float32."""
    wide = weight.values.dtype == torch.float32 or (weight.scales is not None and triton.knobs.runtime.interpret)
    return tl.float32 if wide else tl.bfloat16


def launch(weight: Weight, cut: Tiling, x: Tensor, pdl: bool, crowded: bool = False) -> dict[str, Any]:
    """What all kernels that multiply rows x by a weight matrix are launched with.

    crowded: has the kernel other uses for its registers? So it has beside float32 rows.
    """
    crowded = crowded or x.dtype == torch.float32
    share = CROWDED.get(weight.format, 1) if crowded else 1
    if crowded and not pdl and weight.format in ("plain", "int8"):  # whose loops have barriers then
        share -= 1 / 3
    matrix = Matrix(
        weight.outputs, weight.inputs, weight.format, *cut[:4], cut.steps(weight.inputs),
        cut.ahead(weight.inputs, share), weight.inputs % (cut.step * cut.splits) == 0, dot_type(weight), pdl,
    )  # fmt: skip
    # Three programs to a multiprocessor. Left alone the assembler spills some registers for a fourth.
    limit = {"maxnreg": 168} if weight.format in ("int8", "fp8") and cut.block > 16 else {}
    return {"W": matrix, "num_warps": cut.warps, "launch_pdl": pdl, **limit}


def at_positions(rows: Tensor, texts: Texts | None = None) -> bool:
    """Does every row stand at its position ([capacity, n]), or are they those of a pass ([16, n])? Those of several
    texts always are ([16 * tiles, n])."""
    return texts is None and len(rows) > MAX_ROWS


def tiles_of(texts: Texts | None) -> int:
    return 1 if texts is None else texts.tiles


def linear(
    x: Tensor, weight: Weight, out: Tensor, state: Tensor, *,
    norm: Tensor | None = None, eps: float = 0.0, bias: Tensor | None = None, residual: Tensor | None = None,
    rounded: Tensor | None = None, partial: Tensor | None = None, cut: Tiling | None = None,
    texts: Texts | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """out [16, outputs] = (residual +) norm(x) W^T (+ bias) for the first state[ROWS] rows; out may be the residual.

    x, residual and out may also be [capacity, n], with every row at its position.

    rounded: [16, outputs], where the kernels after this one read the rows in the type that they multiply: half the
    bytes, which each of their programs reads.

    partial: float32 [splits, 16, outputs], where the matrix is cut along K (`tiling(weight).splits` > 1).

    texts: rows of several texts, [16 * tiles, n].
    """
    cut, tiles = cut or tiling(weight), tiles_of(texts)
    target = out if cut.splits == 1 else partial
    assert target is not None, "a matrix cut along K needs room for its partial sums"
    assert cut.splits == 1 or norm is None, "the norm's sum of squares spans all of K"
    places = {"ADD_AT": residual is not None and at_positions(residual, texts), "OUT_AT": at_positions(out, texts)}
    # As in `launch`. With dependents int4 spills because of a limit, but where K is cut it spills without.
    limits = {"plain": 168, "int4": 200 if cut.splits > 1 else None if pdl else 168}
    limit = {"maxnreg": limits[weight.format]} if limits.get(weight.format) else {}
    linear_kernel[(tiles * triton.cdiv(weight.outputs, cut.block), cut.splits)](
        x, norm, eps, weight.values, weight.scales, bias, residual, target, rounded, state,
        SPLITS=cut.splits, X_AT=at_positions(x, texts), TILES=tiles, **launch(weight, cut, x, pdl), **limit, **places,
    )  # fmt: skip
    if cut.splits > 1:
        reduce_splits_kernel[(triton.cdiv(weight.outputs, 128), MAX_ROWS * tiles)](
            partial, bias, residual, out, rounded, state,
            OUTPUTS=weight.outputs, SPLITS=cut.splits, BLOCK=128, TILES=tiles, PDL=pdl, num_warps=4, launch_pdl=pdl,
            **places,
        )  # fmt: skip


def normalise_twin(x: Tensor, norm: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm.float()
