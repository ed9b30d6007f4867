"""Which sampled texts are trained on: none twice, and none that holds a prompt that heads are judged by."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ..models.tokenizer import Tokenizer
from .shards import Text

WORDS = 6  # so many words in a row that stand in a prompt make a text a leak


def runs_of_words(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of WORDS words, in lower case; the whole text where it is shorter."""
    words = re.findall(r"\w+", text.lower())
    for start in range(max(1, len(words) - WORDS + 1)):
        yield tuple(words[start : start + WORDS])


class Deduplication:
    """Of all texts in order: leaves out doubles and leaks, and counts them."""

    def __init__(self, tokenizer: Tokenizer, prompts: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._runs = {run for prompt in prompts for run in runs_of_words(prompt)}
        self._lengths = {len(run) for run in self._runs}
        self._seen: set[tuple[int, ...]] = set()
        self.doubles = self.leaks = 0

    def new(self, texts: Sequence[Text]) -> list[Text]:
        kept = []
        for text in texts:
            ids = tuple(text.ids.tolist())
            if ids in self._seen:
                self.doubles += 1
            elif self._leaks(self._tokenizer.decode(ids)):
                self.leaks += 1
            else:
                self._seen.add(ids)
                kept.append(text)
        return kept

    def _leaks(self, text: str) -> bool:
        words = re.findall(r"\w+", text.lower())
        return any(
            tuple(words[start : start + length]) in self._runs
            for length in self._lengths
            for start in range(len(words) - length + 1)
        )
