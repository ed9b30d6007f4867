"""Drafting with an EAGLE-3 head: it reads what verification made of the text, and then its own output.

Nothing is drafted while a pass is under way, so whatever the taps hold below their length is of the text.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..models.eagle3_head import Eagle3Head
from ..models.llama import LlamaForCausalLM
from .draft_vocabulary import DraftVocabulary
from .stage import DraftStage, Stage, Taps, in_blocks, zeros


class EagleDraftStage(DraftStage):
    """No layer of the model drafts: the hidden states that verification starts from are the embeddings.

    Row i of the head: see models/eagle3_head.py. Rows [0, sure) have read verified features. What comes after them has
    read the head's own outputs, and is run again when the model has verified more of the text.
    """

    def __init__(self, model: LlamaForCausalLM, head: Eagle3Head, taps: Taps) -> None:
        self._eagle, self._taps = head, taps
        super().__init__(model, None)
        self._own = Stage(head.layers, head.eagle.layer, self._like)
        self._sure = 0
        self._outputs = self._like.new_zeros(0, model.config.hidden_size)  # of the head's rows
        self._own_embed: Callable[[Tensor], Tensor] = head.embed_tokens or self._embed
        self._ids: list[int] = []
        self._sibling_ids: dict[int, int] = {}

    @property
    def draft_ids(self) -> Tensor | None:
        return self._vocabulary.ids if self._vocabulary else self._eagle.draft_ids

    def begin_vocabulary(self) -> None:
        """Ids of the text may be drafted where the head's LM head holds the model's own rows."""
        listed, rows = self._eagle.draft_ids, self._lm_head.weight
        same = listed is not None and _same(self._eagle.lm_head.weight, rows[listed])
        self._vocabulary = DraftVocabulary(listed, rows) if listed is not None and same else None

    def reserve(self, capacity: int) -> None:
        super().reserve(capacity)
        self._own.reserve(capacity)
        self._taps.reserve(capacity)
        if capacity > len(self._outputs):
            grown = zeros(self._outputs, capacity, self._outputs.shape[1])
            grown[: len(self._outputs)] = self._outputs
            self._outputs = grown

    def run_tokens(self, ids: Sequence[int], cancelled: Callable[[], bool] | None = None) -> None:
        self._ids[self.length :] = ids
        super().run_tokens(ids, cancelled)

    def run_sibling(self, position: int, token: int) -> None:
        super().run_sibling(position, token)
        self._sibling_ids[position] = token

    def adopt(self, position: int) -> None:
        super().adopt(position)
        self._ids[position:] = [self._sibling_ids[position]]
        self._forget(position)

    def draft_logits(self) -> Tensor:
        """[draft vocabulary]: for the token at position `length`, after the head's row length - 2."""
        last = self.length - 1  # rows that the text has: each needs the token after its own
        if last < 1:
            raise ValueError("an EAGLE-3 head drafts after two tokens at the least")
        verified = min(self._taps.length, last)
        if verified > self._sure:
            self._own.rollback(self._sure)
            features = self._eagle_rows(self._eagle.feature, self._taps.rows(self._sure, verified), self._sure)
            self._run(features)
            self._sure = verified
        while self._own.length < last:
            row = self._own.length
            self._run(self._eagle_rows(self._eagle.next_feature, self._outputs[row - 1 : row], row - 1))
        output = self._outputs[last - 1 : last]
        logits = self._eagle_rows(self._eagle.logits, output, last - 1)[0]
        return self._vocabulary.logits(self._eagle.norm(output)[0], logits) if self._vocabulary else logits

    def _run(self, features: Tensor) -> None:
        """The head's next rows, whose features [count, hidden] these are."""
        first = self._own.length
        ids = self._ids[first + 1 : first + 1 + len(features)]
        embeddings = self._own_embed(torch.tensor(ids, device=features.device))
        self._outputs[first : first + len(features)] = self._own.run(torch.cat((embeddings, features), dim=-1))

    def _eagle_rows(self, compute: Callable[[Tensor], Tensor], x: Tensor, start: int) -> Tensor:
        return in_blocks(self.rows, start, x, lambda rows, _: compute(rows))

    def _forget(self, length: int) -> None:
        """Rows whose own token, or the one after it, is not among the first `length`."""
        self._own.rollback(max(length - 1, 0))
        self._sure = min(self._sure, self._own.length)

    def begin_text(self, length: int) -> None:
        super().begin_text(length)
        self._own.begin_text(length)
        self._sure = min(self._sure, self._own.length)

    def rollback(self, length: int) -> None:
        super().rollback(length)
        del self._ids[self.length :]
        self._sibling_ids.clear()
        self._forget(self.length)


def _same(rows: Tensor, model: Tensor) -> bool:
    """[n, hidden] each: but for rounding?"""
    return bool(((rows - model).float().norm(dim=1) <= 0.01 * model.float().norm(dim=1)).all())
