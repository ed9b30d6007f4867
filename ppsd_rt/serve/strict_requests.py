"""The door of every request's body: strict JSON."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from ..printable import printable
from ..strict_json import fault
from .errors import ApiError


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
