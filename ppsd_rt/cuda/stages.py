"""The stages of a model on a device: what a draft step and a verification pass launch, one kernel after the other.

    draft_step    rows that the early layers have not seen, through layers [0, E) and the exit head: one draft token
    early_step    the same without the exit head
    verification  rows that the early layers have seen, through layers [E, L) and the LM head; verdict; report
    plain_step    early_step, then verification: with nothing drafted, a step of plain decoding

They allocate nothing, read nothing on the host and take no argument that changes: captured once, they can be launched
for ever. Which rows a pass takes, where they stand, what is sampled and where it ends is in device memory
(triton_kernels/state.py); the host sets it between answers (`begin`) or, in the order of a stream, between launches
(`control`). draft_step (or early_step) may run on one stream and verification on others: see triton_kernels/verdict.py.

Every row at most passes each layer once in each epoch, through the same kernels whatever the step that takes it: plain
decoding and every schedule compute the same bits.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..backend import Oracle
from ..errors import UsageError
from ..sampling import SamplingParams
from ..triton_kernels.attention import attention
from ..triton_kernels.embedding import embedding
from ..triton_kernels.feedback import feedback
from ..triton_kernels.heads import heads, sampling_words
from ..triton_kernels.linear import linear
from ..triton_kernels.qkv import qkv
from ..triton_kernels.state import (
    DRAFTED,
    DRAWN,
    LIMIT,
    LOOKAHEAD,
    MOST,
    ORACLE,
    ORACLE_END,
    ORACLE_SEED,
    REPORT,
    SEQUENCE,
    START,
    TOKEN,
    WORDS,
)
from ..triton_kernels.swiglu import swiglu
from ..triton_kernels.verdict import arrived, begin_draft, begin_verification, drafted, fetch, post, verdict
from .buffers import NEVER, Buffers, Work
from .prompt import PromptPass
from .weights import DeviceWeights, Layer


class DeviceStages:
    """One model, one exit head or none, one answer at a time of at most `capacity` tokens, prompt included."""

    def __init__(
        self,
        weights: DeviceWeights,
        capacity: int,
        cuts: Sequence[int] = (),
        *,
        pdl: bool = False,
        report: bool = False,
    ) -> None:
        """cuts: the layers at which verification is cut into stages. pdl: programmatic dependent launches (Hopper)."""
        bounds = [weights.exit_layer, *cuts, len(weights.layers)]
        if any(low >= high for low, high in pairwise(bounds)):
            raise UsageError(f"verification, layers {bounds[0]} to {bounds[-1]}, cannot be cut at the layers {[*cuts]}")
        self.weights, self.pdl = weights, pdl
        self.slices = list(pairwise(bounds))  # of the layers, one for each verification stage
        self.buffers = Buffers(weights, capacity, len(self.slices))
        self.capacity = capacity
        early = [*weights.layers[: weights.exit_layer], *(weights.head.layers if weights.head else ())]
        self._draft = Work(weights, self.buffers.capacity, early, weights.head.lm_head if weights.head else None)
        self._late = [
            Work(weights, self.buffers.capacity, weights.layers[low:high], weights.lm_head if last else None)
            for (low, high), last in zip(self.slices, self._is_last(), strict=True)
        ]
        self._prompt = PromptPass(weights, self.buffers)
        self._report = report
        self.prompt_rows = 0  # rows [0, prompt_rows) have been through a prompt pass: an answer may keep them

    # What a carrier and the tests look at; all live as long as the stages and stay where they are.

    @property
    def state(self) -> Tensor:  # int32 [WORDS]
        return self.buffers.state

    @property
    def early(self) -> Tensor:  # int32 [WORDS]
        return self.buffers.early

    @property
    def late(self) -> Tensor:  # int32 [stages, WORDS]
        return self.buffers.late

    @property
    def text(self) -> Tensor:  # int32 [capacity]
        return self.buffers.text

    @property
    def ring(self) -> Tensor:  # int32 [SLOTS, RING_WORDS], the host's memory: record n in slot n % SLOTS
        return self.buffers.ring

    @property
    def drafts(self) -> Tensor:  # int32 [SLOTS, DRAFT_WORDS], likewise
        return self.buffers.drafts

    # -- host side: between answers ------------------------------------------------------------------------------------

    def begin(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        keep: int = 0,
        *,
        end: int | None = None,
        most: int = 0,
        lookahead: int = 0,
        oracle: Oracle | None = None,
    ) -> None:
        """The prompt but for its last token through all layers; that one is the first row of the first pass.

        No pass may be under way. The first `keep` rows are taken from the answer before, as far as a prompt pass made
        them. end: the committed text ends before this position. Records count on from answer to answer.
        """
        rows = len(prompt) - 1
        end = self.capacity if end is None else end
        if not 0 < len(prompt) < end <= self.capacity:
            raise UsageError(
                f"a prompt of {len(prompt)} tokens and an end at {end} do not fit {self.capacity} positions"
            )
        b, config = self.buffers, self.weights.config
        b.text[: len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
        first_seen = torch.full((config.vocab_size,), NEVER, dtype=torch.int32)
        places = torch.arange(len(prompt) - 1, -1, -1, dtype=torch.int32)
        for token, place in zip(reversed(prompt), places, strict=True):
            first_seen[token] = place
        b.first_seen.copy_(first_seen)
        b.sampling.copy_(sampling_words(sampling, "cpu"))
        words = self._words({START: rows})
        for passes in (b.early, b.head, b.late, b.mail):
            passes.copy_(words.expand_as(passes))
        changed = {START: rows, TOKEN: prompt[-1], DRAFTED: len(prompt), MOST: most, LOOKAHEAD: lookahead}
        changed |= {LIMIT: end - 1, REPORT: int(self._report)}
        if oracle is not None:
            changed |= self._ask(oracle)
        state, counts = self._words(changed), slice(SEQUENCE, DRAWN + 1)
        state[counts] = b.state[counts].cpu()
        b.state.copy_(state)
        keep = max(0, min(keep, rows, self.prompt_rows))
        if keep < rows:
            self._prompt.run(keep, rows)
        self.prompt_rows = rows

    def control(self, *, most: int, lookahead: int) -> None:
        """Change the chunks from the next pass on (in the order of the current stream)."""
        self.state[MOST : LOOKAHEAD + 1] = torch.tensor([most, lookahead], dtype=torch.int32)

    # -- device side: what is captured ---------------------------------------------------------------------------------

    def draft_step(self) -> None:
        b, work, head = self.buffers, self._draft, self.weights.head
        assert head is not None, "drafting needs an exit head"
        begin_draft(b.early, b.head, b.state, pdl=self.pdl)
        self._early_layers()
        x = b.exit_hidden
        if head.feedback is not None:
            assert head.feedback_norm is not None
            feedback(x, b.last_hidden, head.feedback_norm, self._eps, head.feedback, work.x, b.head, pdl=self.pdl)
            x = work.x
        for number, layer in enumerate(head.layers, len(self.weights.layers)):
            x = self._layer(layer, number, x, work.x, b.head, work)
        assert work.scratch is not None
        heads(
            x, head.norm, self._eps, head.lm_head, b.sampling, work.scratch, work.choices, work.chances, b.head,
            draft_ids=head.draft_ids, text=b.text, first_seen=b.first_seen, pdl=self.pdl,
        )  # fmt: skip
        drafted(
            b.text, work.choices, work.chances, b.confidences, b.truth, b.early, b.head, b.state, b.drafts,
            vocabulary=self.weights.config.vocab_size, pdl=self.pdl,
        )  # fmt: skip

    def early_step(self) -> None:
        b = self.buffers
        begin_draft(b.early, b.head, b.state, pdl=self.pdl)
        self._early_layers()
        arrived(b.early, b.state, pdl=self.pdl)

    def verification(self, stage: int | None = None) -> None:
        """All stages, one after the other, or one of them.

        Stages on streams of their own: stage s + 1 begins a pass once s has ended it; s may be up to MAIL_SLOTS passes
        ahead.
        """
        for each in range(len(self.slices)) if stage is None else (stage,):
            self._verify(each)

    def plain_step(self) -> None:
        self.early_step()
        self.verification()

    def _verify(self, stage: int) -> None:
        b, work, words = self.buffers, self._late[stage], self.buffers.late[stage]
        if stage == 0:
            begin_verification(b.early, words, b.state, pdl=self.pdl)
        else:
            fetch(b.mail[stage], words, b.state, pdl=self.pdl)
        self._late_layers(stage, words)
        if stage < len(self.slices) - 1:
            post(words, b.mail[stage + 1], b.state, pdl=self.pdl)
            return
        self._lm_head(words, None)
        verdict(b.text, work.choices, b.confidences, b.first_seen, words, b.state, b.ring, pdl=self.pdl)

    def _early_layers(self) -> None:
        b, work = self.buffers, self._draft
        embedding(b.text, self.weights.embedding, b.exit_hidden, b.early, pdl=self.pdl)
        for number, layer in enumerate(self.weights.layers[: self.weights.exit_layer]):
            self._layer(layer, number, b.exit_hidden, b.exit_hidden, b.early, work)

    def _late_layers(self, stage: int, words: Tensor) -> None:
        """From where the rows before stand, each at its position, to work.x or the border to the next stage."""
        b, work, (low, high) = self.buffers, self._late[stage], self.slices[stage]
        x = b.exit_hidden if stage == 0 else b.handed[stage - 1]
        for number in range(low, high):
            last = self._leaves(stage) if number == high - 1 else None
            self._layer(self.weights.layers[number], number, x, work.x, words, work, last)
            x = work.x

    def _leaves(self, stage: int) -> Tensor | None:
        """Where the stage's last layer leaves the rows, each at its position, if not in work.x."""
        b = self.buffers
        if stage < len(self.slices) - 1:
            return b.handed[stage]
        return b.last_hidden if len(b.last_hidden) else None

    def _lm_head(self, words: Tensor, logits: Tensor | None) -> None:
        b, work, weights = self.buffers, self._late[-1], self.weights
        assert work.scratch is not None
        left = self._leaves(len(self.slices) - 1)
        heads(
            work.x if left is None else left, weights.norm, self._eps, weights.lm_head, b.sampling, work.scratch,
            work.choices, work.chances, words, text=b.text, first_seen=b.first_seen, logits=logits, pdl=self.pdl,
        )  # fmt: skip

    def _layer(
        self, layer: Layer, number: int, x: Tensor, out: Tensor, words: Tensor, work: Work, last: Tensor | None = None
    ) -> Tensor:
        """x -> out, and from there, behind the MLP, to `last` where that is not the same."""
        b = self.buffers
        keys, values = b.keys[number], b.values[number]
        qkv(
            x, layer.norm, self._eps, layer.qkv, layer.qkv_bias, b.cosines, b.sines, work.queries, keys, values, words,
            pdl=self.pdl,
        )  # fmt: skip
        attention(work.queries, keys, values, work.partials, work.mixed.view_as(work.queries), words, pdl=self.pdl)
        linear(
            work.mixed, layer.out, out, words, bias=layer.out_bias, residual=x, partial=work.sums, pdl=self.pdl
        )  # fmt: skip
        if layer.gate_up is None or layer.down is None or layer.post_norm is None:
            return out
        swiglu(out, layer.post_norm, self._eps, layer.gate_up, work.inner, words, pdl=self.pdl)
        last = out if last is None else last
        linear(work.inner, layer.down, last, words, residual=out, partial=work.sums, pdl=self.pdl)
        return last

    def _words(self, values: dict[int, int]) -> Tensor:
        words = torch.zeros(WORDS, dtype=torch.int32)
        for place, value in values.items():
            words[place] = value
        return words

    def _ask(self, oracle: Oracle) -> dict[int, int]:
        count = min(len(oracle.truth), self.capacity)
        self.buffers.truth[:count] = torch.tensor(oracle.truth[:count], dtype=torch.int32)
        bits = torch.tensor([oracle.acceptance]).view(torch.int32).item()
        low, high = torch.tensor([oracle.seed & 0xFFFFFFFF, oracle.seed >> 32]).to(torch.int32).tolist()
        return {ORACLE_END: count, ORACLE: int(bits), ORACLE_SEED: low, ORACLE_SEED + 1: high}

    def _is_last(self) -> list[bool]:
        return [stage == len(self.slices) - 1 for stage in range(len(self.slices))]

    @property
    def _eps(self) -> float:
        return self.weights.config.rms_norm_eps
