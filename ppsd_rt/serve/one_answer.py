"""What protocols share that have one answer to a request."""

from collections.abc import Sequence

from ..chat.reader import Piece, Reader
from ..generation import Committed, Completion
from .answers import Event
from .chat import Chat
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
