"""An answer as a row of blocks (a thought, a text, a call), as Anthropic's messages and OpenAI's responses have it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .reader import Piece


@dataclass
class Block:
    kind: Literal["thought", "said", "call"]
    index: int
    text: str = ""  # of a call: its arguments
    name: str = ""
    id: str = ""


Step = tuple[Literal["begin", "more", "end"], Block, str]  # more: with this text


class Blocks:
    """Of one answer."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def add(self, pieces: Iterable[Piece], last: bool) -> Iterator[Step]:
        """last: no more pieces come."""
        for piece in pieces:
            kind = "call" if piece.kind == "arguments" else piece.kind
            if piece.kind == "call" or not self._open or self.all[-1].kind != kind:
                yield from self._end()
                block = Block(kind, len(self.all), id=piece.id, name=piece.text if piece.kind == "call" else "")
                self.all.append(block)
                self._open = True
                yield "begin", block, ""
            if piece.kind != "call":
                self.all[-1].text += piece.text
                yield "more", self.all[-1], piece.text
        if last:
            yield from self._end()

    def _end(self) -> Iterator[Step]:
        """Of the block at hand."""
        if self._open:
            self._open = False
            yield "end", self.all[-1], ""
