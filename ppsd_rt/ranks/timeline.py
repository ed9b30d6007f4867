"""One timeline of all ranks: each station's spans on rank 0's clock, and how far off that may be.

Clocks of different hosts have nothing to do with each other. Rank 0 asks a rank what time it is there: the answer was
given after the question left and before it came back, so half the way there and back bounds the error, whatever the
two ways took (Cristian, Distributed Computing 3, 1989). Of several questions the one that came back soonest counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..trace import Span
from .links import Words

_NAMES = ("verify", "prompt", "dropped verify")  # what stations do, as numbers on the wire
_WORDS = 5  # of a span: name, rows, begin (int64, ns), length (ns, as float32)


@dataclass(frozen=True)
class ClockOffset:
    """What another clock shows more than rank 0's, and how far off that may be; nanoseconds."""

    offset: int
    error: int


def clock_offset(questions: Iterable[tuple[int, int, int]]) -> ClockOffset:
    """questions: (asked here, answered there, heard here), nanoseconds; at least one."""
    asked, answered, heard = min(questions, key=lambda question: question[2] - question[0])
    return ClockOffset(answered - (asked + heard) // 2, (heard - asked + 1) // 2)


def pack_spans(spans: Sequence[Span], most: int) -> list[Words]:
    """Messages of at most `most` words each; one at least."""
    each = most // _WORDS
    packed = np.zeros((len(spans), _WORDS), np.int32)
    for words, (name, _, rows, begin, end) in zip(packed, spans, strict=True):
        words[:2] = _NAMES.index(name), rows
        words[2:4].view(np.int64)[0] = round(1000 * begin)
        words[4:].view(np.float32)[0] = 1000 * (end - begin)
    return [packed[start : start + each].reshape(-1) for start in range(0, max(len(spans), 1), each)]


def unpack_spans(words: Words, track: int) -> list[Span]:
    """As `pack_spans` has packed them. Raises ValueError for what it cannot have."""
    if len(words) % _WORDS:
        raise ValueError("a message with a part of a span")
    spans: list[Span] = []
    for row in words.reshape(-1, _WORDS):
        name, rows = int(row[0]), int(row[1])
        if not 0 <= name < len(_NAMES) or rows < 0:
            raise ValueError("a span of nothing that stations do")
        begin, length = int(row[2:4].view(np.int64)[0]) / 1000, float(row[4:].view(np.float32)[0]) / 1000
        spans.append((_NAMES[name], track, rows, begin, begin + length))
    return spans


def on_one_clock(here: Sequence[Span], others: Sequence[tuple[ClockOffset, Sequence[Span]]]) -> list[Span]:
    """Spans of all ranks, from the first one on, in the order of their beginning. here: rank 0's."""
    spans = list(here)
    for clock, theirs in others:
        shift = clock.offset / 1000
        spans += [(name, track, rows, begin - shift, end - shift) for name, track, rows, begin, end in theirs]
    first = min((span[3] for span in spans), default=0.0)
    moved = [(name, track, rows, begin - first, end - first) for name, track, rows, begin, end in spans]
    return sorted(moved, key=lambda span: span[3])
