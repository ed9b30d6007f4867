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
from .linear import Weight, at_positions, below, launch, multiply, program_outputs, tiles_of, tiling
from .noise import gumbel
from .ptx import gdc_launch_dependents, gdc_wait
from .state import MAX_ROWS, ROWS, START, WORDS
from .texts import POSITION, SEED, TEXT_WORDS, Texts, tile_of_program

BATCH = 1024  # programs whose results are merged at a time

SAMPLING_WORDS = 3  # as those of a row of several texts from SEED on

_ROWS, _START, _WORDS, _MAX_ROWS = map(tl.constexpr, (ROWS, START, WORDS, MAX_ROWS))
_TEXT_WORDS, _POSITION, _SEED = map(tl.constexpr, (TEXT_WORDS, POSITION, SEED))
_BATCH = tl.constexpr(BATCH)


def inverse_of(temperature: float) -> float:
    """1 / T in float32, as the C++ samplers have it; 0: greedy."""
    return float(np.float32(1) / np.float32(temperature)) if temperature > 0 else 0.0


def sampling_words(params: SamplingParams, device: torch.device | str) -> Tensor:
    """int32 [3]: the seed (two words), the bits of 1 / T in float32 (0: greedy)."""
    packed = struct.pack("<Qf", params.seed or 0, inverse_of(params.temperature))
    return torch.tensor(struct.unpack("<3i", packed), dtype=torch.int32, device=device)


@triton.jit
def drawn(y, ids, sampling, state, texts, row, here):
    """The scores of logits y [outputs, 16]: times 1 / T and with noise, where a row is not greedy."""
    if texts is None:
        ways, known, position = sampling, True, (tl.load(state + _START) + row + 1)[None, :]
    else:
        ways, known = (texts + row * _TEXT_WORDS + _SEED)[None, :], here[None, :]
        position = tl.load(texts + row * _TEXT_WORDS + _POSITION, mask=here, other=0)[None, :]
    score, inverse = y, tl.load(ways + 2, mask=known, other=0).to(tl.float32, bitcast=True)
    warm = inverse > 0 if texts is None else tl.max(inverse) > 0
    if warm:
        low = tl.load(ways, mask=known, other=0).to(tl.uint32, bitcast=True)
        high = tl.load(ways + 1, mask=known, other=0).to(tl.uint32, bitcast=True)
        numbers = ids[:, None] + row[None, :] * 0
        noise = gumbel(low, high, position + numbers * 0, numbers)
        score = tl.where(inverse > 0, score * inverse + noise, score)
    return score


@triton.jit
def heads_kernel(
    x, norm, eps, weight, scale, draft_ids, sampling, logits, results, indices, state, texts,
    W: tl.constexpr, X_AT: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid (TILES * programs = outputs / W.block). -> of each row and program: results [16 * TILES, 4, programs], the
    best score and its logit, the top logit and the sum; indices [16 * TILES, programs], that of the best.

    logits [16 * TILES, outputs]: these too, where given.
    """
    tile, program = tile_of_program(TILES)
    programs = tl.num_programs(0) // TILES
    state += tile * _WORDS
    outputs = program * W.block + program_outputs(W)
    y, rows = multiply(
        x + tile * (_MAX_ROWS * W.inputs), norm, eps, weight, scale, outputs, below(outputs, W.outputs, W.block), state,
        0, W.inputs, W, True, X_AT,
    )  # fmt: skip
    outputs = program * W.block + tl.arange(0, W.block)
    inside = outputs < W.outputs
    ids = tl.load(draft_ids + outputs, mask=inside, other=-1) if draft_ids is not None else outputs
    live = (inside & (ids >= 0))[:, None]
    row = tl.arange(0, _MAX_ROWS)
    here = row < rows
    if logits is not None:
        cell = (tile * _MAX_ROWS + row)[None, :] * W.outputs + outputs[:, None]
        tl.store(logits + cell, y, mask=inside[:, None] & here[None, :])
    if texts is not None:
        texts += tile * (_MAX_ROWS * _TEXT_WORDS)
    flaw = tl.where(live, y - y, 0.0)  # NaN where a logit is NaN or infinite, and so is their sum then
    y = tl.where(live, y, float("-inf"))
    score = drawn(y, ids, sampling, state, texts, row, here)
    best = tl.max(score, axis=0)
    index = tl.min(tl.where(score == best[None, :], outputs[:, None], W.outputs - 1), axis=0)
    top = tl.max(y, axis=0)
    of_row = (tile * _MAX_ROWS + row) * programs
    tl.store(indices + of_row + program, index, mask=here)
    result = results + 4 * of_row + program
    tl.store(result, best, mask=here)
    its = tl.max(tl.where(outputs[:, None] == index[None, :], y, float("-inf")), axis=0)
    tl.store(result + programs, its, mask=here)
    tl.store(result + 2 * programs, top, mask=here)
    above = tl.where(top > float("-inf"), top, 0.0)[None, :]
    tl.store(result + 3 * programs, tl.sum(tl.exp(y - above) + flaw, axis=0), mask=here)


@triton.jit
def choose_kernel(
    results, indices, draft_ids, choices, confidences, state, PROGRAMS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (16 * tiles): the best of all programs, and the sum of all exponentials, BATCH programs at a time, in order.

    -1, of confidence 0, where a logit is NaN or infinite.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    if row % _MAX_ROWS < tl.load(state + row // _MAX_ROWS * _WORDS + _ROWS):
        best, index, its, top, total = float("-inf"), 0x7FFFFFFF, float("-inf"), float("-inf"), 0.0
        for first in tl.static_range(0, PROGRAMS, _BATCH):
            program = first + tl.arange(0, _BATCH)
            result, live = results + row * (4 * PROGRAMS) + program, program < PROGRAMS
            score = tl.load(result, mask=live, other=float("-inf"))
            which = tl.load(indices + row * PROGRAMS + program, mask=live, other=0x7FFFFFFF)
            logit = tl.load(result + PROGRAMS, mask=live, other=float("-inf"))
            tile_top = tl.load(result + 2 * PROGRAMS, mask=live, other=float("-inf"))
            tile_total = tl.load(result + 3 * PROGRAMS, mask=live, other=0)
            ahead = tl.max(score, axis=0)
            winner = tl.min(tl.where(score == ahead, which, 0x7FFFFFFF), axis=0)
            logit = tl.max(tl.where(which == winner, logit, float("-inf")), axis=0)
            better = ahead > best  # of equal scores the earlier one stays: the lower id
            best, index = tl.where(better, ahead, best), tl.where(better, winner, index)
            its = tl.where(better, logit, its)
            higher = tl.maximum(top, tl.max(tile_top, axis=0))
            total = total * tl.exp(top - higher) + tl.sum(tile_total * tl.exp(tile_top - higher), axis=0)
            top = higher
        sound = total == total
        index = tl.where(sound, index, 0)
        token = tl.load(draft_ids + index) if draft_ids is not None else index
        tl.store(choices + row, tl.where(sound, token, -1))
        tl.store(confidences + row, tl.where(sound, tl.exp(its - top) / total, 0.0))


class Scratch:
    """Where the programs leave their results."""

    def __init__(self, weight: Weight, tiles: int = 0) -> None:
        """tiles: at most, of rows of several texts."""
        programs, device = triton.cdiv(weight.outputs, tiling(weight).block), weight.values.device
        self.results = torch.empty(MAX_ROWS * max(tiles, 1), 4, programs, device=device)
        self.indices = torch.empty(MAX_ROWS * max(tiles, 1), programs, dtype=torch.int32, device=device)


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
    programs, tiles = scratch.indices.shape[1], tiles_of(texts)
    heads_kernel[(tiles * programs,)](
        x, norm, eps, weight.values, weight.scales, draft_ids, sampling, logits, scratch.results, scratch.indices,
        state, texts.rows if texts else None, X_AT=at_positions(x, texts), TILES=tiles,
        **launch(weight, tiling(weight)._replace(splits=1), x, pdl),
    )  # fmt: skip
    choose_kernel[(MAX_ROWS * tiles,)](
        scratch.results, scratch.indices, draft_ids, choices, confidences, state,
        PROGRAMS=programs, PDL=pdl, num_warps=8, maxnreg=128, launch_pdl=pdl,
    )  # fmt: skip
