"""LM head and exit head: norm, projection and the choice of a token, without storing logits unless they are needed.

    logits[r] = norm(x[r]) W^T                                             x [16, hidden], W [outputs, hidden]
    score[r, i] = penalised(logits[r, i]) / T + gumbel(seed, p, id_i)      p = start + r + 1; T = 0: no noise
    choice[r] = id of the best score, the lowest of equal ones; of those that the filters leave (filters.py)
    confidence[r] = softmax(logits[r])[choice]                             unfiltered, at temperature 1

id_i is i, or draft_ids[i], where W holds only the rows of a draft vocabulary; a negative one is never chosen. Penalty
(Keskar et al., arXiv 1909.05858): a logit is divided by it (multiplied, if negative) when the id stands before p.
first_seen[id] < p tells so of committed tokens; after state[KNOWN], up to where it certainly does, the text is looked
at.

Each program of `heads_kernel` boils its outputs down to five numbers a row, `choose_kernel` the programs to one. What a
request sets (seed, temperature, penalty, filters) stands in device memory, so that a captured launch serves every
request. Only a request with filters stores scores.
"""

import struct

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling.params import SamplingParams
from .filters import filtered_choice, wanted
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
from .state import KNOWN, MAX_ROWS, ROWS, START, WORDS
from .texts import INVERSE, POSITION, SEED, TEXT_WORDS, Texts

_ROWS, _START, _KNOWN = tl.constexpr(ROWS), tl.constexpr(START), tl.constexpr(KNOWN)
_MAX_ROWS, _WORDS = tl.constexpr(MAX_ROWS), tl.constexpr(WORDS)
_TEXT_WORDS, _POSITION = tl.constexpr(TEXT_WORDS), tl.constexpr(POSITION)
_SEED, _INVERSE = tl.constexpr(SEED), tl.constexpr(INVERSE)

BATCH = 1024  # programs whose results are merged at a time


SAMPLING_WORDS = 8


def inverse_of(temperature: float) -> float:
    """1 / T in float32, as the C++ samplers have it; 0: greedy."""
    return float(np.float32(1) / np.float32(temperature)) if temperature > 0 else 0.0


def sampling_words(params: SamplingParams, device: torch.device | str) -> Tensor:
    """int32 [8]: the seed (two words), 1 / T (0: greedy), penalty, top_k, top_p, min_p, 0; floats are float32 bits."""
    inverse = inverse_of(params.temperature)
    top_k = min(params.top_k, 2**31 - 1)  # more ids than any vocabulary has
    packed = struct.pack(
        "<Qffiffi", params.seed or 0, inverse, params.repetition_penalty, top_k, params.top_p, params.min_p, 0
    )
    return torch.tensor(struct.unpack("<8i", packed), dtype=torch.int32, device=device)


@triton.jit
def heads_kernel(
    x, norm, eps, weight, scale, draft_ids, text, first_seen, sampling, logits, kept, kept_tops, kept_totals,
    scores, indices, chosen, tops, totals, state, texts,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, AHEAD: tl.constexpr, PARTS: tl.constexpr, SLICES: tl.constexpr, RUN: tl.constexpr,
    EVEN: tl.constexpr, FORMAT: tl.constexpr, DRAFT: tl.constexpr, PENALISE: tl.constexpr, STORE: tl.constexpr,
    TEXTS: tl.constexpr, TILES: tl.constexpr, X_AT: tl.constexpr,
    DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (TILES * programs = outputs / BLOCK). -> [16 * TILES, programs]: best score, its index and logit; top logit,
    sum.

    For the filters: logits and penalised scores [16, outputs], and of these the best and the weight [16, programs].
    """
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
    if not TEXTS:
        filtered = wanted(sampling)
    if STORE or filtered:
        tl.store(logits + cell, y, mask=inside[:, None] & here[None, :])
    flaw = tl.where(live[:, None], y - y, 0.0)  # NaN where a logit is NaN or infinite, and so is their sum then
    y = tl.where(live[:, None], y, float("-inf"))
    if TEXTS:
        position = tl.load(texts + row * _TEXT_WORDS + _POSITION, mask=here, other=0)
    else:
        position = tl.load(state + _START) + row + 1
    score = y
    if PENALISE:
        penalty = tl.load(sampling + 3).to(tl.float32, bitcast=True)
        if penalty != 1.0:
            seen = tl.load(first_seen + ids, mask=live, other=0)[:, None] < position[None, :]
            before, end = tl.load(state + _KNOWN) + 1, tl.load(state + _START) + rows
            while before < end:
                same = ids == tl.load(text + before, volatile=True)
                seen = seen | (same[:, None] & (before < position)[None, :])
                before += 1
            score = tl.where(seen, tl.where(score < 0, score * penalty, score / penalty), score)
    if not TEXTS:
        inverse = tl.load(sampling + 2).to(tl.float32, bitcast=True)
    if not TEXTS and filtered:
        best = tl.max(score, axis=0)
        tl.store(kept + cell, score + 0.0, mask=inside[:, None] & here[None, :])  # no negative zeros
        tl.store(kept_tops + place, best, mask=here)
        above = tl.where(best > float("-inf"), best, 0.0)[None, :]  # none may be live
        tl.store(kept_totals + place, tl.sum(tl.exp((score - above) * inverse), axis=0), mask=here)
    if TEXTS:
        ways = texts + row * _TEXT_WORDS
        inverses = tl.load(ways + _INVERSE, mask=here, other=0).to(tl.float32, bitcast=True)
        if tl.max(inverses, axis=0) > 0:
            low = tl.load(ways + _SEED, mask=here, other=0).to(tl.uint32, bitcast=True)
            high = tl.load(ways + _SEED + 1, mask=here, other=0).to(tl.uint32, bitcast=True)
            numbers = ids[:, None] + row[None, :] * 0
            noise = gumbel(low[None, :], high[None, :], position[None, :] + numbers * 0, numbers)
            score = tl.where(inverses[None, :] > 0, score * inverses[None, :] + noise, score)
    elif inverse > 0:
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
    scores, indices, chosen, tops, totals, draft_ids, sampling, logits, kept, kept_tops, kept_totals, tiles,
    candidates, candidate_indices, choices, confidences, state,
    PROGRAMS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr,
    DRAFT: tl.constexpr, FILTERS: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
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
        if FILTERS and wanted(sampling) & sound:
            line = row * OUTPUTS
            position = tl.load(state + _START) + row + 1
            index = filtered_choice(
                kept + line, kept_tops + row * PROGRAMS, kept_totals + row * PROGRAMS, tiles + row * PROGRAMS,
                candidates + line, candidate_indices + line, draft_ids, sampling, position,
                PROGRAMS, OUTPUTS, BLOCK, DRAFT,
            )  # fmt: skip
            its = tl.load(logits + line + index)
        token = tl.load(draft_ids + index) if DRAFT else index
        tl.store(choices + row, tl.where(sound, token, -1))
        tl.store(confidences + row, tl.where(sound, tl.exp(its - top) / total, 0.0))


class Scratch:
    """Where the programs leave their results, [16, programs] each; [16, outputs] what filters need."""

    def __init__(self, weight: Weight, tiles: int = 0) -> None:
        """tiles: at most, of rows of several texts, which have no filters."""
        programs, device = triton.cdiv(weight.outputs, tiling(weight).block), weight.values.device
        rows, filtered = MAX_ROWS * max(tiles, 1), 0 if tiles else MAX_ROWS
        results, scores = torch.empty(6, rows, programs, device=device), (3, filtered, weight.outputs)
        self.scores, self.chosen, self.tops, self.totals, self.kept_tops, self.kept_totals = results.unbind()
        self.indices, self.tiles = torch.empty(2, rows, programs, dtype=torch.int32, device=device).unbind()
        self.logits, self.kept, self.candidates = torch.empty(scores, device=device).unbind()
        self.candidate_indices = torch.empty(scores[1:], dtype=torch.int32, device=device)


def heads(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, sampling: Tensor, scratch: Scratch,
    choices: Tensor, confidences: Tensor, state: Tensor, *, draft_ids: Tensor | None = None,
    text: Tensor | None = None, first_seen: Tensor | None = None, logits: Tensor | None = None,
    texts: Texts | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """choices [16] int32 and confidences [16] float32 of the first state[ROWS] rows; logits [16, outputs] where given.
    A choice is -1 where a logit of its row is NaN or infinite.

    draft_ids: int32 [outputs], negative where no id is. text [capacity] and first_seen [vocabulary], int32, where the
    repetition penalty may be other than 1.

    texts: rows of several texts, [16 * tiles, ...]. Each has its own seed and temperature, no penalty and no filters:
    `sampling` is not looked at. POSITION is that of the token to choose. They need `logits`.
    """
    cut, s = tiling(weight)._replace(splits=1), scratch
    programs, stored = s.tops.shape[1], s.logits if logits is None else logits
    tiles = tiles_of(texts)
    heads_kernel[(tiles * programs,)](
        x, norm, eps, weight.values, weight.scales, draft_ids, text, first_seen, sampling,
        stored, s.kept, s.kept_tops, s.kept_totals, s.scores, s.indices, s.chosen, s.tops, s.totals, state,
        texts.rows if texts else None, OUTPUTS=weight.outputs, INPUTS=weight.inputs, DRAFT=draft_ids is not None,
        PENALISE=first_seen is not None, STORE=logits is not None, TEXTS=texts is not None, TILES=tiles,
        X_AT=at_positions(x, texts), DOT=dot_type(weight), PDL=pdl, **launch(weight, cut, x, pdl),
    )  # fmt: skip
    choose_kernel[(MAX_ROWS * tiles,)](
        s.scores, s.indices, s.chosen, s.tops, s.totals, draft_ids, sampling, stored, s.kept, s.kept_tops,
        s.kept_totals, s.tiles, s.candidates, s.candidate_indices, choices, confidences, state,
        PROGRAMS=programs, OUTPUTS=weight.outputs, BLOCK=cut.block, BATCH=BATCH,
        DRAFT=draft_ids is not None, FILTERS=texts is None, TILES=tiles, PDL=pdl,
        num_warps=8, maxnreg=128, launch_pdl=pdl,
    )  # fmt: skip
