"""Filters, and the choice of a token by shared noise."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..noise import gumbel
from ..sampling import SamplingParams


class Sampler:
    """Chooses the token for a position. Draft and verification use the same one, so that equal logits choose alike.

    token(p) = argmax over ids of (filtered logits / T + gumbel(seed, p, id)); T = 0: argmax of the logits.
    Ties go to the lowest id.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def choose(self, logits: Tensor, position: int, history: Sequence[int], ids: Tensor | None = None) -> int:
        """The id for `position`, given the ids at all earlier positions.

        logits: [n]. ids: [n] int64, which id each logit is for (a draft vocabulary), or None for 0..n-1.
        """
        scores = self.filtered(logits, history, ids)
        if self.params.temperature > 0:
            numbers = np.arange(len(scores)) if ids is None else ids.cpu().numpy()
            scores = scores + torch.from_numpy(gumbel(self.params.seed, position, numbers)).to(scores.device)
        best = int(scores.argmax())
        return best if ids is None else int(ids[best])

    def filtered(self, logits: Tensor, history: Sequence[int], ids: Tensor | None = None) -> Tensor:
        """-> [n] float32: penalised logits / T, with -inf for ids that top-k, top-p or min-p remove (in that order)."""
        params = self.params
        scores = logits.float()
        if params.repetition_penalty != 1.0:
            scores = _penalise(scores, history, ids, params.repetition_penalty)
        if params.temperature == 0:
            return scores
        scores = scores / params.temperature
        if params.top_k or params.top_p < 1:
            scores = _keep_most_likely(scores, params.top_k, params.top_p)
        if params.min_p > 0:
            probabilities = scores.softmax(-1)
            scores = scores.masked_fill(probabilities < params.min_p * probabilities.max(), -torch.inf)
        return scores


def confidence(logits: Tensor, choice: int, ids: Tensor | None = None) -> float:
    """The draft's own probability of the id it chose: softmax of the unfiltered draft logits [n] at temperature 1."""
    index = choice if ids is None else int(torch.searchsorted(ids, choice))
    return float(logits.float().softmax(-1)[index])


def _penalise(scores: Tensor, history: Sequence[int], ids: Tensor | None, penalty: float) -> Tensor:
    seen = torch.tensor(sorted(set(history)), dtype=torch.int64, device=scores.device)
    if ids is None:
        repeated = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        repeated[seen[seen < len(scores)]] = True
    else:
        repeated = torch.isin(ids, seen)
    return torch.where(repeated, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def _keep_most_likely(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """The `top_k` best and, of those, the fewest that hold `top_p` of the probability; equal scores by lowest id."""
    ordered, order = scores.sort(descending=True, stable=True)
    if top_k:
        ordered, order = ordered[:top_k], order[:top_k]
    if top_p < 1:
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities  # what the ids ahead of this one hold
        keep = before < top_p
        keep[0] = True
        ordered, order = ordered[keep], order[keep]
    return torch.full_like(scores, -torch.inf).scatter(0, order, ordered)
