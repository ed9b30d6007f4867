"""LM head and exit head: norm, projection and the choice of a token, without storing logits unless asked to.

    logits[r] = norm(x[r]) W^T                                             x [16, hidden], W [outputs, hidden]
    score[r, i] = penalised(logits[r, i]) / T + gumbel(seed, p, id_i)      p = start + r + 1; T = 0: no noise
    choice[r] = id of the best score, the lowest of equal ones
    confidence[r] = softmax(logits[r])[choice]                             unfiltered, at temperature 1

id_i is i, or draft_ids[i], ascending, where W holds only the rows of a draft vocabulary. Penalty (Keskar et al.,
arXiv 1909.05858): a logit is divided by it (multiplied, if negative) when the id stands before p: first_seen[id] < p
tells of committed tokens, and behind state[KNOWN], the last of them that is certain to be told of, one looks at the text.

Each program of `heads_kernel` boils its outputs down to five numbers a row, `choose_kernel` the programs to one. What a
request sets (seed, temperature, penalty) stands in device memory, so that a captured launch serves every request.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..sampling import SamplingParams
from .linear import MAX_REGISTERS, Weight, at_positions, dot_type, linear_twin, multiply, tiling
from .noise import gumbel
from .state import KNOWN, MAX_ROWS, ROWS, START

_ROWS, _START, _KNOWN = tl.constexpr(ROWS), tl.constexpr(START), tl.constexpr(KNOWN)
_MAX_ROWS = tl.constexpr(MAX_ROWS)

BATCH = 1024  # programs whose results are merged at a time


SAMPLING_WORDS = 8


def sampling_words(params: SamplingParams, device: torch.device | str) -> Tensor:
    """int32 [8]: both halves of the seed, the bits of 1 / T (0: greedy) and of the penalty, k, the bits of top_p, min_p."""
    inverse = 1 / params.temperature if params.temperature > 0 else 0.0
    packed = struct.pack(
        "<Qffiffi", params.seed, inverse, params.repetition_penalty, params.top_k, params.top_p, params.min_p, 0
    )
    return torch.tensor(struct.unpack("<8i", packed), dtype=torch.int32, device=device)


@triton.jit
def heads_kernel(
    x, norm, eps, weight, scale, draft_ids, text, first_seen, sampling, logits, scores, indices, chosen, tops, totals, state,
    OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, BLOCK: tl.constexpr,
    STEPS: tl.constexpr, SLICES: tl.constexpr, SLICE: tl.constexpr, DRAFT: tl.constexpr, PENALISE: tl.constexpr,
    STORE: tl.constexpr, X_AT: tl.constexpr, INT8: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (programs = outputs / BLOCK). -> [16, programs]: best score, its index and logit; top logit, sum."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    outputs = program * BLOCK + tl.arange(0, BLOCK)
    live = outputs < OUTPUTS
    y, rows = multiply(
        x, norm, eps, weight, scale, outputs, live, state, 0,
        INPUTS, STEPS, SLICES, SLICE, True, X_AT, INT8, DOT, PDL,
    )  # fmt: skip
    row = tl.arange(0, _MAX_ROWS)
    if STORE:
        mask = live[:, None] & (row < rows)[None, :]
        tl.store(logits + row[None, :] * OUTPUTS + outputs[:, None], y, mask=mask)
    y = tl.where(live[:, None], y, float("-inf"))
    ids = tl.load(draft_ids + outputs, mask=live, other=0) if DRAFT else outputs
    position = tl.load(state + _START) + row + 1
    score = y
    if PENALISE:
        penalty = tl.load(sampling + 3).to(tl.float32, bitcast=True)
        if penalty != 1.0:
            seen = tl.load(first_seen + ids, mask=live, other=0)[:, None] < position[None, :]
            place, end = tl.load(state + _KNOWN) + 1, tl.load(state + _START) + rows
            while place < end:
                here = ids == tl.load(text + place, volatile=True)
                seen = seen | (here[:, None] & (place < position)[None, :])
                place += 1
            score = tl.where(seen, tl.where(score < 0, score * penalty, score / penalty), score)
    inverse = tl.load(sampling + 2).to(tl.float32, bitcast=True)
    if inverse > 0:
        low, high = tl.load(sampling).to(tl.uint32, bitcast=True), tl.load(sampling + 1).to(tl.uint32, bitcast=True)
        numbers = ids[:, None] + row[None, :] * 0
        score = score * inverse + gumbel(low, high, position[None, :] + numbers * 0, numbers)
    best = tl.max(score, axis=0)
    index = tl.min(tl.where(score == best[None, :], outputs[:, None], OUTPUTS - 1), axis=0)
    top = tl.max(y, axis=0)
    place = row * programs + program
    here = row < rows
    tl.store(scores + place, best, mask=here)
    tl.store(indices + place, index, mask=here)
    tl.store(chosen + place, tl.max(tl.where(outputs[:, None] == index[None, :], y, float("-inf")), axis=0), mask=here)
    tl.store(tops + place, top, mask=here)
    tl.store(totals + place, tl.sum(tl.exp(y - top[None, :]), axis=0), mask=here)


@triton.jit
def choose_kernel(
    scores, indices, chosen, tops, totals, draft_ids, choices, confidences, state,
    PROGRAMS: tl.constexpr, BATCH: tl.constexpr, DRAFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (16): the best of all programs, and the sum of all exponentials, BATCH programs at a time, in order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0)
    if row < tl.load(state + _ROWS):
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
        tl.store(choices + row, tl.load(draft_ids + index) if DRAFT else index)
        tl.store(confidences + row, tl.exp(its - top) / total)


class Scratch:
    """Where the programs leave their results: [16, programs] each."""

    def __init__(self, weight: Weight) -> None:
        shape, device = (
            (MAX_ROWS, triton.cdiv(weight.outputs, tiling(weight).block)),
            weight.values.device,
        )
        self.scores, self.chosen, self.tops, self.totals = (torch.empty(shape, device=device) for _ in range(4))
        self.indices = torch.empty(shape, dtype=torch.int32, device=device)


def heads(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, sampling: Tensor, scratch: Scratch,
    choices: Tensor, confidences: Tensor, state: Tensor, *, draft_ids: Tensor | None = None,
    text: Tensor | None = None, first_seen: Tensor | None = None, logits: Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """choices [16] int32 and confidences [16] float32 of the first state[ROWS] rows; logits [16, outputs] where given.

    draft_ids: int32 [outputs]. text [capacity] and first_seen [vocabulary], int32, where the repetition penalty may be
    other than 1.
    """
    cut, programs = tiling(weight)._replace(splits=1), scratch.scores.shape[1]
    heads_kernel[(programs,)](
        x, norm, eps, weight.values, weight.scales, draft_ids, text, first_seen, sampling, logits,
        scratch.scores, scratch.indices, scratch.chosen, scratch.tops, scratch.totals, state,
        OUTPUTS=weight.outputs, INPUTS=weight.inputs, BLOCK=cut.block, STEPS=cut.steps(weight.inputs),
        SLICES=cut.slices, SLICE=cut.slice, DRAFT=draft_ids is not None, PENALISE=first_seen is not None,
        STORE=logits is not None, X_AT=at_positions(x), INT8=weight.scales is not None, DOT=dot_type(weight, x), PDL=pdl,
        num_warps=cut.warps, num_stages=cut.stages, maxnreg=MAX_REGISTERS, launch_pdl=pdl,
    )  # fmt: skip
    choose_kernel[(MAX_ROWS,)](
        scratch.scores, scratch.indices, scratch.chosen, scratch.tops, scratch.totals, draft_ids, choices, confidences,
        state, PROGRAMS=programs, BATCH=BATCH, DRAFT=draft_ids is not None, PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def heads_twin(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, start: int, *, seed: int = 0, temperature: float = 0.0,
    penalty: float = 1.0, draft_ids: Tensor | None = None, first_seen: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x [rows, hidden] -> choices and confidences [rows], scores and logits [rows, outputs]."""
    from ..noise import gumbel as cpu_gumbel

    logits = linear_twin(x, weight, norm=norm, eps=eps)
    ids = torch.arange(weight.outputs, device=x.device) if draft_ids is None else draft_ids.long()
    positions = start + 1 + torch.arange(len(x), device=x.device)
    scores = logits
    if first_seen is not None:
        seen = first_seen[ids] < positions[:, None]
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if temperature > 0:
        noise = [torch.from_numpy(cpu_gumbel(seed, int(p), ids.cpu().numpy())) for p in positions]
        scores = scores / temperature + torch.stack(noise).to(x.device)
    best = scores.argmax(-1, keepdim=True)
    return ids[best[:, 0]], logits.softmax(-1).gather(1, best)[:, 0], scores, logits
