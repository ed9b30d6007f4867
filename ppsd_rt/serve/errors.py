"""Errors of a request, and the forms in which clients expect them; every reply as strict JSON."""

import re
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ..errors import GrammarFailed, PpsdError, UsageError
from ..printable import printable, shortened
from ..strict_json import written

_LONGEST = 1000  # characters of a message
_MOST_ERRORS = 100  # of a request that are looked at
_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}


class JsonReply(JSONResponse):
    """Every reply that is JSON, errors among them."""

    def render(self, content: Any) -> bytes:
        return written(content).encode()


class ApiError(HTTPException):
    """What a request is answered with instead of a completion; `code` and `param` are for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, shortened(printable(message), _LONGEST), dict(headers or {}))
        self.code, self.param = code, param

    def reply(self, path: str = "") -> dict[str, Any]:
        """In the form that the clients of this path expect: Anthropic's, Ollama's, or else OpenAI's."""
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        if path.startswith("/v1/messages"):
            return {"type": "error", "error": {"type": kind, "message": self.detail}}
        if path.startswith("/api/"):
            return {"error": self.detail}
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def refused(name: str, why: str) -> ApiError:
    """Of a field that the client has set."""
    return ApiError(400, f"Unsupported parameter: '{name}': {why}", "unsupported_parameter", name)


def from_engine(error: PpsdError, fields: Mapping[str, str] | None = None) -> ApiError:
    """What the engine does not take is the client's to mend, other failures are the server's.

    fields: names that the client has for what the engine's message begins with.
    """
    if not isinstance(error, UsageError | GrammarFailed):
        return ApiError(500, str(error), "engine_error")
    first = str(error).partition(" ")[0].rstrip(":")
    return ApiError(400, str(error), error.code, (fields or {}).get(first))


async def answer_error(request: Request, error: Exception) -> Response:
    """The handler of every error of a request. The traceback of a bug goes to the log, and not to the client."""
    match error:
        case ApiError():
            known = error
        case RequestValidationError():
            known = _from_validation(error)
        case PpsdError():
            known = from_engine(error)
        case HTTPException():
            known = _from_framework(request, error)
        case _:
            known = ApiError(500, "the server has failed; its log says more", "internal_error")
    return JsonReply(known.reply(request.scope["path"]), known.status_code, known.headers)


def _from_framework(request: Request, error: HTTPException) -> ApiError:
    path = request.scope["path"]
    said = {
        404: f"there is no {request.method} {path}",
        405: f"{path} does not take {request.method}",
    }
    return ApiError(error.status_code, said.get(error.status_code, str(error.detail)), headers=error.headers)


def _from_validation(error: RequestValidationError) -> ApiError:
    """Of the field that comes first. A union has errors of each branch: the one whose type was right says most."""
    errors = error.errors()[:_MOST_ERRORS]
    path = _path(errors[0], error.body)
    same = [one for one in errors if _path(one, error.body).startswith(path)]
    first = max(same, key=lambda one: (not one["type"].endswith("_type"), len(_path(one, error.body))))
    kind, param = first["type"], _path(first, error.body)
    if kind == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']} (character {first['loc'][-1]})")
    if not param:
        return ApiError(400, "the body must be a JSON object, sent with the header Content-Type: application/json")
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'", "missing_required_parameter", param)
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    alike = [_message(one) for one in same if _path(one, error.body) == param and one["type"].endswith("_type")]
    message = " or ".join(dict.fromkeys(alike)) if code == "invalid_type" else _message(first)
    return ApiError(400, f"Invalid value for '{param}': {message.replace(' or should be', ' or')}", code, param)


def _message(error: Any) -> str:
    said = re.sub("^(Input|Value error,) ", "", error["msg"])
    bounds = [value for key, value in error.get("ctx", {}).items() if key in ("lt", "le", "gt", "ge")]
    return re.sub(r"\S+$", str(bounds[0]), said) if bounds else said  # pydantic rounds great numbers


def _path(error: Any, body: Any) -> str:
    """`messages[0].content` in what was sent; empty: the body itself is wrong. Steps that name a union's branch are
    left out."""
    path = ""
    for place, step in enumerate(error["loc"][1:], 2):
        missing = error["type"] == "missing" and place == len(error["loc"])
        if isinstance(step, int) and isinstance(body, list):
            path, body = f"{path}[{step}]", body[step]
        elif isinstance(body, dict) and (step in body or missing):
            path, body = f"{path}.{step}" if path else str(step), body.get(step)
    return shortened(printable(path), _LONGEST)
