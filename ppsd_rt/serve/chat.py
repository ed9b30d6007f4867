"""A chat: from messages to what the engine is asked; and /v1/chat/completions, where the assistant's message comes out.

The other protocols (responses.py, messages.py, ollama.py) make a `ChatRequest` of theirs and write the pieces of the
answer in their own way.
"""

from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ..chat.reader import Piece, Reader, message_of
from ..chat.tools import Tools
from ..errors import UsageError
from ..generation import Completion
from ..pipeline.rounds import Logprob
from ..sampling.params import SamplingParams
from .answers import Answers
from .errors import from_engine, refused
from .logprobs import ChatLogprobs, chat_logprobs
from .replies import FINISH, ChatChoice, ChatFinish, ChatMessage, ChatReply
from .requests import ChatRequest
from .service import Service
from .shape import OpenAIShape, reported


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
    prefix, object = "chatcmpl", "chat.completion.chunk"

    def __init__(self, service: Service, chat: Chat) -> None:
        super().__init__(service, chat.request)
        self._chat, self._by_functions = chat, bool(chat.request.functions)
        self._readers: dict[int, Reader] = {}

    def whole(self, answers: Answers) -> ChatReply:
        choices = [self._choice(index, completion) for index, completion in enumerate(answers.completions)]
        return ChatReply(id=self.id, created=self._created, model=self._model, choices=choices, usage=answers.usage())

    def _choice(self, index: int, completion: Completion) -> ChatChoice:
        message = ChatMessage(**message_of(self._chat.read(completion)))
        finish = self._finish(completion, len(message.tool_calls or ()))
        if message.tool_calls and self._by_functions:
            message.function_call, message.tool_calls = message.tool_calls[0].function, None
        logprobs = self.logprobs(index, reported(completion)) if completion.logprobs else None
        return ChatChoice(index=index, message=message, logprobs=logprobs, finish_reason=finish, seed=completion.seed)

    def _finish(self, completion: Completion, calls: int) -> ChatFinish:
        finish = FINISH[completion.finish_reason]
        if not calls or finish != "stop":
            return finish
        return "function_call" if self._by_functions else "tool_calls"

    def part(self, index: int, text: str, first: bool) -> dict[str, Any]:
        return self._delta(index, self._reader(index).push(text), {"role": "assistant", "content": ""} if first else {})

    def last(self, index: int, completion: Completion, first: bool) -> tuple[dict[str, Any], str]:
        reader = self._reader(index)
        extra = reader.push(completion.stop or "") if self._request.include_stop_str_in_output else []
        part = self._delta(index, [*extra, *reader.end()], {"role": "assistant"} if first else {})
        return part, self._finish(completion, reader.calls)

    def _delta(self, index: int, pieces: Sequence[Piece], delta: dict[str, Any]) -> dict[str, Any]:
        calls: dict[int, dict[str, Any]] = {}
        number = self._reader(index).calls - sum(piece.kind == "call" for piece in pieces)
        for piece in pieces:
            if piece.kind == "call":
                function = {"name": piece.text, "arguments": ""}
                calls[number] = {"index": number, "id": piece.id, "type": "function", "function": function}
                number += 1
            elif piece.kind == "arguments":
                call = calls.setdefault(number - 1, {"index": number - 1, "function": {"arguments": ""}})
                call["function"]["arguments"] += piece.text
            else:
                key = "content" if piece.kind == "said" else "reasoning_content"
                delta[key] = delta.get(key, "") + piece.text
        if calls and self._by_functions:  # one at most
            delta["function_call"] = calls[0]["function"]
        elif calls:
            delta["tool_calls"] = list(calls.values())
        return {"delta": delta}

    def _reader(self, index: int) -> Reader:
        if index not in self._readers:
            self._readers[index] = self._chat.reader()
        return self._readers[index]

    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> ChatLogprobs:
        return chat_logprobs(self._tokenizer, chosen)


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
