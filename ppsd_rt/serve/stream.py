"""Server-sent events: chunks of JSON as rounds come, then [DONE]."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answers import Answers, Event
from .errors import ApiError
from .shape import Shape

Chunk = dict[str, Any]


class EventStream(Response):
    """The response begins with the first token, so that what fails before it has a status of its own."""

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, shape: Shape, noted: dict[str, object]) -> None:
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
                    start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                    await send(start)
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async def emit(index: int, events: Sequence[Event]) -> None:
            if lines := "".join(map(_line, self._shape.chunks(index, events))):
                await write(lines)

        last = ""
        try:
            await self._answers.run(emit, receive, self._noted)
        except ApiError as error:
            if not started:
                raise
            last = _line(error.reply().model_dump())
            self._noted["error"] = error.detail
        else:
            if self._shape.with_usage:
                last = _line(self._shape.usage_chunk(self._answers.usage()))
        await write(f"{last}data: [DONE]\n\n", more=False)


def _line(value: Chunk) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"
