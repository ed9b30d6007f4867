"""Which sampled texts are trained on: none twice, and none that holds a prompt that heads are judged by."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..models.tokenizer import Tokenizer
from .shards import Text

RUN = 8  # so many ids in a row that stand in a judged prompt make a text a leak


class Deduplication:
    """Of all texts in order: leaves out doubles and leaks, and counts them.

    Ids count as equal whose texts differ in capitals or in the space around them alone.
    """

    def __init__(self, tokenizer: Tokenizer, prompts: Iterable[str]) -> None:
        self._same = _same_text(tokenizer)
        runs: dict[int, list[npt.NDArray[np.uint64]]] = {}  # by their length: a short prompt is a run itself
        for prompt in prompts:
            ids = self._same[tokenizer.encode(prompt, add_special_tokens=False)]
            if length := min(len(ids), RUN):
                runs.setdefault(length, []).append(runs_of(ids, length))
        self._judged = {length: np.unique(np.concatenate(found)) for length, found in runs.items()}
        self._seen: set[bytes] = set()
        self.doubles = self.leaks = 0

    def new(self, texts: Sequence[Text]) -> list[Text]:
        kept = []
        for text, leaks in zip(texts, self.leaking([text.ids.numpy() for text in texts]), strict=True):
            ids = text.ids.numpy().tobytes()
            if ids in self._seen:
                self.doubles += 1
            elif leaks:
                self.leaks += 1
            else:
                self._seen.add(ids)
                kept.append(text)
        return kept

    def leaking(self, texts: Sequence[npt.ArrayLike]) -> npt.NDArray[np.bool_]:
        """[texts]: which of these lists of ids hold a judged prompt, or RUN ids of one in a row."""
        leaks = np.zeros(len(texts), dtype=bool)
        if not texts:
            return leaks
        ends = np.cumsum([len(np.asarray(ids)) for ids in texts])
        ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in texts])
        known = ids < len(self._same)  # the model may write ids that the tokenizer does not have
        ids[known] = self._same[ids[known]]
        for length, judged in self._judged.items():
            found = np.isin(runs_of(ids, length), judged).nonzero()[0]
            of = np.searchsorted(ends, found, side="right")
            leaks[of[found + length <= ends[of]]] = True
        return leaks


def _same_text(tokenizer: Tokenizer) -> npt.NDArray[np.int64]:
    """[vocabulary]: for each id the first one whose text differs in capitals or the space around it alone."""
    first: dict[bytes, int] = {}
    texts = (tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size))
    return np.array([first.setdefault(text.strip().lower() or text, id) for id, text in enumerate(texts)], np.int64)


def runs_of(ids: npt.NDArray[Any], length: int) -> npt.NDArray[np.uint64]:
    """A hash of each `length` ids in a row."""
    count = max(len(ids) - length + 1, 0)
    hashes = np.zeros(count, np.uint64)
    for place in range(length):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[place : place + count].astype(np.uint64)  # wraps around
    return hashes
