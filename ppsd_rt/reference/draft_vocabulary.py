"""The ids that an exit head drafts from in one text: those that its file lists, and those that stand in the text."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.text_ids import TextIds


class DraftVocabulary:
    """ids: [n + own] int64, ascending."""

    def __init__(self, listed: Tensor, lm_head: Tensor) -> None:
        """listed: [n] int64, ascending. lm_head: the model's, [vocabulary, hidden]."""
        self.ids, self._listed, self._lm_head = listed, listed, lm_head
        self.text = TextIds(listed.tolist())

    def follow(self, text: Sequence[int]) -> None:
        if self.text.follow(text):
            own = torch.tensor(list(self.text.ids), dtype=torch.int64, device=self._listed.device)
            self.ids, self._order = torch.cat((self._listed, own)).sort()
            self._rows = self._lm_head[own]

    def logits(self, x: Tensor, listed: Tensor) -> Tensor:
        """x [hidden], as the LM head reads it, and its logits of the listed ids [n] -> [n + own], as `ids`."""
        if not self.text.ids:
            return listed
        return torch.cat((listed, F.linear(x, self._rows)))[self._order]
