"""A small web service of your own with FastAPI: POST /ask streams an answer as plain text.

    pip install ".[serve]"
    python examples/web.py &
    curl -N -d "Why is the sky blue?" http://127.0.0.1:8001/ask

`ppsd-run serve` speaks OpenAI's API; this is for an interface of your own.
"""

import argparse
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse

from ppsd_rt import AsyncGeneration, Engine, SamplingParams, UsageError


def make_app(engine: Engine, params: SamplingParams) -> FastAPI:
    app = FastAPI()

    @app.post("/ask")
    async def ask(request: Request) -> Response:
        question = (await request.body()).decode()
        try:
            generation = engine.agenerate([{"role": "user", "content": question}], params)
        except UsageError as error:
            return PlainTextResponse(f"{error}\n", 400)
        return StreamingResponse(text_of(generation), media_type="text/plain; charset=utf-8")

    return app


async def text_of(generation: AsyncGeneration) -> AsyncIterator[str]:
    """A client that goes away cancels the stream, and with it the answer."""
    async with generation:
        async for token in generation:
            yield token.text


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--port", type=int, default=8001)
    args = parser.parse_args()
    with Engine.from_pretrained(args.model) as engine:
        uvicorn.run(make_app(engine, SamplingParams(max_tokens=512)), port=args.port)


if __name__ == "__main__":
    main()
