"""What answers look like to a client: the part that chat and text completions share."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from ..generation import Committed, Completion, Token
from ..models.tokenizer import Tokenizer
from ..pipeline.rounds import Drafted, Logprob
from .answers import Answers, Event
from .replies import FINISH, ChatReply, CompletionReply, Usage
from .requests import Generate
from .service import Service


class Shape(ABC):
    """Of one request."""

    prefix: str
    object: str

    def __init__(self, service: Service, request: Generate) -> None:
        self.id, self._created = f"{self.prefix}-{uuid4().hex}", int(service.settings.now())
        self._model, self._tokenizer = service.engine.name, service.engine.tokenizer
        self.with_usage, self._with_tokens = request.with_usage, bool(request.return_tokens)
        self.prompts: Sequence[Sequence[int]] = ()  # of each answer: what it goes on from
        self._begun: set[int] = set()  # answers of which a chunk has been sent

    @abstractmethod
    def whole(self, answers: Answers) -> ChatReply | CompletionReply:
        """At the end."""

    @abstractmethod
    def part(self, text: str | None, first: bool) -> dict[str, Any]:
        """What a chunk has for a piece of an answer; None: nothing more comes."""

    @abstractmethod
    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> BaseModel:
        """What is reported of tokens of answer `index`, those of earlier chunks not among them."""

    def chunks(self, index: int, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        """What a stream has for events of answer `index`: rounds that have come together have one chunk together."""
        for kind, run in groupby(events, type):
            if kind is Committed:
                tokens = [token for event in run if isinstance(event, Committed) for token in event.tokens]
                if (part := self._committed(index, tokens)) is not None:
                    yield self._chunk(index, part)
                continue
            for event in run:
                first = index not in self._begun
                if isinstance(event, Completion):
                    part = self.part(None, first) | {"seed": event.seed}
                    yield self._chunk(index, part, FINISH[event.finish_reason])
                elif isinstance(event, Drafted):
                    self._begun.add(index)
                    ours = {"drafted": [{"position": event.position, "text": _text(self._tokenizer, event.token)}]}
                    yield self._chunk(index, self.part("", first) | ours)

    def _committed(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """None: nothing that the client would see."""
        first = index not in self._begun
        self._begun.add(index)
        text = "".join(token.text for token in tokens)
        chosen = [(token.id, token.logprob) for token in tokens if token.logprob is not None]
        if not (text or first or chosen or self._with_tokens):
            return None
        part = self.part(text, first)
        if chosen:
            part["logprobs"] = self.logprobs(index, chosen).model_dump()
        if self._with_tokens:
            part["tokens"] = [_token(token) for token in tokens]
        return part

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        return {**self._head(), "choices": [], "usage": usage.model_dump()}

    def _chunk(self, index: int, part: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **part, "finish_reason": finish}
        return {**self._head(), "choices": [choice], **({"usage": None} if self.with_usage else {})}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": self.object, "created": self._created, "model": self._model}


def reported(completion: Completion) -> list[tuple[int, Logprob]]:
    return list(zip(completion.ids, completion.logprobs, strict=True))


def _token(token: Token) -> dict[str, Any]:
    return {"id": token.id, "position": token.position, "text": token.text, "origin": token.origin}


def _text(tokenizer: Tokenizer, id: int) -> str:
    """Of a draft token, which nobody has verified: a character that is not whole is left out."""
    return tokenizer.decode([id]).rstrip("\N{REPLACEMENT CHARACTER}")
