"""LM head and exit head: norm, projection and the choice of a token, without storing logits unless they are needed.

    logits[r] = norm(x[r]) W^T                                             x [16, hidden], W [outputs, hidden]
    score[r, i] = logits[r, i] / T + gumbel(seed, p, id_i)                 p = start + r + 1; T = 0: no noise
    choice[r] = id of the best score, the lowest of equal ones
    confidence[r] = softmax(logits[r])[choice]                             at temperature 1

id_i is i, or draft_ids[i], where W holds only the rows of a draft vocabulary; a negative one is never chosen.

Each program of `heads_kernel` boils its outputs down to five numbers a row, `choose_kernel` the programs to one. Seed
and temperature stand in device memory, so that a captured launch serves every request. A request that penalises or
filters goes by the loop, whose sampler takes stored logits.
"""

import struct

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling.params import SamplingParams
from .linear import (
    Weight,
    at_positions,
    below,
    dot_type,
    launch,
    multiply,
    program_outputs,
    tiles_of,
    tiling,
)
from .noise import gumbel
from .ptx import gdc_launch_dependents, gdc_wait
from .state import MAX_ROWS, ROWS, START, WORDS
from .texts import INVERSE, POSITION, SEED, TEXT_WORDS, Texts

_ROWS, _START, _WORDS = tl.constexpr(ROWS), tl.constexpr(START), tl.constexpr(WORDS)
_MAX_ROWS = tl.constexpr(MAX_ROWS)
_TEXT_WORDS, _POSITION = tl.constexpr(TEXT_WORDS), tl.constexpr(POSITION)
_SEED, _INVERSE = tl.constexpr(SEED), tl.constexpr(INVERSE)

BATCH = 1024  # programs whose results are merged at a time

SAMPLING_WORDS = 3


def inverse_of(temperature: float) -> float:
    """1 / T in float32, as the C++ samplers have it; 0: greedy."""
    return float(np.float32(1) / np.float32(temperature)) if temperature > 0 else 0.0


def sampling_words(params: SamplingParams, device: torch.device | str) -> Tensor:
    """int32 [3]: the seed (two words), the bits of 1 / T in float32 (0: greedy)."""
    packed = struct.pack("<Qf", params.seed or 0, inverse_of(params.temperature))
    return torch.tensor(struct.unpack("<3i", packed), dtype=torch.int32, device=device)


@triton.jit
def heads_kernel(
    x, norm, eps, weight, scale, draft_ids, sampling, logits, scores, indices, chosen, tops, totals, state, texts,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, PARTS: tl.constexpr, SLICES: tl.constexpr, RUN: tl.constexpr,
    EVEN: tl.constexpr, FORMAT: tl.constexpr, DRAFT: tl.constexpr, STORE: tl.constexpr,
    TEXTS: tl.constexpr, TILES: tl.constexpr, X_AT: tl.constexpr,
    DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (TILES * programs = outputs / BLOCK). -> [16 * TILES, programs]: best score, its index and logit; top logit,
    sum. STORE: and logits [16 * TILES, outputs]."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    if TILES > 1:
        tile, program, programs = program % TILES, program // TILES, programs // TILES
        state += tile * _WORDS
        texts += tile * (_MAX_ROWS * _TEXT_WORDS)
        x += tile * (_MAX_ROWS * INPUTS)
    outputs = program * BLOCK + program_outputs(BLOCK, PARTS, SLICES)
    y, rows = multiply(
        x, norm, eps, weight, scale, outputs, below(outputs, OUTPUTS, BLOCK), state, 0, INPUTS,
        INPUTS, STEPS, AHEAD, PARTS, SLICES, RUN, EVEN, FORMAT, True, X_AT, DOT, PDL,
    )  # fmt: skip
    outputs = program * BLOCK + tl.arange(0, BLOCK)
    inside = outputs < OUTPUTS
    ids = tl.load(draft_ids + outputs, mask=inside, other=-1) if DRAFT else outputs
    live = inside & (ids >= 0)
    row = tl.arange(0, _MAX_ROWS)
    here = row < rows
    place, cell = row * programs + program, row[None, :] * OUTPUTS + outputs[:, None]
    if TILES > 1:
        place += tile * _MAX_ROWS * programs
        cell += tile * (_MAX_ROWS * OUTPUTS)
    if STORE:
        tl.store(logits + cell, y, mask=inside[:, None] & here[None, :])
    flaw = tl.where(live[:, None], y - y, 0.0)  # NaN where a logit is NaN or infinite, and so is their sum then
    y = tl.where(live[:, None], y, float("-inf"))
    if TEXTS:
        position = tl.load(texts + row * _TEXT_WORDS + _POSITION, mask=here, other=0)
    else:
        position = tl.load(state + _START) + row + 1
    score = y
    if TEXTS:
        ways = texts + row * _TEXT_WORDS
        inverses = tl.load(ways + _INVERSE, mask=here, other=0).to(tl.float32, bitcast=True)
        if tl.max(inverses, axis=0) > 0:
            low = tl.load(ways + _SEED, mask=here, other=0).to(tl.uint32, bitcast=True)
            high = tl.load(ways + _SEED + 1, mask=here, other=0).to(tl.uint32, bitcast=True)
            numbers = ids[:, None] + row[None, :] * 0
            noise = gumbel(low[None, :], high[None, :], position[None, :] + numbers * 0, numbers)
            score = tl.where(inverses[None, :] > 0, score * inverses[None, :] + noise, score)
    else:
        inverse = tl.load(sampling + 2).to(tl.float32, bitcast=True)
        if inverse > 0:
            low, high = tl.load(sampling).to(tl.uint32, bitcast=True), tl.load(sampling + 1).to(tl.uint32, bitcast=True)
            numbers = ids[:, None] + row[None, :] * 0
            score = score * inverse + gumbel(low, high, position[None, :] + numbers * 0, numbers)
    best = tl.max(score, axis=0)
    index = tl.min(tl.where(score == best[None, :], outputs[:, None], OUTPUTS - 1), axis=0)
    top = tl.max(y, axis=0)
    tl.store(scores + place, best, mask=here)
    tl.store(indices + place, index, mask=here)
    tl.store(chosen + place, tl.max(tl.where(outputs[:, None] == index[None, :], y, float("-inf")), axis=0), mask=here)
    tl.store(tops + place, top, mask=here)
    above = tl.where(top > float("-inf"), top, 0.0)[None, :]
    tl.store(totals + place, tl.sum(tl.exp(y - above) + flaw, axis=0), mask=here)


@triton.jit
def choose_kernel(
    scores, indices, chosen, tops, totals, draft_ids, choices, confidences, state,
    PROGRAMS: tl.constexpr, BATCH: tl.constexpr, DRAFT: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (16 * TILES): the best of all programs, and the sum of all exponentials, BATCH programs at a time, in order.

    -1, of confidence 0, where a logit is NaN or infinite.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    if TILES > 1:
        tile = row // _MAX_ROWS
        rows = tl.load(state + tile * _WORDS + _ROWS) + tile * _MAX_ROWS
    else:
        rows = tl.load(state + _ROWS)
    if row < rows:
        best, index, its, top, total = float("-inf"), 0x7FFFFFFF, float("-inf"), float("-inf"), 0.0
        for first in tl.static_range(0, PROGRAMS, BATCH):
            program = first + tl.arange(0, BATCH)
            place, live = row * PROGRAMS + program, program < PROGRAMS
            score = tl.load(scores + place, mask=live, other=float("-inf"))
            which = tl.load(indices + place, mask=live, other=0x7FFFFFFF)
            logit = tl.load(chosen + place, mask=live, other=float("-inf"))
            tile_top = tl.load(tops + place, mask=live, other=float("-inf"))
            tile_total = tl.load(totals + place, mask=live, other=0)
            ahead = tl.max(score, axis=0)
            winner = tl.min(tl.where(score == ahead, which, 0x7FFFFFFF), axis=0)
            logit = tl.max(tl.where(which == winner, logit, float("-inf")), axis=0)
            better = ahead > best  # of equal scores the earlier one stays: the lower id
            best, index, its = (
                tl.where(better, ahead, best),
                tl.where(better, winner, index),
                tl.where(better, logit, its),
            )
            higher = tl.maximum(top, tl.max(tile_top, axis=0))
            total = total * tl.exp(top - higher) + tl.sum(tile_total * tl.exp(tile_top - higher), axis=0)
            top = higher
        sound = total == total
        index = tl.where(sound, index, 0)
        token = tl.load(draft_ids + index) if DRAFT else index
        tl.store(choices + row, tl.where(sound, token, -1))
        tl.store(confidences + row, tl.where(sound, tl.exp(its - top) / total, 0.0))


class Scratch:
    """Where the programs leave their results, [16, programs] each."""

    def __init__(self, weight: Weight, tiles: int = 0) -> None:
        """tiles: at most, of rows of several texts."""
        programs, device = triton.cdiv(weight.outputs, tiling(weight).block), weight.values.device
        results = torch.empty(4, MAX_ROWS * max(tiles, 1), programs, device=device)
        self.scores, self.chosen, self.tops, self.totals = results.unbind()
        self.indices = torch.empty(self.scores.shape, dtype=torch.int32, device=device)


def heads(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, sampling: Tensor, scratch: Scratch,
    choices: Tensor, confidences: Tensor, state: Tensor, *, draft_ids: Tensor | None = None,
    logits: Tensor | None = None, texts: Texts | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """choices [16] int32 and confidences [16] float32 of the first state[ROWS] rows; logits [16, outputs] where given.
    A choice is -1 where a logit of its row is NaN or infinite.

    draft_ids: int32 [outputs], negative where no id is.

    texts: rows of several texts, [16 * tiles, ...]. Each has its own seed and temperature: `sampling` is not looked at.
    POSITION is that of the token to choose.
    """
    s, programs, tiles = scratch, scratch.tops.shape[1], tiles_of(texts)
    heads_kernel[(tiles * programs,)](
        x, norm, eps, weight.values, weight.scales, draft_ids, sampling, logits, s.scores, s.indices, s.chosen, s.tops,
        s.totals, state, texts.rows if texts else None, OUTPUTS=weight.outputs, INPUTS=weight.inputs,
        DRAFT=draft_ids is not None, STORE=logits is not None, TEXTS=texts is not None, TILES=tiles,
        X_AT=at_positions(x, texts), DOT=dot_type(weight), PDL=pdl,
        **launch(weight, tiling(weight)._replace(splits=1), x, pdl),
    )  # fmt: skip
    choose_kernel[(MAX_ROWS * tiles,)](
        s.scores, s.indices, s.chosen, s.tops, s.totals, draft_ids, choices, confidences, state,
        PROGRAMS=programs, BATCH=BATCH, DRAFT=draft_ids is not None, TILES=tiles, PDL=pdl,
        num_warps=8, maxnreg=128, launch_pdl=pdl,
    )  # fmt: skip
