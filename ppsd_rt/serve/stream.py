"""Streams: lines as rounds come, then the end."""

import asyncio
from collections.abc import Sequence
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .answers import Answers, Event
from .errors import ApiError
from .shape import Shape

_MOST_PLACES, _LONGEST_HEADER = 20, 2000


class EventStream(Response):
    """The response begins with the first token, so that what fails before it has a status of its own."""

    def __init__(self, answers: Answers, shape: Shape, noted: dict[str, object]) -> None:
        self.media_type = shape.media_type
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
                    self.headers.update(unheld_header(self._answers))
                    start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                    await send(start)
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        async def emit(index: int, events: Sequence[Event]) -> None:
            if lines := self._shape.lines(index, events):
                await write(lines)

        try:
            await self._answers.run(emit, receive, self._noted)
        except ApiError as error:
            if not started:
                raise
            last = self._shape.error(error)
            self._noted["error"] = error.detail
        else:
            last = self._shape.end(self._answers)
        await write(last, more=False)


def unheld_header(answers: Answers) -> dict[str, str]:
    """The places in the answer's schema at which something is not held; as far as they fit into a header."""
    places = [quote(one["place"], safe="/") for one in answers.unheld[:_MOST_PLACES]]
    return {"x-unheld": ", ".join(places)[:_LONGEST_HEADER]} if places else {}
