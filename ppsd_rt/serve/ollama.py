"""What Ollama's clients ask for: /api/chat, /api/generate, /api/tags, /api/show and /api/version."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from .answers import Answers, Event
from .chat import Chat, as_chat, message_of
from .errors import ApiError
from .one_answer import OneAnswerShape
from .reader import Piece
from .replies import FINISH
from .requests import Json, Lenient
from .service import Service

# Of `options`; others have no effect.
_OPTIONS = {"num_predict", "repeat_penalty", "stop", "temperature", "top_p", "top_k", "min_p", "seed"}
_OPTIONS |= {"presence_penalty", "frequency_penalty", "typical_p", "mirostat"}

_STREAM: dict[str, Any] = {"content": {"application/x-ndjson": {"schema": {"type": "object"}}}}


class OllamaRequest(Lenient):
    """stream: unless it is false. think: false turns thinking off where the model's template can."""

    model: str | None = None
    messages: list[Json] | None = None
    prompt: str | None = None
    system: str | None = None
    tools: list[Json] | None = None
    format: str | Json | None = None
    options: Json | None = None
    think: bool | str | None = None
    stream: bool | None = None

    def chat(self) -> Json:
        """A body for /v1/chat/completions."""
        messages = [_message(message) for message in self.messages or ()]
        if self.prompt is not None:
            first = [{"role": "system", "content": self.system}] if self.system else []
            messages = [*first, {"role": "user", "content": self.prompt}]
        given = {name: value for name, value in (self.options or {}).items() if name in _OPTIONS}
        most = given.pop("num_predict", None)
        form: Json | None = None
        if isinstance(self.format, dict):
            strict = (self.model_extra or {}).get("strict")
            form = {"type": "json_schema", "json_schema": {"schema": self.format, "strict": strict}}
        elif self.format:
            form = {"type": "json_object"}
        return {
            **given,
            "max_tokens": None if isinstance(most, int) and most < 0 else most,  # -1 and -2: no limit
            "messages": messages,
            "tools": self.tools,
            "response_format": form,
            "stream": self.stream is not False,
            "enable_thinking": self.think if isinstance(self.think, bool) else None,
        }


def _message(message: Json) -> Json:
    """Ollama's calls have no ids."""
    calls = message.get("tool_calls")
    if message.get("images"):
        raise ApiError(400, "this server reads text, and no images", "unsupported_parameter", "images")
    shown = {"role": message.get("role"), "content": message.get("content"), "name": message.get("tool_name")}
    return {**shown, "tool_calls": calls, "reasoning_content": message.get("thinking")}


class OllamaShape(OneAnswerShape):
    media_type = "application/x-ndjson"

    def __init__(self, service: Service, chat: Chat, generates: bool) -> None:
        super().__init__(service, chat)
        self._clock, self._begun = service.settings.clock, service.settings.clock()
        self._generates, self._calls = generates, list[Piece]()

    def whole(self, answers: Answers) -> Json:
        pieces, _ = self.read_whole(answers.completions[0])
        return self._line(pieces, answers)

    def lines(self, index: int, events: Sequence[Event]) -> str:
        pieces, _ = self.read(events)
        self._calls += [piece for piece in pieces if piece.kind in ("call", "arguments")]  # go out whole, at the end
        said = [piece for piece in pieces if piece.kind in ("said", "thought")]
        return _dump(self._line(said, None)) if said else ""

    def end(self, answers: Answers) -> str:
        return _dump({**self._line(self._calls, answers), **self.unheld()})

    def error(self, error: ApiError) -> str:
        return _dump({"error": error.detail})

    def _line(self, pieces: Sequence[Piece], ended: Answers | None) -> Json:
        message = message_of(pieces)
        said: Json = {"thinking": message.reasoning_content} if message.reasoning_content else {}
        if self._generates:
            said["response"] = message.content or ""
        else:
            calls = [
                {"function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
                for call in message.tool_calls or ()
            ]
            said = {"role": "assistant", "content": message.content or "", **said}
            said = {"message": {**said, **({"tool_calls": calls} if calls else {})}}
        line = {"model": self._model, "created_at": datetime.now(UTC).isoformat(), **said, "done": ended is not None}
        if ended is None:
            return line
        usage, spent = ended.usage(), int((self._clock() - self._begun) * 1e9)
        durations = {"total_duration": spent, "load_duration": 0, "prompt_eval_duration": 0, "eval_duration": spent}
        counts = {"prompt_eval_count": usage.prompt_tokens, "eval_count": usage.completion_tokens}
        return {**line, "done_reason": FINISH[self.completion.finish_reason], **counts, **durations}


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # cut off by num_predict
        return {}


def _dump(line: Json) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"


def add_ollama(app: FastAPI, service: Service, answer: Any) -> None:
    """answer: `app.answer_chat`."""

    def checked(name: str | None) -> None:
        service.check_model((name or "").removesuffix(":latest") or None)

    async def reply(body: OllamaRequest, request: Request, generates: bool) -> Response:
        checked(body.model)
        chat = Chat(service, as_chat(body.chat()))
        return await answer(service, chat, request, OllamaShape(service, chat, generates))

    @app.post("/api/chat", responses={200: _STREAM})
    async def chat(body: OllamaRequest, request: Request) -> Response:
        return await reply(body, request, False)

    @app.post("/api/generate", responses={200: _STREAM})
    async def generate(body: OllamaRequest, request: Request) -> Response:
        return await reply(body, request, True)

    @app.get("/api/tags")
    async def tags() -> Json:
        modified = datetime.fromtimestamp(service.created, UTC).isoformat()
        names = {"name": service.engine.name, "model": service.engine.name}
        return {"models": [{**names, "modified_at": modified, "size": 0, "digest": "", "details": _details(service)}]}

    @app.post("/api/show")
    async def show(body: OllamaRequest) -> Json:
        checked(body.model or (body.model_extra or {}).get("name"))
        template = service.engine.tokenizer.chat_template
        info = {"general.architecture": "llama", "llama.context_length": service.context}
        shown = {"modelfile": "", "parameters": "", "template": template.source if template else ""}
        return {**shown, "details": _details(service), "model_info": info, "capabilities": ["completion", "tools"]}

    @app.get("/api/version")
    async def version() -> Json:
        return {"version": __version__}


def _details(service: Service) -> Json:
    said = {"format": "safetensors", "family": "llama", "families": ["llama"], "parameter_size": ""}
    return {"parent_model": "", **said, "quantization_level": service.engine.backend.dtype}
