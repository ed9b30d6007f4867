"""The ids of a text that an exit head may draft beside those that its file lists (csrc/cpu/draft_vocabulary.h)."""

from collections.abc import Iterable, Sequence

MOST = 512  # the newest ones


class TextIds:
    """`ids`: of the text, not listed, the newest last. They depend on the text alone, not on when it was told."""

    def __init__(self, listed: Iterable[int], most: int = MOST) -> None:
        self.ids: dict[int, None] = {}
        self._listed, self._most, self._followed = frozenset(listed), most, 0

    def follow(self, text: Sequence[int]) -> bool:
        """The text so far. -> Are there other ids now?"""
        before = self.ids.keys() | set[int]()
        for token in text[self._followed :]:
            if token not in self._listed:
                self.ids.pop(token, None)
                self.ids[token] = None
        self._followed = len(text)
        while len(self.ids) > self._most:
            del self.ids[next(iter(self.ids))]
        return self.ids.keys() != before

    def roll_back(self, length: int) -> None:
        """Tokens from there on are others now."""
        self._followed = min(self._followed, length)
