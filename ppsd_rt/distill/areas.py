"""Texts of similar length pass through a model together, so that little is padding."""

from collections.abc import Iterator, Sequence, Sized
from typing import Protocol


class Written(Protocol):
    @property
    def ids(self) -> Sized: ...


def in_areas(texts: Sequence[Written], batch: Sequence[int], area: int = 8192) -> Iterator[list[int]]:
    """The batch, indices of texts, in groups from the shortest text to the longest, of at most `area` tokens each,
    padding included."""
    group: list[int] = []
    for index in sorted(batch, key=lambda index: len(texts[index].ids)):
        if group and (len(group) + 1) * len(texts[index].ids) > area:
            yield group
            group = []
        group.append(index)
    if group:
        yield group
