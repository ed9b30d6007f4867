"""What usually follows a token, and two tokens: drafts where nothing in the text at hand can be copied.

Token Recycling (arXiv 2408.08696) keeps what verified rows have said for the next draft, across answers, without any
training. Ours keeps one successor of each token and of each pair, and how sure it is; verdicts say what that is worth,
and the stop rule takes that chance as it takes the exit head's confidence.

The priors were measured on greedy answers of a model of 1.5 billion weights (docs/history/decoding.md tells which).
"""

from collections.abc import Iterable, Sequence

from ..pipeline.rounds import Draft

FROM_SUCCESSORS = 32  # Draft.copied: this, and then the bucket of its chance
WEIGHT = 4.0  # verdicts that a prior counts as
DISCOUNT = 0.98  # what older ones of the same bucket keep at each
COUNTS = 8  # how often a successor was right, as far as it is counted
LENGTHS = (2, 1)  # tokens that are looked back at
BITS = 17  # 2^17 entries for each length
PRIORS = (
    *(0.18, 0.25, 0.35, 0.50, 0.60, 0.65, 0.75, 0.85),  # after two tokens, by count
    *(0.14, 0.19, 0.30, 0.38, 0.45, 0.50, 0.55, 0.60),  # after one
)
_WORD = (1 << 64) - 1


class Successors:
    """Of all answers of an engine."""

    def __init__(self) -> None:
        # By the first bits of a key: (last bits of the key, what follows, how sure).
        self._tables: list[dict[int, tuple[int, int, int]]] = [{} for _ in LENGTHS]
        self._chances = [(WEIGHT * prior, WEIGHT) for prior in PRIORS]  # accepted, judged

    def learn(self, tokens: Sequence[int], first: int) -> None:
        """`tokens` from position `first` on are new."""
        for end in range(first, len(tokens)):
            for table, length in zip(self._tables, LENGTHS, strict=True):
                if end >= length:
                    _count(table, _key(tokens[end - length : end]), tokens[end])

    def know(self, counted: Iterable[tuple[int, int, int, int]]) -> None:
        """Counted beforehand: (the token before the last, -1 for none; the last; what follows; how often)."""
        for before, last, following, times in counted:
            pair = before >= 0
            key = _key([before, last] if pair else [last])
            table, place = self._tables[0 if pair else 1], key >> (64 - BITS)
            if place not in table or table[place][2] <= times:
                table[place] = key & 0xFFFFFFFF, following, min(max(times, 0), COUNTS - 1)

    def propose(self, known: Sequence[int]) -> Draft | None:
        """What most likely follows `known`: committed text, then drafts."""
        best: Draft | None = None
        for order, (table, length) in enumerate(zip(self._tables, LENGTHS, strict=True)):
            if len(known) < length:
                continue
            key = _key(known[-length:])
            tag, following, count = table.get(key >> (64 - BITS), (-1, -1, 0))
            if tag != key & 0xFFFFFFFF:
                continue
            bucket = order * COUNTS + count
            accepted, judged = self._chances[bucket]
            if best is None or accepted / judged > best.confidence:
                best = Draft(following, accepted / judged, FROM_SUCCESSORS + bucket)
        return best

    def observe(self, judged: Sequence[Draft], accepted: int) -> None:
        """After a verdict: the first `accepted` of the judged draft tokens were right."""
        for place, draft in enumerate(judged):
            if draft.copied >= FROM_SUCCESSORS:
                good, all_ = self._chances[draft.copied - FROM_SUCCESSORS]
                self._chances[draft.copied - FROM_SUCCESSORS] = (
                    DISCOUNT * good + (place < accepted),
                    DISCOUNT * all_ + 1.0,
                )


def _count(table: dict[int, tuple[int, int, int]], key: int, following: int) -> None:
    """A successor that is right again becomes surer, one that is wrong half as sure; an unsure one is replaced."""
    tag, before, count = table.get(key >> (64 - BITS), (-1, -1, 0))
    if tag == key & 0xFFFFFFFF and before == following:
        count = min(count + 1, COUNTS - 1)
    elif count > 0:
        count //= 2
    else:
        tag, before = key & 0xFFFFFFFF, following
    table[key >> (64 - BITS)] = tag, before, count


def _key(tokens: Sequence[int]) -> int:
    total = 0
    for token in tokens:
        total = (total + token + 1) * 0x9E3779B97F4A7C15 & _WORD
        total ^= total >> 29
    return total
