"""What answers look like to a client, whole or as a stream; and what OpenAI's chat and text completions share."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any
from urllib.parse import quote
from uuid import uuid4

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..generation import Committed, Completion, Token
from ..models.tokenizer import Tokenizer
from ..pipeline.rounds import Drafted, Logprob
from ..strict_json import written
from .answers import Answers, Event
from .errors import ApiError
from .requests import Generate
from .service import Service

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


class Shape(ABC):
    """Of one request: a reply at the end, or the lines of a stream."""

    media_type = "text/event-stream"
    answers: Answers

    def unheld(self) -> dict[str, Any]:
        """A field that tells what is not held of the answer's schema, where there is such a thing."""
        return {"unheld": self.answers.unheld} if self.answers.unheld else {}

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """At the end."""

    @abstractmethod
    def lines(self, index: int, events: Sequence[Event]) -> str:
        """What a stream has for events of answer `index`: rounds that have come together have one chunk together."""

    @abstractmethod
    def end(self) -> str:
        """After all answers."""

    @abstractmethod
    def error(self, error: ApiError) -> str:
        """The end of a stream that has begun."""


class OpenAIShape(Shape):
    prefix: str
    object: str
    chunk: str  # what a part of a stream is called, which is an object, too

    def __init__(self, service: Service, request: Generate) -> None:
        self.id, self._created = f"{self.prefix}-{uuid4().hex}", int(service.settings.now())
        self._model, self._tokenizer = service.engine.name, service.engine.tokenizer
        self._request, self._with_tokens = request, bool(request.return_tokens)
        self._begun: set[int] = set()  # answers of which a chunk has been sent
        self._told = False  # has the first chunk been sent?

    @abstractmethod
    def choice(self, index: int, completion: Completion) -> tuple[dict[str, Any], str]:
        """What a whole reply has of an answer, and why it ended."""

    @abstractmethod
    def part(self, index: int, text: str, first: bool) -> dict[str, Any]:
        """What a chunk has for a piece of an answer."""

    @abstractmethod
    def last(self, index: int, completion: Completion, first: bool) -> tuple[dict[str, Any], str]:
        """What the last chunk of an answer has, and why it ended."""

    @abstractmethod
    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> dict[str, Any]:
        """What is reported of tokens of answer `index`, those of earlier chunks not among them."""

    def usage(self) -> dict[str, Any]:
        return self.answers.usage()

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, completion in enumerate(self.answers.completions):
            said, finish = self.choice(index, completion)
            chosen = list(zip(completion.ids, completion.logprobs, strict=True)) if completion.logprobs else None
            said["logprobs"] = chosen and self.logprobs(index, chosen)
            choices.append({"index": index, **said, "finish_reason": finish, "seed": completion.seed})
        return {**self._head(self.object), "choices": choices, "usage": self.usage()}

    def lines(self, index: int, events: Sequence[Event]) -> str:
        return "".join(map(data, self.chunks(index, events)))

    def end(self) -> str:
        usage = data({**self._head(self.chunk), "choices": [], "usage": self.usage()})
        return f"{usage if self._request.with_usage else ''}data: [DONE]\n\n"

    def error(self, error: ApiError) -> str:
        return f"{data(error.reply())}data: [DONE]\n\n"

    def chunks(self, index: int, events: Sequence[Event]) -> Iterator[dict[str, Any]]:
        for kind, run in groupby(events, type):
            if kind is Committed:
                tokens = [token for event in run if isinstance(event, Committed) for token in event.tokens]
                if (part := self._committed(index, tokens)) is not None:
                    yield self._chunk(index, part)
                continue
            for event in run:
                first = index not in self._begun
                if isinstance(event, Completion):
                    part, finish = self.last(index, event, first)
                    yield self._chunk(index, part | {"seed": event.seed}, finish)
                elif isinstance(event, Drafted):
                    self._begun.add(index)
                    ours = {"drafted": [{"position": event.position, "text": _text(self._tokenizer, event.token)}]}
                    yield self._chunk(index, self.part(index, "", first) | ours)

    def _committed(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """None: nothing that the client would see."""
        first = index not in self._begun
        self._begun.add(index)
        text = "".join(token.text for token in tokens)
        chosen = [(token.id, token.logprob) for token in tokens if token.logprob is not None]
        part = self.part(index, text, first)
        if not (first or chosen or self._with_tokens or any(part.values())):
            return None
        if chosen:
            part["logprobs"] = self.logprobs(index, chosen)
        if self._with_tokens:
            part["tokens"] = [_token(token) for token in tokens]
        return part

    def _chunk(self, index: int, part: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, **part, "finish_reason": finish}
        return {**self._head(self.chunk), **self._first(), "choices": [choice], **self._usage_so_far()}

    def _first(self) -> dict[str, Any]:
        """What only the first chunk of a stream has."""
        self._told, told = True, self._told
        return {} if told else self.unheld()

    def _usage_so_far(self) -> dict[str, Any]:
        if self._request.with_every_usage:
            return {"usage": self.usage()}
        return {"usage": None} if self._request.with_usage else {}

    def _head(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self._created, "model": self._model}


def data(value: dict[str, Any]) -> str:
    return f"data: {written(value)}\n\n"


def event_line(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\n{data(event)}"


def _token(token: Token) -> dict[str, Any]:
    return {"id": token.id, "position": token.position, "text": token.text, "origin": token.origin}


def _text(tokenizer: Tokenizer, id: int) -> str:
    """Of a draft token, which nobody has verified: a character that is not whole is left out."""
    return tokenizer.decode([id]).rstrip("\N{REPLACEMENT CHARACTER}")


_LONGEST_HEADER = 2000


class EventStream(Response):
    """The response begins with the first token, so that what fails before it has a status of its own."""

    def __init__(self, answers: Answers, shape: Shape, noted: dict[str, object]) -> None:
        self.media_type = shape.media_type
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answers, self._shape, self._noted = answers, shape, noted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, turn = False, asyncio.Lock()

        async def write(text: str, more: bool = True) -> None:
            nonlocal started
            async with turn:
                if not started:
                    started = True
                    self.headers.update(unheld_header(self._answers))
                    start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                    await send(start)
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async def emit(index: int, events: Sequence[Event]) -> None:
            if lines := self._shape.lines(index, events):
                await write(lines)

        try:
            await self._answers.run(emit, receive, self._noted)
        except ApiError as error:
            if not started:
                raise
            last = self._shape.error(error)
            self._noted["error"] = error.detail
        else:
            last = self._shape.end()
        await write(last, more=False)


def unheld_header(answers: Answers) -> dict[str, str]:
    """The places in the answer's schema at which something is not held; as far as they fit into a header."""
    places = [quote(one["place"], safe="/") for one in answers.unheld]
    return {"x-unheld": ", ".join(places)[:_LONGEST_HEADER]} if places else {}
