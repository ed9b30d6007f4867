"""Around every request: its id, one line in the log, and its share of the metrics."""

from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .service import Service

NOTED = "ppsd.noted"  # key of the scope: what the log says of the request besides
_PATHS = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health", "/metrics", "/"}
_PATHS |= {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/detokenize"}


class Observe:
    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

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
            path, seconds = scope["path"] if scope["path"] in _PATHS else "other", clock() - begin
            self._service.metrics.request(path, status, seconds)
            said = {"id": id, "method": scope["method"], "path": path, "status": status, "seconds": round(seconds, 4)}
            self._service.settings.log("request", **said, **noted)
