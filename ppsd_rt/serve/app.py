"""The paths of the server and what stands after each."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .. import __version__
from ..errors import PpsdError
from .answers import Answers, ParsedRequest
from .chat import Chat, ChatShape, as_chat
from .completions import CompletionShape
from .errors import ApiError, JsonReply, answer_error
from .guard import KEY, NOTED, Guard, Observe, StrictRoute
from .messages import MessagesRequest, MessagesShape
from .ollama import add_ollama
from .page import markdown_response, page_response
from .requests import ChatRequest, CompletionRequest, DetokenizeRequest, Generate, Json, TokenizeRequest
from .responses import ResponsesRequest, ResponsesShape, Store
from .service import Service
from .shape import EventStream, Shape, unheld_header

_ERRORS: dict[int | str, dict[str, Any]] = {kind: {"description": "an error"} for kind in ("4XX", "5XX")}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM: dict[str, Any] = {"content": {"text/event-stream": {"schema": _EVENT}}}


def make_app(service: Service) -> ASGIApp:
    """All of the server that is not the network."""
    settings, paths = service.settings, make_paths(service)
    app: ASGIApp = Guard(paths, settings)
    if settings.cors:  # before the guard: a browser asks for leave without a key
        headers = ["x-request-id", "retry-after"]
        app = CORSMiddleware(
            app,
            settings.cors,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[*headers, "x-unheld"],
            max_age=600,
        )
    return Observe(app, service, {route.path for route in paths.routes if isinstance(route, Route)})


def make_paths(service: Service) -> FastAPI:
    app = FastAPI(
        title="ppsd-rt",
        version=__version__,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
        default_response_class=JsonReply,
        responses=_ERRORS,
    )
    app.router.route_class = StrictRoute
    for kind in (RequestValidationError, HTTPException, PpsdError, Exception):
        app.add_exception_handler(kind, answer_error)

    @app.post("/v1/chat/completions", responses={200: _STREAM})
    async def chat(body: ChatRequest, request: Request) -> Response:
        service.check_model(body.model)
        chat = Chat(service, body)
        return await answer_chat(service, chat, request, ChatShape(service, chat))

    @app.post("/v1/completions", responses={200: _STREAM})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.check_model(body.model)
        return await _complete(service, body, request)

    store = Store()

    @app.post("/v1/responses", responses={200: _STREAM})
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        service.check_model(body.model)
        body.refuse()
        chat = Chat(service, as_chat(body.chat(store.messages(body.previous_response_id))))
        return await answer_chat(service, chat, request, ResponsesShape(service, body, chat, store))

    @app.get("/v1/responses/{id}")
    async def response(id: str) -> Json:
        return store.reply(id)

    @app.delete("/v1/responses/{id}")
    async def forget(id: str) -> Json:
        store.delete(id)
        return {"id": id, "object": "response", "deleted": True}

    @app.post("/v1/messages", responses={200: _STREAM})
    async def messages(body: MessagesRequest, request: Request) -> Response:
        service.check_model(body.model)
        chat = Chat(service, as_chat(body.chat()))
        return await answer_chat(service, chat, request, MessagesShape(service, chat))

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: MessagesRequest) -> Json:
        service.check_model(body.model)
        return {"input_tokens": len(await Chat(service, as_chat(body.chat())).encode())}

    add_ollama(app, service, answer_chat)

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [_model(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        service.check_model(name)
        return _model(service)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        service.check_model(body.model)
        return await _tokenize(service, body)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Json:
        service.check_model(body.model)
        service.check_count(len(body.tokens))
        decode = partial(service.engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return {"prompt": await service.aside(decode, len(body.tokens))}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> Json:
        return service.tokenizer_info()

    @app.get("/health")
    async def health() -> Response:
        admission = service.admission
        said = {
            "status": "stopping" if admission.stopping else "no engine" if admission.away else "ok",
            "model": service.engine.name,
            "waiting": admission.waiting,
            "running": admission.running,
            "acceptance_by_day": service.metrics.by_day(),
        }
        return JsonReply(said, 200 if said["status"] == "ok" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    app.add_route("/", page_response, include_in_schema=False)
    app.add_route("/markdown-it.js", markdown_response, include_in_schema=False)
    return app


async def answer_chat(service: Service, chat: Chat, request: Request, shape: Shape) -> Response:
    async def asked() -> ParsedRequest:
        return [await chat.encode()], chat.params()

    return await _answer(service, chat.request, request, shape, asked, 1)


async def _complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    body.refuse()
    service.note(body)

    async def asked() -> ParsedRequest:
        ids = [await service.encode(prompt, "prompt") for prompt in body.prompts]
        return ids, service.params(body, {}, service.grammar(body))

    shape, count = CompletionShape(service, body), len(body.prompts)
    return await _answer(service, body, request, shape, asked, count, body.echoes)


async def _answer(
    service: Service,
    body: Generate,
    request: Request,
    shape: Shape,
    asked: Callable[[], Awaitable[ParsedRequest]],
    prompts: int,
    echo: int | None = None,
) -> Response:
    shows_drafts = bool(body.return_tokens and body.stream)
    options = service.owners.options(request.scope[KEY], body.user, body.store is not False, shows_drafts)
    held_by = "tools" if getattr(body, "tools", None) else "response_format"
    shape.answers = answers = Answers(service, asked, prompts * (body.n or 1), options, echo, held_by)
    noted = request.scope[NOTED]
    if body.stream:
        return EventStream(answers, shape, noted)
    await answers.run(None, request.receive, noted)
    return JsonReply({**shape.whole(), **shape.unheld()}, headers=unheld_header(answers))


async def _tokenize(service: Service, body: TokenizeRequest) -> Response:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give a prompt, or messages: one of the two", "invalid_value", "prompt")
    if body.prompt is not None:
        encode = partial(service.engine.tokenizer.encode, add_special_tokens=body.add_special_tokens is not False)
        ids = await service.aside(partial(encode, body.prompt), len(body.prompt))
    else:
        ids = await Chat(service, as_chat({**(body.model_extra or {}), "messages": body.messages})).encode()

    def said() -> Response:
        tokenizer = service.engine.tokenizer
        reply = {"count": len(ids), "max_model_len": service.context, "tokens": ids}
        if body.return_token_strs:
            reply["token_strs"] = [tokenizer.id_to_token(id) or "" for id in ids]
        return JsonReply(reply)

    reply: Response = await service.aside(said, len(ids))  # millions of them take seconds
    return reply


def _model(service: Service) -> Json:
    """max_model_len: as vLLM has it, prompt and answer together."""
    said = {"id": service.engine.name, "object": "model", "created": service.created}
    return {**said, "owned_by": "ppsd-rt", "max_model_len": service.context}
