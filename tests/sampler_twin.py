"""The readable twin of csrc/cpu/sampler.cpp: filters, and the choice of a token by shared noise."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from noise_twin import gumbel
from torch import Tensor

from ppsd_rt.backend import NO_NUMBER, common_prefix
from ppsd_rt.errors import PpsdError
from ppsd_rt.pipeline.rounds import Logprob
from ppsd_rt.sampling.grammar import TokenMask
from ppsd_rt.sampling.params import SamplingParams


class Sampler:
    """Chooses the token for a position. Draft and verification use the same one, so that equal logits choose alike.

    token(p) = argmax over ids of (filtered logits / T + gumbel(key, p, id)); T = 0: argmax of the logits.
    Ties go to the lowest id.
    """

    def __init__(
        self, params: SamplingParams, answer: int = 0, mask: TokenMask | None = None, stop_ids: Collection[int] = ()
    ) -> None:
        """answer: the position at which the answer begins. mask: of its grammar. stop_ids: that may end it."""
        self.params, self.answer = params, answer
        self._stops = torch.tensor(sorted(stop_ids), dtype=torch.int64)
        self._mask = mask
        self._masked: list[int] = []  # the answer's ids, when the mask was last asked
        bias = dict(params.logit_bias)
        self._biased = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)

    def choose(self, logits: Tensor, position: int, history: Sequence[int], ids: Tensor | None = None) -> int:
        """The id for `position`, given the ids at all earlier positions.

        logits: [n]. ids: [n] int64, which id each logit is for (a draft vocabulary), or None for 0..n-1.
        PpsdError where one of them is NaN or infinite.
        """
        if not bool(torch.isfinite(logits).all()):
            raise PpsdError(NO_NUMBER)
        return self.pick(self.edited(logits, history, ids), position, history, ids)

    def edited(self, logits: Tensor, history: Sequence[int], ids: Tensor | None = None) -> Tensor:
        """-> [n] float32, of which `pick` chooses: the logits with the bias, -inf for what the grammar forbids, and for
        ids that would end the answer too early."""
        scores = self._with_bias(logits.float(), ids)
        if len(history) < self.answer + self.params.min_tokens and len(self._stops):
            numbers = torch.arange(len(scores)) if ids is None else ids.cpu()
            scores = scores.masked_fill(torch.isin(numbers, self._stops).to(scores.device), -torch.inf)
        if self._mask is None:
            return scores
        answer = list(history[self.answer :])
        same = common_prefix(self._masked, answer)
        allowed = torch.from_numpy(self._mask.allowed(same, answer[same:]))
        self._masked = answer
        allowed = allowed[: len(scores)] if ids is None else allowed[ids.cpu()]
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def _with_bias(self, scores: Tensor, ids: Tensor | None) -> Tensor:
        if not len(self._bias):
            return scores
        bias = torch.zeros(len(scores) if ids is None else int(ids[-1]) + 1)
        known = self._biased < len(bias)
        bias[self._biased[known]] = self._bias[known]
        return scores + (bias if ids is None else bias[ids.cpu()]).to(scores.device)

    def pick(self, scores: Tensor, position: int, history: Sequence[int], ids: Tensor | None = None) -> int:
        """The id for `position` of what `edited` gives."""
        scores = self.filtered(scores, history, ids)
        if self.params.temperature > 0:
            numbers = np.arange(len(scores)) if ids is None else ids.cpu().numpy()
            scores = scores + torch.from_numpy(gumbel(self.params.seed or 0, position, numbers)).to(scores.device)
        best = int(scores.argmax())
        return best if ids is None else int(ids[best])

    def filtered(self, logits: Tensor, history: Sequence[int], ids: Tensor | None = None) -> Tensor:
        """-> [n] float32: penalised logits / T, with -inf for ids that top-k, top-p or min-p remove (in that order)."""
        params = self.params
        scores = logits.float()
        if params.repetition_penalty != 1.0:
            scores = _penalise(scores, history, ids, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            scores = scores - self._penalty(history[self.answer :], len(scores), ids).to(scores.device)
        if params.temperature == 0:
            return scores
        scores = scores / params.temperature
        if params.top_k or params.top_p < 1:
            scores = _keep_most_likely(scores, params.top_k, params.top_p)
        if params.min_p > 0:
            probabilities = scores.softmax(-1)
            scores = scores.masked_fill(probabilities < params.min_p * probabilities.max(), -torch.inf)
        return scores

    def _penalty(self, answer: Sequence[int], n: int, ids: Tensor | None) -> Tensor:
        """-> [n] float32: what presence and frequency of the answer's ids take off."""
        counts = torch.bincount(
            torch.tensor(answer, dtype=torch.int64), minlength=n if ids is None else int(ids[-1]) + 1
        )
        counts = (counts[:n] if ids is None else counts[ids.cpu()]).double()
        params = self.params
        return (params.frequency_penalty * counts + params.presence_penalty * (counts > 0)).float()

    def logprob(self, logits: Tensor, token: int) -> Logprob | None:
        """Of a token among the model's logits [n]; None: nobody asks for it."""
        most = self.params.logprobs
        if most is None:
            return None
        own = logits.float().log_softmax(-1)
        values, ids = own.sort(descending=True, stable=True)
        top = zip(ids[:most].tolist(), values[:most].tolist(), strict=True)
        return Logprob(float(own[token]), tuple(top))


def confidence(logits: Tensor, choice: int, ids: Tensor | None = None) -> float:
    """The draft's own probability of the id it chose: softmax of `edited` draft logits [n] at temperature 1."""
    index = choice if ids is None else int(torch.searchsorted(ids, choice))
    return float(logits.float().softmax(-1)[index].nan_to_num())  # a grammar may forbid all ids of a draft vocabulary


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
