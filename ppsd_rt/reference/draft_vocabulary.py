"""The ids that an exit head drafts from in one text: the twin of csrc/cpu/draft_vocabulary.h."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

MOST = 512  # ids of the text: the newest ones


class DraftVocabulary:
    """Those that the head's file lists, and those that stand in the text."""

    def __init__(self, listed: Tensor, lm_head: Tensor) -> None:
        """listed: [n] int64, ascending. lm_head: the model's, [vocabulary, hidden]."""
        self.ids, self._listed, self._lm_head = listed, listed, lm_head  # ids: [n + own] int64, ascending
        self._listed_ids = frozenset(listed.tolist())
        self._own: dict[int, None] = {}  # ids of the text, the newest last
        self._followed = 0

    def follow(self, text: Sequence[int]) -> None:
        """The text's ids so far. What is kept of them depends on the text alone, not on when it was told."""
        before = set(self._own)
        for token in text[self._followed :]:
            if token not in self._listed_ids:
                self._own.pop(token, None)
                self._own[token] = None
        self._followed = len(text)
        while len(self._own) > MOST:
            del self._own[next(iter(self._own))]
        if self._own.keys() != before:
            own = torch.tensor(list(self._own), dtype=torch.int64, device=self._listed.device)
            self.ids, self._order = torch.cat((self._listed, own)).sort()
            self._rows = self._lm_head[own]

    def roll_back(self, length: int) -> None:
        """Tokens from there on are others now."""
        self._followed = min(self._followed, length)

    def logits(self, x: Tensor, listed: Tensor) -> Tensor:
        """x [hidden], as the LM head reads it, and its logits of the listed ids [n] -> [n + own], in the order of `ids`."""
        if not self._own:
            return listed
        return torch.cat((listed, F.linear(x, self._rows)))[self._order]
