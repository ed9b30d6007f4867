"""The page at /, and the script that renders Markdown in it; nothing comes from elsewhere."""

import base64
import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response


def _hash(element: str) -> str:
    text = _PAGE.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_FOLDER = files("ppsd_rt") / "serve"
_PAGE, _MARKDOWN = (_FOLDER / "page.html").read_text(encoding="utf-8"), (_FOLDER / "markdown-it.js").read_bytes()
# Lets the page's own script and style run, and nothing else.
_POLICY = {
    "default-src": "'none'",
    "script-src": f"'self' {_hash('script')}",
    "style-src": _hash("style"),
    "connect-src": "'self'",
    "img-src": "data:",
    "frame-ancestors": "'none'",
    "base-uri": "'none'",
}
_NOSNIFF = {"X-Content-Type-Options": "nosniff"}
_HEADERS = {"Content-Security-Policy": "; ".join(map(" ".join, _POLICY.items())), "Cache-Control": "no-cache"}


async def markdown_response(request: Request) -> Response:
    return Response(_MARKDOWN, media_type="text/javascript", headers=_NOSNIFF)


async def page_response(request: Request) -> Response:
    return Response(_PAGE, media_type="text/html", headers=_HEADERS | _NOSNIFF)
