"""What usually follows in a model's own text, counted: it drafts before any head is trained, and beside one.

The table goes into the head's file; an engine begins with it and goes on counting (reference/ngrams.py).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..reference.ngrams import MOST as SUREST
from ..reference.ngrams import Ngrams
from .shards import Text

MOST = 1 << 16  # rows of the table: a megabyte
LEAST = 2  # times that what follows must have come up


def count_successors(texts: Iterable[Text]) -> npt.NDArray[np.int32]:
    """int32 [rows, 4]: the token before the last (-1: any), the last, what followed most often, and how sure it is.

    Sure: from 0 to SUREST, the share of the times that it followed. The most frequent ones are kept.
    """
    pairs: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        ids = text.ids.tolist()
        pairs.update((-1, last, following) for last, following in pairwise(ids))
        pairs.update(zip(ids, ids[1:], ids[2:], strict=False))
    total: Counter[tuple[int, ...]] = Counter()
    best: dict[tuple[int, ...], tuple[int, int]] = {}
    for (*before, following), count in pairs.items():
        key = tuple(before)
        total[key] += count
        best[key] = max(best.get(key, (0, 0)), (count, following))
    often = sorted((-count, key, following) for key, (count, following) in best.items() if count >= LEAST)
    rows = [(*key, following, _sure(-count / total[key])) for count, key, following in often[:MOST]]
    return np.array(rows, dtype=np.int32).reshape(-1, 4)


def _sure(share: float) -> int:
    return min(max(round((SUREST + 1) * share) - 1, 0), SUREST)


def foreseen(counted: npt.NDArray[Any], texts: Sequence[Text]) -> float | None:
    """Share of the tokens of these texts' answers that the table foresees; None: there are none."""
    table = Ngrams()
    table.know(counted.tolist())
    nobody = table.begin()
    right = judged = 0
    for text in texts:
        ids = text.ids.tolist()
        for place in range(text.answer, len(ids)):
            draft = table.propose(ids[:place][-2:], nobody, 0, True)
            right += draft is not None and draft.token == ids[place]
            judged += 1
    return right / judged if judged else None
