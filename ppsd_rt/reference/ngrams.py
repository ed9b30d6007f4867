"""Copied drafts: what followed the last 1 to 16 tokens wherever an engine has read or said them before.

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023) copies from the text at hand, Token
Recycling (arXiv 2408.08696) and SuffixDecoding (arXiv 2411.04975) from earlier answers too. Ours is one index of both:
hashed n-grams, each with the token that followed and how often it has. The longest match counts. Its length, its count
and whether it is from the text at hand give the chance that the copy is right, which verdicts correct. So copies share
a chunk with the exit head's drafts, and the stop rule takes their chance as it takes the head's confidence.

The priors were measured on 900 greedy answers of the default model (docs/history/decoding.md tells how).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..pipeline.rounds import Draft

BYTES = 32 << 20  # of what all answers share
ORDERS = (1, 2, 3, 4, 6, 8, 12, 16)  # tokens that are looked back at
COUNTS = 4  # how often the same token has followed, as far as it is told apart
KINDS = 2 * len(ORDERS) * COUNTS  # of matches: in other texts, and then in the text at hand
WAYS, SET_BYTES = 4, 64  # entries of a set, and their bytes
WEIGHT = 8.0  # proposals that a prior counts as
DISCOUNT = 0.995  # what older ones of the same kind keep at each
MOST = 7  # of a count
PRIORS = (  # by the match's length, and then by count
    *(0.10, 0.14, 0.24, 0.27, 0.14, 0.22, 0.32, 0.48, 0.21, 0.32, 0.45, 0.58, 0.25, 0.39, 0.45, 0.58),
    *(0.36, 0.60, 0.64, 0.70, 0.40, 0.65, 0.82, 0.85, 0.60, 0.85, 0.95, 0.97, 0.95, 0.98, 0.98, 0.99),
    *(0.24, 0.42, 0.56, 0.64, 0.49, 0.69, 0.82, 0.89, 0.60, 0.78, 0.88, 0.90, 0.72, 0.85, 0.90, 0.96),
    *(0.79, 0.92, 0.97, 0.97, 0.85, 0.95, 0.98, 0.98, 0.89, 0.97, 0.97, 0.98, 0.94, 0.99, 0.99, 0.99),
)
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Text:
    owner: int
    number: int


class _Entry:
    def __init__(self, tag: int) -> None:
        self.tag, self.used, self.next, self.text, self.count = tag, 0, -1, 0, 0


class Ngrams:
    """Of all answers of an engine, in so many bytes at most: what is longest out of use goes first."""

    def __init__(self, size: int = BYTES) -> None:
        self._bits = 1
        while self._bits < 32 and (2 << self._bits) * SET_BYTES <= size:
            self._bits += 1
        self._sets: dict[int, list[_Entry]] = {}
        self._chances = [(WEIGHT * prior, WEIGHT) for prior in PRIORS]  # right, all
        self._counted = self._texts = 0

    def begin(self, owner: int = 0) -> Text:
        """Texts of different owners never see each other's tokens."""
        self._texts += 1
        return Text(owner, self._texts)

    def learn(self, tokens: Sequence[int], first: int, seen: int, text: Text) -> None:
        """`tokens` from position `first` on are new in this text; those before `seen` were counted in another one."""
        for end in range(first, len(tokens)):
            self._counted += 1
            for key in _keys(tokens[max(end - ORDERS[-1], 0) : end], text.owner):
                self._count(self._claim(key), tokens[end], text.number, end >= seen)

    def _count(self, entry: _Entry, following: int, text: int, new: bool) -> None:
        """What follows again becomes surer. What follows no more becomes half as sure, or is replaced: at once where
        another text has said so."""
        own = entry.used > 0 and entry.text == text
        if entry.used and entry.next == following:
            entry.count = min(entry.count + (own or new), MOST)
        elif own and entry.count:
            entry.count //= 2
        else:
            entry.next, entry.count = following, 0
        entry.text, entry.used = text, self._counted

    def know(self, counted: Iterable[tuple[int, int, int, int]]) -> None:
        """Counted beforehand: (the token before the last, -1 for none; the last; what follows; how often)."""
        for before, last, following, times in counted:
            entry = self._claim(_keys([before, last], 0)[0 if before < 0 else 1])
            if not entry.used or entry.count <= times:
                entry.next, entry.count = following, min(max(times, 0), MOST)
            entry.used = max(entry.used, 1)

    def propose(self, known: Sequence[int], text: Text, shortest: int, others: bool) -> Draft | None:
        """What follows `known` (committed text, then drafts) after the longest match that is wanted.

        Of `shortest` tokens in the text itself (0: none), of any length in `others`.
        """
        for order, key in reversed(list(enumerate(_keys(known, text.owner)))):
            entry = self._find(key)
            if entry is None:
                continue
            own = entry.text == text.number
            if not others and not (own and 0 < shortest <= ORDERS[order]):
                continue
            kind = (own * len(ORDERS) + order) * COUNTS + min(entry.count, COUNTS - 1)
            right, judged = self._chances[kind]
            return Draft(entry.next, right / judged, 1 + kind)
        return None

    def observe(self, copied: int, right: bool) -> None:
        """A proposal of this kind was right, or wrong."""
        good, judged = self._chances[copied - 1]
        self._chances[copied - 1] = (DISCOUNT * good + right, DISCOUNT * judged + 1.0)

    def _find(self, key: int) -> _Entry | None:
        entries = self._sets.get(key >> (64 - self._bits), [])
        return next((entry for entry in entries if entry.tag == key & 0xFFFFFFFF), None)

    def _claim(self, key: int) -> _Entry:
        """Its entry, or the one that is longest out of use, emptied."""
        if (known := self._find(key)) is not None:
            return known
        entries = self._sets.setdefault(key >> (64 - self._bits), [])
        if len(entries) < WAYS:
            entries.append(_Entry(key & 0xFFFFFFFF))
            return entries[-1]
        oldest = min(range(WAYS), key=lambda way: entries[way].used)
        entries[oldest] = _Entry(key & 0xFFFFFFFF)
        return entries[oldest]


def from_own_text(copied: int) -> bool:
    return copied > KINDS // 2


def _keys(tokens: Sequence[int], owner: int) -> list[int]:
    """Of the n-grams that `tokens` end with, by order."""
    keys, total = list[int](), owner
    for back in range(1, min(len(tokens), ORDERS[-1]) + 1):
        total = (total + tokens[-back] + 1) * 0x9E3779B97F4A7C15 & _WORD
        total ^= total >> 29
        if back == ORDERS[len(keys)]:
            keys.append(total * 0xD6E8FEB86659FD93 & _WORD)
    return keys
