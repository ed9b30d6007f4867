"""The ids that an exit head on a GPU drafts from in one text: the last outputs of its LM head are the text's.

Captured launches read the same memory for every text: the host writes ids and rows there, in the stream's order.
"""

from collections.abc import Sequence

import torch

from ..models.text_ids import MOST, TextIds
from .weights import NO_ID, Head


class DraftVocabulary:
    """Of one text at a time."""

    def __init__(self, head: Head | None) -> None:
        self._head = head if head is not None and head.draft_ids is not None else None
        if self._head is not None:
            assert self._head.draft_ids is not None
            self._listed = frozenset(self._head.draft_ids[:-MOST].tolist())
        self.begin()

    def begin(self) -> None:
        """Another text."""
        self._slots: dict[int, int] = {}  # of its ids
        if self._head is not None:
            assert self._head.draft_ids is not None
            self._text = TextIds(self._listed)
            self._head.draft_ids[-MOST:] = NO_ID

    def follow(self, text: Sequence[int]) -> None:
        """The text so far: what of its ids is not here yet takes the places of those that are too old."""
        if self._head is None or not self._text.follow(text):
            return
        head, ids = self._head, self._text.ids
        assert head.draft_ids is not None
        assert head.rows is not None
        self._slots = {token: slot for token, slot in self._slots.items() if token in ids}
        taken, new = set(self._slots.values()), [token for token in ids if token not in self._slots]
        free = [slot for slot in range(MOST) if slot not in taken][: len(new)]
        self._slots.update(zip(new, free, strict=True))
        device = head.draft_ids.device
        slots = torch.tensor(free, device=device) + len(head.draft_ids) - MOST
        rows = head.rows(torch.tensor(new, device=device))
        head.lm_head.values[slots] = rows.values
        if head.lm_head.scales is not None and rows.scales is not None:
            head.lm_head.scales[slots] = rows.scales
        head.draft_ids[slots] = torch.tensor(new, dtype=torch.int32, device=device)

    def roll_back(self, length: int) -> None:
        if self._head is not None:
            self._text.roll_back(length)
