"""Copied drafts: where the text repeats itself, what followed the last time is drafted again.

Prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding, 2023; n-gram speculation in other engines),
beside the exit head: a copied draft costs a row of verification and no draft step, and where the match is long it is
right more often than the head. Ours is how both share a chunk: the length of the match gives the chance of a copy,
learned from the verdicts, and the stop rule takes it as it takes the head's confidence.

The priors were measured on 175 held-out greedy answers of the default model, by the length of the match
(docs/history/exit-heads.md tells which).
"""

from bisect import bisect_right
from collections.abc import Sequence

from ..pipeline.rounds import Draft
from .successors import FROM_SUCCESSORS

LONG = 8  # tokens of a match that is preferred to a newer, shorter one
MOST = 24  # tokens of a match that are counted
WEIGHT = 4.0  # verdicts that a prior counts as
DISCOUNT = 0.98  # what older ones keep at each verdict
HEAD = 0.5  # prior of the exit head
CHEAPER = 0.1  # by so much a copy may be worse than the head: it costs no draft step
MATCHES = (1, 3, 4, 5, 6, 8, 12, 16, 24)  # a match of at least so many tokens
PRIORS = (0.50, 0.66, 0.74, 0.79, 0.82, 0.88, 0.91, 0.94, 0.99)  # is followed by the same token with this chance


class Lookup:
    """Of one answer."""

    def __init__(self, shortest: int) -> None:
        """shortest: how many tokens must match, at least 1."""
        self._indices: list[tuple[int, dict[tuple[int, ...], int]]] = [(LONG, {}), (shortest, {})]
        self._indexed = 0
        self._accepted = [0.0] * len(MATCHES)
        self._rejected = [0.0] * len(MATCHES)
        self._head = [0.0, 0.0]  # accepted and rejected drafts of the exit head

    def learn(self, tokens: Sequence[int]) -> None:
        """The committed text has grown to `tokens`."""
        for end in range(self._indexed, len(tokens)):
            for length, following in self._indices:
                if end >= length:
                    following[tuple(tokens[end - length : end])] = end
        self._indexed = len(tokens)

    def propose(self, known: Sequence[int]) -> Draft | None:
        """The token that followed the last occurrence of what `known` ends with: committed text, then drafts."""
        for length, following in self._indices:
            end = following.get(tuple(known[-length:])) if len(known) >= length else None
            if end is not None:
                match = length
                while match < min(end, MOST) and known[end - 1 - match] == known[len(known) - 1 - match]:
                    match += 1
                return Draft(known[end], self._chance(match), match)
        return None

    def beats_head(self, chance: float) -> bool:
        """Is a copy with this chance about as good as what the exit head has been drawing?"""
        return chance >= _mean(HEAD, *self._head) - CHEAPER

    def observe(self, judged: Sequence[Draft], accepted: int) -> None:
        """After a verdict: the first `accepted` of the judged draft tokens were right."""
        self._accepted = [DISCOUNT * count for count in self._accepted]
        self._rejected = [DISCOUNT * count for count in self._rejected]
        for place, draft in enumerate(judged):
            if draft.copied >= FROM_SUCCESSORS:
                continue
            if draft.copied:
                (self._accepted if place < accepted else self._rejected)[_bucket(draft.copied)] += 1.0
            else:
                self._head = [DISCOUNT * count for count in self._head]
                self._head[place >= accepted] += 1.0

    def _chance(self, match: int) -> float:
        bucket = _bucket(match)
        return _mean(PRIORS[bucket], self._accepted[bucket], self._rejected[bucket])


def _mean(prior: float, accepted: float, rejected: float) -> float:
    """Of a Beta posterior."""
    return (WEIGHT * prior + accepted) / (WEIGHT + accepted + rejected)


def _bucket(match: int) -> int:
    return bisect_right(MATCHES, match) - 1
