"""What usually follows in a model's own text, counted: it drafts before any head is trained, and beside one.

The table goes into the head's file; an engine begins with it and goes on counting (csrc/core/ngrams.h).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .shards import Text

SUREST = 7  # the most that the index tells apart, csrc/core/ngrams.h
MOST = 1 << 16  # rows of the table: a megabyte
BITS = 21  # of an id, so that three fit one number: the largest vocabularies have 2^18
LEAST = 2  # times that what follows must have come up


def count_successors(texts: Sequence[Text]) -> npt.NDArray[np.int32]:
    """int32 [rows, 4]: the token before the last (-1: any), the last, what followed most often, and how sure it is.

    Sure: from 0 to SUREST, the share of the times that it followed. The most frequent ones are kept.
    """
    ids = np.concatenate([text.ids.numpy() for text in texts] or [np.zeros(0, np.int64)])
    of = np.repeat(np.arange(len(texts)), [len(text.ids) for text in texts])
    pairs = ((ids[:-1] << BITS) + ids[1:])[of[:-1] == of[1:]]
    triples = (((ids[:-2] + 1 << BITS) + ids[1:-1] << BITS) + ids[2:])[of[:-2] == of[2:]]
    found, counts = np.unique(np.concatenate([pairs, triples]), return_counts=True)
    keys, following = found >> BITS, found & (1 << BITS) - 1
    order = np.lexsort((following, counts, keys))  # the last one of each key follows it most often
    begins = np.flatnonzero(np.diff(keys, prepend=-1))
    best = order[np.append(begins[1:], len(keys)) - 1] if len(keys) else order
    total = np.add.reduceat(counts, begins) if len(keys) else counts
    often = np.lexsort((keys[best], -counts[best]))
    often = often[counts[best][often] >= LEAST][:MOST]
    best, total = best[often], total[often]
    sure = np.clip(np.rint((SUREST + 1) * counts[best] / total) - 1, 0, SUREST)
    rows = ((keys[best] >> BITS) - 1, keys[best] & (1 << BITS) - 1, following[best], sure)
    return np.stack(rows, axis=1).astype(np.int32)


def foreseen(counted: npt.NDArray[Any], texts: Sequence[Text]) -> float | None:
    """Share of the tokens of these texts' answers that the table foresees; None: there are none."""
    follows = {(before, last): token for before, last, token, _ in counted.tolist()}
    right = judged = 0
    for text in texts:
        ids = [-1, -1, *text.ids.tolist()]
        for before, last, token in zip(
            ids[text.answer :], ids[text.answer + 1 :], ids[text.answer + 2 :], strict=False
        ):
            right += follows.get((before, last), follows.get((-1, last))) == token
            judged += 1
    return right / judged if judged else None
