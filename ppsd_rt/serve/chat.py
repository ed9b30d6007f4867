"""A chat: from messages to what the engine is asked; and /v1/chat/completions, where the assistant's message comes out.

The other protocols (responses.py, messages.py, ollama.py) make a `ChatRequest` of theirs and write the pieces of the
answer in their own way.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ..chat.reader import Blocks, Piece, Reader, Step, message_of
from ..chat.tools import Tools
from ..errors import UsageError
from ..generation import Committed, Completion
from ..pipeline.rounds import Logprob
from ..sampling.params import SamplingParams
from .answers import FINISH, Event
from .errors import from_engine, refused
from .requests import ChatRequest
from .service import Service
from .shape import LEAST_LOGPROB, OpenAIShape, Shape


class Chat:
    """What a request asks of the engine."""

    def __init__(self, service: Service, request: ChatRequest, raw: str | None = None) -> None:
        """raw: the prompt, in place of the messages. ApiError for what is not done here."""
        request.refuse()
        service.note(request)
        shown = [tool.function for tool in request.tools or () if tool.function is not None]
        self.request, functions = request, [one.model_dump(exclude_none=True) for one in shown]
        try:
            self.tools = Tools.of(functions, request.tool_choice, request.parallel_tool_calls)
        except UsageError as error:
            raise from_engine(error, {"tool_choice": "tool_choice"}) from error
        self._service, self._prompt, self._raw = service, service.prompt, raw
        self._inside = False

    async def encode(self) -> list[int]:
        """Token ids of the prompt."""
        if self._raw is not None:
            return await self._service.encode(self._raw, "prompt")
        request, settings = self.request, self._service.settings
        goes_on = request.continue_final_message or request.add_generation_prompt is False
        goes_on = goes_on or bool(request.messages[-1].prefix)

        variables, messages = request.template_variables, [message.for_prompt() for message in request.messages]

        def made() -> list[int]:
            text = self._prompt.text(messages, self.tools, variables, not goes_on, settings.plain_contents)
            self._service.check_length(text)
            self._inside = self._prompt.inside(text)
            return self._prompt.ids(text)

        return await self._service.encode(made, "messages", len(repr((messages, self.tools, variables))))

    def params(self) -> list[SamplingParams]:
        """Of each answer; `encode` comes first."""
        names = {"max_tokens": "max_completion_tokens" if self.request.max_completion_tokens else "max_tokens"}
        params = self._service.params(self.request, names, self._service.grammar(self.request))
        return [self._prompt.held(one, self.tools, self._inside) for one in params]

    def reader(self) -> Reader:
        return self._prompt.reader(self.tools, self._inside)

    def read(self, completion: Completion) -> list[Piece]:
        """All of an answer."""
        reader = self.reader()
        return [*reader.push(whole_text(completion, self.request)), *reader.end()]


def whole_text(completion: Completion, request: Any) -> str:
    """The stop string included, where the request asks for it."""
    return completion.text + ((completion.stop or "") if request.include_stop_str_in_output else "")


class ChatShape(OpenAIShape):
    prefix, object, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, chat: Chat) -> None:
        super().__init__(service, chat.request)
        self._chat, self._by_functions = chat, bool(chat.request.functions)
        self._readers = defaultdict[int, Reader](chat.reader)  # of each answer

    def choice(self, index: int, completion: Completion) -> tuple[dict[str, Any], str]:
        message = message_of(self._chat.read(completion)) | {"refusal": None}
        calls = message.get("tool_calls", ())
        if calls and self._by_functions:
            message["function_call"] = message.pop("tool_calls")[0]["function"]
        return {"message": message}, self._finish(completion, len(calls))

    def _finish(self, completion: Completion, calls: int) -> str:
        finish = FINISH[completion.finish_reason]
        if not calls or finish != "stop":
            return finish
        return "function_call" if self._by_functions else "tool_calls"

    def part(self, index: int, text: str, first: bool) -> dict[str, Any]:
        begun = {"role": "assistant", "content": ""} if first else {}
        return self._delta(index, self._readers[index].push(text), begun)

    def last(self, index: int, completion: Completion, first: bool) -> tuple[dict[str, Any], str]:
        reader = self._readers[index]
        extra = reader.push(completion.stop or "") if self._request.include_stop_str_in_output else []
        part = self._delta(index, [*extra, *reader.end()], {"role": "assistant"} if first else {})
        return part, self._finish(completion, reader.calls)

    def _delta(self, index: int, pieces: Sequence[Piece], delta: dict[str, Any]) -> dict[str, Any]:
        said = message_of(pieces)
        delta |= {name: said[name] for name in ("reasoning_content", "content") if said.get(name)}
        calls = said.get("tool_calls", [])
        if calls and self._by_functions:  # one at most
            delta["function_call"] = calls[0]["function"]
        elif calls:
            first = self._readers[index].calls - len(calls)
            delta["tool_calls"] = [{"index": first + number, **call} for number, call in enumerate(calls)]
        return {"delta": delta}

    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> dict[str, Any]:
        def one(id: int, logprob: float) -> dict[str, Any]:
            found = self._tokenizer.token_bytes(id)  # perhaps a part of a character, which becomes U+FFFD
            token = found.decode("utf-8", "replace")
            return {"token": token, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(found)}

        told = [{**one(id, said.logprob), "top_logprobs": [one(*top) for top in said.top]} for id, said in chosen]
        return {"content": told, "refusal": None}


class OneAnswerShape(Shape):
    """What protocols share that have one answer to a request. completion: once it has ended."""

    completion: Completion

    def __init__(self, service: Service, chat: Chat) -> None:
        self._model, self._chat, self._blocks = service.engine.name, chat, Blocks()
        self._reader: Reader | None = None

    def read(self, events: Sequence[Event]) -> Iterator[Step]:
        """What a stream's events say."""
        self._reader = reader = self._reader or self._chat.reader()
        for event in events:
            if isinstance(event, Committed):
                yield from self._blocks.add(reader.push("".join(token.text for token in event.tokens)))
            elif isinstance(event, Completion):
                self.completion = event
                yield from self._blocks.add(reader.end(), last=True)

    def read_whole(self) -> Iterator[Step]:
        """The same of an answer that has not been streamed."""
        (self.completion,) = self.answers.completions
        return self._blocks.add(self._chat.read(self.completion), last=True)


def as_chat(body: dict[str, Any]) -> ChatRequest:
    """What a request of another protocol has become. Errors name fields of a chat."""
    given = {name: value for name, value in body.items() if value is not None}
    try:
        made = ChatRequest.model_validate(given)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        raise RequestValidationError(found, body=given) from None
    for name, asked in (("n", made.n not in (None, 1)), ("logprobs", made.logprobs)):
        if asked:
            raise refused(name, "ask /v1/chat/completions for that")
    return made
