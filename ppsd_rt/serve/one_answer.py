"""What protocols share that have one answer to a request: its reader, and what it is as a row of blocks."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..generation import Committed, Completion
from .answers import Event
from .chat import Chat
from .reader import Piece, Reader
from .service import Service
from .shape import Shape


class OneAnswerShape(Shape):
    """completion: once the answer has ended."""

    completion: Completion

    def __init__(self, service: Service, chat: Chat) -> None:
        self._model, self._chat = service.engine.name, chat
        self._reader: Reader | None = None

    def read(self, events: Sequence[Event]) -> tuple[list[Piece], bool]:
        """What a stream's events say; and has the answer ended?"""
        self._reader = reader = self._reader or self._chat.reader()
        pieces: list[Piece] = []
        ended = False
        for event in events:
            if isinstance(event, Committed):
                pieces += reader.push("".join(token.text for token in event.tokens))
            elif isinstance(event, Completion):
                pieces += reader.end()
                self.completion, ended = event, True
        return pieces, ended

    def read_whole(self, completion: Completion) -> tuple[list[Piece], bool]:
        """The same of an answer that has not been streamed."""
        self.completion = completion
        return self._chat.read(completion), True


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
