"""The page at /, and the script that renders Markdown in it; nothing comes from elsewhere."""

import base64
import hashlib
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response


@cache
def _page() -> tuple[bytes, str]:
    """The file, and a policy that lets its own script and style run and nothing else."""
    html = (files("ppsd_rt") / "serve" / "page.html").read_text(encoding="utf-8")
    rules = {
        "default-src": "'none'",
        "script-src": f"'self' {_hash(html, 'script')}",
        "style-src": _hash(html, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
    }
    return html.encode(), "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(html: str, element: str) -> str:
    text = html.partition(f"<{element}>")[2].partition(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@cache
def _markdown() -> bytes:
    return (files("ppsd_rt") / "serve" / "markdown-it.js").read_bytes()


async def markdown_response(request: Request) -> Response:
    return Response(_markdown(), media_type="text/javascript", headers={"X-Content-Type-Options": "nosniff"})


async def page_response(request: Request) -> Response:
    html, policy = _page()
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
    return Response(html, media_type="text/html", headers=headers)
