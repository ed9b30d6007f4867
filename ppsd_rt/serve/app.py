"""The paths of the server and what stands after each."""

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from .. import __version__
from ..backend import RunOptions
from ..errors import PpsdError
from .answers import Answers
from .chat import ChatShape
from .completions import CompletionShape
from .errors import ApiError, ErrorReply, answer_bug, answer_error
from .guard import Guard
from .observe import NOTED, Observe
from .page import page_response
from .replies import ChatReply, CompletionReply, Health, Model, Models, TokenizeReply
from .requests import ChatRequest, CompletionRequest, TokenizeRequest
from .service import Service
from .shape import Shape
from .stream import EventStream

_ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorReply}, "5XX": {"model": ErrorReply}}
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM: dict[str, Any] = {"content": {"text/event-stream": {"schema": _EVENT}}}


def make_app(service: Service) -> ASGIApp:
    """All of the server that is not the network."""
    return Observe(Guard(make_paths(service), service.settings), service)


def make_paths(service: Service) -> FastAPI:
    app = FastAPI(
        title="ppsd-rt",
        version=__version__,
        docs_url=None,  # these pages would load scripts from elsewhere
        redoc_url=None,
        responses=_ERRORS,
    )
    for kind in (RequestValidationError, HTTPException, PpsdError):
        app.add_exception_handler(kind, answer_error)
    app.add_exception_handler(Exception, answer_bug)

    @app.post("/v1/chat/completions", responses={200: {"model": ChatReply, **_STREAM}})
    async def chat(body: ChatRequest, request: Request) -> Response:
        service.check_model(body.model)
        body.refuse()
        prompt = [message.for_template() for message in body.messages]
        names = {"max_tokens": "max_tokens" if body.max_tokens is not None else "max_completion_tokens"}
        return await _answer(service, body, request, ChatShape(service, body), [prompt], "messages", names)

    @app.post("/v1/completions", responses={200: {"model": CompletionReply, **_STREAM}})
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service.check_model(body.model)
        body.refuse()
        return await _answer(service, body, request, CompletionShape(service, body), body.prompts, "prompt", {})

    @app.get("/v1/models")
    async def models() -> Models:
        return Models(data=[_model(service)])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Model:
        service.check_model(name)
        return _model(service)

    @app.post("/tokenize", response_model_exclude_none=True)
    async def tokenize(body: TokenizeRequest) -> TokenizeReply:
        service.check_model(body.model)
        return await _tokenize(service, body)

    @app.get("/health", responses={503: {"model": Health}})
    async def health() -> Response:
        admission = service.admission
        said = Health(
            status="stopping" if admission.stopping else "ok",
            model=service.engine.name,
            waiting=admission.waiting,
            running=admission.running,
        )
        return JSONResponse(said.model_dump(), 503 if admission.stopping else 200)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    app.add_route("/", page_response, include_in_schema=False)
    return app


async def _answer(
    service: Service,
    body: ChatRequest | CompletionRequest,
    request: Request,
    shape: Shape,
    prompts: list[Any],
    param: str,
    names: dict[str, str],
) -> Response:
    ids = [await service.encode(prompt, param) for prompt in prompts]
    options = RunOptions(report_drafts=bool(body.return_tokens and body.stream))
    answers = Answers(service, ids, service.params(body, names), options)
    shape.prompts = answers.prompts
    noted = request.scope[NOTED]
    if body.stream:
        return EventStream(answers, shape, noted)
    await answers.run(None, request.receive, noted)
    return Response(shape.whole(answers).model_dump_json(), media_type="application/json")


async def _tokenize(service: Service, body: TokenizeRequest) -> TokenizeReply:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give a prompt, or messages: one of the two", "invalid_value", "prompt")
    prompt = body.prompt if body.messages is None else [message.for_template() for message in body.messages]
    assert prompt is not None
    ids = await service.tokenize(prompt, body.add_special_tokens is not False)
    tokenizer = service.engine.tokenizer
    strings = [tokenizer.id_to_token(id) or "" for id in ids] if body.return_token_strs else None
    return TokenizeReply(count=len(ids), max_model_len=service.context, tokens=ids, token_strs=strings)


def _model(service: Service) -> Model:
    return Model(id=service.engine.name, created=service.created, max_model_len=service.context)
