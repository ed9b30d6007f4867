"""Around every request: its id, its log and metrics; its key and host; a small body of strict JSON."""

import asyncio
import hmac
import json
from collections.abc import Callable, Coroutine, Set
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..printable import printable
from ..strict_json import fault
from .errors import ApiError, answer_error
from .service import Service
from .settings import Settings

KEY = "ppsd.key"  # key of the scope: the API key that a request has brought, or an empty text
_OPEN = ("/", "/markdown-it.js", "/health")  # the page asks for the key itself


class Guard:
    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the network leaves the body out
        request = Request(scope := _as_json(scope))
        try:
            scope[KEY] = self._key_of(request)
            body = _Body(receive, self._settings)
            body.check(int(request.headers.get("content-length", 0)))
            try:
                await self._app(scope, body.receive, send)
            finally:
                body.close()
        except ApiError as error:
            await (await answer_error(request, error))(scope, receive, send)
        return None

    def _key_of(self, request: Request) -> str:
        """By the path that is routed: that of `request.url` is made from what the client calls this host."""
        if not self._settings.keys:
            self._check_host(request)
        if not self._settings.keys or request.scope["path"] in _OPEN:
            return ""
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if "x-api-key" in request.headers:  # Anthropic's clients
            kind, given = "bearer", request.headers["x-api-key"]
        sent = given.strip().encode("latin-1")
        same = [key for key in self._settings.keys if hmac.compare_digest(sent, key.encode())]
        if kind.lower() != "bearer" or not same:
            message = "a wrong API key, or none: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return same[0]

    def _check_host(self, request: Request) -> None:
        """A page of another site could have its name lead here, and ask as if it were this server's (DNS rebinding)."""
        for given in request.headers.getlist("host"):
            if self._settings.host is not None and not _is_ours(given, self._settings.host):
                message = (
                    f"this server is not {given!r}: ask by its address, or start it with --host NAME or an API key"
                )
                raise ApiError(403, message, "wrong_host")


def _is_ours(given: str, host: str) -> bool:
    """given: of a Host header, the port with it."""
    try:
        name = (urlsplit(f"//{given}").hostname or "").rstrip(".")
        return name in (host.lower(), "localhost") or name.endswith(".localhost") or bool(ip_address(name))
    except ValueError:
        return False


def _as_json(scope: Scope) -> Scope:
    """A body is JSON whatever its type says, as curl sends it. Not from another site's page, which could send it
    without asking for leave then: browsers name their origin."""
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    if any(name == b"origin" for name, _ in headers):
        return scope
    return {**scope, "headers": [*headers, (b"content-type", b"application/json")]}


class _Body:
    """What the application receives. Until the body is whole the time-out counts; whoever waits then may wait on."""

    def __init__(self, receive: Receive, settings: Settings) -> None:
        self._receive, self._settings = receive, settings
        self._size, self._whole = 0, False
        self._timer: asyncio.Future[None] | None = None

    def check(self, size: int) -> None:
        if size > (most := self._settings.max_body):
            raise ApiError(413, f"the request is larger than the {most} bytes that this server takes (--max-body)")

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        self._timer = self._timer or asyncio.ensure_future(self._settings.sleep(self._settings.timeout))
        coming = asyncio.ensure_future(self._receive())
        both: set[asyncio.Future[Any]] = {coming, self._timer}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            coming.cancel()
        if not coming.done():
            raise ApiError(408, f"the body took longer than {self._settings.timeout:g} s (--timeout)", "timeout")
        message = coming.result()
        self._size += len(message.get("body", b""))
        self.check(self._size)
        self._whole = not message.get("more_body", False)
        if self._whole:
            self.close()
        return message

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


NOTED = "ppsd.noted"  # key of the scope: what the log says of the request besides
_PROBED = {"/health", "/metrics"}  # their lines would fill the log


class Observe:
    def __init__(self, app: ASGIApp, service: Service, paths: Set[str]) -> None:
        """paths: that metrics and log name; all others are one."""
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        clock, status = self._service.settings.clock, 0
        begin, id, noted = clock(), f"req-{uuid4().hex}", dict[str, object]()
        scope[NOTED] = noted

        async def heard(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, heard)
        finally:
            path, seconds = scope["path"] if scope["path"] in self._paths else "other", clock() - begin
            self._service.metrics.request(path, status, seconds)
            said = {"id": id, "method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 4)}
            if path not in _PROBED or status != 200:
                self._service.settings.log("request", **said, **noted)


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handle(_Request(request.scope, request.receive))

        return strict


class _Request(Request):
    async def json(self) -> Any:
        """JSONDecodeError for what is no JSON at all; ApiError, which names the field, for what is not strict."""
        try:
            value = json.loads(await self.body())
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:  # not UTF-8; numbers of thousands of digits; too deep to be read
            raise ApiError(400, f"the body is not JSON: {error}", "invalid_value") from None
        if (found := fault(value)) is not None:
            place, why = printable(found[0]), found[1]
            raise ApiError(400, f"Invalid value for '{place}': it {why}", "invalid_value", place)
        return value
