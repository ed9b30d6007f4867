"""Copies and the exit head beside each other, in one answer: each is used for what it has been worth in this text."""

from collections.abc import Sequence

from ..pipeline.rounds import Draft
from ..pipeline.schedule import Schedule
from .ngrams import Ngrams, from_own_text

WEIGHT = 4.0  # drafts that a prior counts as
DISCOUNT = 0.98  # what older ones of the same source keep at each
HEAD = 0.5  # prior of the exit head
BYTES_OF_TOKEN = 256  # of an index of one text alone: half of it stays empty


class _Trust:
    """What was right, over what had been expected to be; older drafts count less."""

    def __init__(self, prior: float) -> None:
        self.right, self.expected = prior * WEIGHT, WEIGHT

    @property
    def ratio(self) -> float:
        return self.right / self.expected

    def count(self, chance: float, right: bool) -> None:
        self.right = DISCOUNT * self.right + right
        self.expected = DISCOUNT * self.expected + chance


class Copies:
    def __init__(self, ngrams: Ngrams, owner: int, seen: int) -> None:
        """owner: of the text. seen: tokens of it that an earlier answer has counted."""
        self._ngrams, self._text = ngrams, ngrams.begin(owner)
        self._seen, self._counted = seen, 0
        self._copies = _Trust(1.0), _Trust(1.0)  # from other texts, from this one: over what `ngrams` promises
        self._head = _Trust(HEAD)

    def learn(self, tokens: Sequence[int]) -> None:
        """The committed text has grown to `tokens`."""
        self._ngrams.learn(tokens, self._counted, self._seen, self._text)
        self._counted = len(tokens)

    def propose(self, schedule: Schedule, known: Sequence[int]) -> Draft | None:
        """What the text goes on with after `known`: committed text, then drafts."""
        copy = self._ngrams.propose(known, self._text, schedule.lookup, schedule.recycle)
        if copy is None:
            return None
        chance = copy.confidence * self._copies[from_own_text(copy.copied)].ratio
        return Draft(copy.token, min(max(chance, 0.0), 0.99), copy.copied)

    def beats_head(self, chance: float) -> bool:
        """Is a copy with this chance as good as what the exit head has been drawing?"""
        return chance >= self._head.ratio

    def observe(
        self, schedule: Schedule, judged: Sequence[Draft], accepted: int, tokens: Sequence[int], first: int
    ) -> None:
        """After a verdict, which committed `tokens` from position `first` on; the first `accepted` judged were right.

        Every committed token says what a copy would have been worth there, whether it was drafted or not.
        """
        for place, draft in enumerate(judged):
            if not draft.copied:
                self._head.count(1.0, place < accepted)
        for position in range(first, len(tokens) if schedule.copies else first):
            copy = self._ngrams.propose(tokens[:position], self._text, schedule.lookup, schedule.recycle)
            if copy is not None:
                right = copy.token == tokens[position]
                self._copies[from_own_text(copy.copied)].count(copy.confidence, right)
                self._ngrams.observe(copy.copied, right)
