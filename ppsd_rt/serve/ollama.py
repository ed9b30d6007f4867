"""What Ollama's clients ask for: /api/chat, /api/generate, /api/tags, /api/ps, /api/show and /api/version."""

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from .. import __version__
from ..chat.reader import Block, Piece, message_of
from ..strict_json import written
from .answers import FINISH, Event
from .chat import Chat, OneAnswerShape, as_chat
from .errors import ApiError, JsonReply, refused
from .requests import Json, Lenient
from .service import Service

_VERSION = "0.13.0"  # whose paths these are like; VS Code, among others, takes none before 0.6.4

_STREAM: dict[str, Any] = {"content": {"application/x-ndjson": {"schema": {"type": "object"}}}}


_ELSEWHERE = ("messages", "tools", "response_format", "stream", "n")  # no options


class OllamaRequest(Lenient):
    """stream: unless it is false. think: false turns thinking off where the model's template can."""

    model: str | None = None
    messages: Annotated[list[Json], Field(fail_fast=True)] | None = None
    prompt: str | None = None
    system: str | None = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    format: str | Json | None = None
    options: Json | None = None
    think: bool | str | None = None
    stream: bool | None = None
    raw: bool | None = None

    def chat(self, generates: bool) -> Json:
        """A body for /v1/chat/completions."""
        messages = [_message(message) for message in self.messages or ()]
        if generates:
            first = [{"role": "system", "content": self.system}] if self.system else []
            messages = [*first, {"role": "user", "content": self.prompt}]
        options = self.options or {}
        most = options.get("num_predict")
        form: Json | None = None
        if isinstance(self.format, dict):
            strict = (self.model_extra or {}).get("strict")
            form = {"type": "json_schema", "json_schema": {"schema": self.format, "strict": strict}}
        elif self.format:
            form = {"type": {"json": "json_object"}.get(self.format, self.format)}
        return {
            **{name: value for name, value in options.items() if name not in ("num_predict", *_ELSEWHERE)},
            **(self.model_extra or {}),
            "max_tokens": None if isinstance(most, int) and most <= 0 else most,  # 0, -1 and -2: no limit
            "messages": messages,
            "tools": self.tools,
            "response_format": form,
            "stream": self.stream is not False,
            "enable_thinking": self.think if isinstance(self.think, bool) else None,
            "continue_final_message": not generates and messages[-1].get("role") == "assistant",
        }


def _message(message: Json) -> Json:
    """Ollama's calls have no ids."""
    others = {"name": message.get("tool_name"), "reasoning_content": message.get("thinking")}
    return {**{name: value for name, value in message.items() if name not in ("tool_name", "thinking")}, **others}


class OllamaShape(OneAnswerShape):
    media_type = "application/x-ndjson"

    def __init__(self, service: Service, chat: Chat, generates: bool) -> None:
        super().__init__(service, chat)
        self._clock, self._begun = service.settings.clock, service.settings.clock()
        self._generates = generates

    def whole(self) -> Json:
        return self._line([block for what, block, _ in self.read_whole() if what == "end"], done=True)

    def lines(self, index: int, events: Sequence[Event]) -> str:
        said = [Piece(block.kind, text) for _, block, text in self.read(events) if text and block.kind != "call"]
        return _dump(self._line(said)) if said else ""

    def end(self) -> str:
        calls = [block for block in self._blocks.all if block.kind == "call"]
        return _dump({**self._line(calls, done=True), **self.unheld()})

    def error(self, error: ApiError) -> str:
        return _dump(error.reply("/api/"))

    def _line(self, pieces: Sequence[Piece | Block], done: bool = False) -> Json:
        message = message_of(pieces)
        said: Json = {"thinking": message["reasoning_content"]} if "reasoning_content" in message else {}
        if self._generates:
            said["response"] = message["content"] or ""
        else:
            calls = [
                {"function": call["function"] | {"arguments": json.loads(call["function"]["arguments"])}}
                for call in message.get("tool_calls", ())
            ]
            said = {"role": "assistant", "content": message["content"] or "", **said}
            said = {"message": {**said, **({"tool_calls": calls} if calls else {})}}
        line = {**_head(self._model), **said, "done": done}
        if not done:
            return line
        usage, spent = self.answers.usage(), self.completion.statistics
        seconds = {"total": self._clock() - self._begun, "load": 0, "prompt_eval": spent.ttft_seconds}
        seconds["eval"] = spent.seconds - spent.ttft_seconds
        durations = {f"{name}_duration": int(one * 1e9) for name, one in seconds.items()}
        counts = {"prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"]}
        return {**line, "done_reason": FINISH[self.completion.finish_reason], **counts, **durations}


def _dump(line: Json) -> str:
    return written(line) + "\n"


def add_ollama(app: FastAPI, service: Service, answer: Any) -> None:
    """answer: `app.answer_chat`."""

    async def reply(body: OllamaRequest, request: Request, generates: bool) -> Response:
        service.check_model(body.model or None)
        if not (body.prompt if generates else body.messages):  # it asks to load the model
            said = {"response": ""} if generates else {"message": {"role": "assistant", "content": ""}}
            return JsonReply({**_head(service.engine.name), **said, "done": True, "done_reason": "load"})
        if body.raw and (body.system or not generates):
            raise refused("raw", "it goes with a prompt of /api/generate alone")
        chat = Chat(service, as_chat(body.chat(generates)), body.prompt if body.raw else None)
        return await answer(service, chat, request, OllamaShape(service, chat, generates))

    @app.post("/api/chat", responses={200: _STREAM})
    async def chat(body: OllamaRequest, request: Request) -> Response:
        return await reply(body, request, False)

    @app.post("/api/generate", responses={200: _STREAM})
    async def generate(body: OllamaRequest, request: Request) -> Response:
        return await reply(body, request, True)

    def model() -> Json:
        names = {"name": service.engine.name, "model": service.engine.name}
        return {**names, "size": _size(service), "digest": _digest(service), "details": _details(service)}

    @app.get("/api/tags")
    async def tags() -> Json:
        return {"models": [{**model(), "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat()}]}

    @app.get("/api/ps")
    async def loaded() -> Json:
        """It stays loaded: until the year 9999."""
        until = {"expires_at": datetime.max.replace(tzinfo=UTC).isoformat(), "size_vram": 0}
        return {"models": [{**model(), **until, "context_length": service.context}]}

    @app.post("/api/show")
    async def show(body: OllamaRequest) -> Json:
        service.check_model(body.model or (body.model_extra or {}).get("name"))
        template = service.engine.tokenizer.chat_template
        info = {
            "general.architecture": "llama",
            "general.basename": service.engine.name,
            "general.parameter_count": service.engine.checkpoint.parameters,
            "llama.context_length": service.context,
        }
        shown = {"modelfile": "", "parameters": "", "template": template.source if template else ""}
        return {**shown, "details": _details(service), "model_info": info, "capabilities": ["completion", "tools"]}

    @app.get("/api/version")
    async def version() -> Json:
        return {"version": _VERSION, "ppsd_rt": __version__}


def _head(name: str) -> Json:
    return {"model": name, "created_at": datetime.now(UTC).isoformat()}


def _size(service: Service) -> int:
    """Bytes of the weights' files."""
    folder = service.engine.checkpoint.folder
    return sum(file.stat().st_size for file in ([folder] if folder.is_file() else folder.glob("*.safetensors")))


def _digest(service: Service) -> str:
    """As long as Ollama's, and of the weights alone."""
    return hashlib.sha256(service.engine.checkpoint.hash.encode()).hexdigest()


def _details(service: Service) -> Json:
    checkpoint = service.engine.checkpoint
    count = checkpoint.parameters
    size = f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"
    form = "gguf" if checkpoint.gguf else "safetensors"
    said = {"format": form, "family": "llama", "families": ["llama"], "parameter_size": size}
    return {"parent_model": "", **said, "quantization_level": "/".join(checkpoint.stored_as)}
