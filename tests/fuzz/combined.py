"""Target: requests that combine all documented fields: does each get the same answer whatever it is asked beside?

Every request is sent to a server that speculates, whole and as a stream, at once with others, some of whose clients go
away. Its answers must be the one that a server gives that decodes plainly, whole and alone. Values come from the
documented ranges. Answers of 500, and those that do not end, are differences too.
"""

import asyncio
import json
import random
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import httpx2
from hypothesis import strategies as st
from serve_support import NAME, serving
from support import tiny_model, write_model

from ppsd_rt import Engine
from ppsd_rt.pipeline.schedule import parse_schedule

from .oracle import Fault
from .place import Place
from .schemas import SCHEMAS

Json = dict[str, Any]

SCHEDULES = ("auto", "eesd:length=3,stop_rule=fixed", "eesd:lookup=2", "elastic", "ppsd:lookahead=2")
_HANG = 300  # seconds: an answer that takes longer never ends
_REQUESTS, _BATCH = 10, 5
_WORDS = ("once upon a time", "a b c a b c a b", "Why is the sky blue?", "{", "né\n", "0123456789 01234")
_TOOL = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Bern"]}, "n": {"type": "integer"}},
    "required": ["city"],
}


class Requests:
    """Those of one seed."""

    def __init__(self, seed: object) -> None:
        self._random = random.Random(f"combined {seed}")

    def draw(self) -> tuple[str, Json]:
        draw = self._random
        chat = draw.random() < 0.7
        body: Json = {"seed": draw.randrange(-(2**63), 2**63), "max_tokens": draw.choice((1, 2, 7, 20, 40, 60))}
        if body["seed"] == -1:  # which is none
            body["seed"] = 0
        body |= self._some(
            0.3,
            temperature=lambda: draw.choice((0, 0, draw.uniform(0, 2), 2)),
            top_p=lambda: draw.uniform(0.01, 1),
            top_k=lambda: draw.choice((-1, 0, 1, 5, 100, 2**31 - 1)),
            min_p=lambda: draw.choice((0, draw.random(), 1)),
            repetition_penalty=lambda: draw.choice((0.01, 0.5, 1.1, 2, 100)),
            presence_penalty=lambda: draw.uniform(-2, 2),
            frequency_penalty=lambda: draw.uniform(-2, 2),
            logit_bias=lambda: {str(draw.randrange(260)): draw.uniform(-100, 100) for _ in range(draw.randrange(5))},
            n=lambda: draw.choice((1, 2, 3, 16)),
            stop=lambda: draw.choice(("a", " ", ["e", "\n"], "the", [" a", "}"])),
            stop_token_ids=lambda: [draw.randrange(257) for _ in range(2)],
            min_tokens=lambda: draw.randrange(12),
            ignore_eos=lambda: draw.random() < 0.5,
            include_stop_str_in_output=lambda: draw.random() < 0.5,
            skip_special_tokens=lambda: draw.random() < 0.5,
            return_tokens=lambda: True,
            user=lambda: "x",
        )
        if draw.random() < 0.45:
            body |= self._format()
            if draw.random() < 0.9:  # they do not go together
                body = {name: value for name, value in body.items() if name not in ("ignore_eos", "min_tokens")}
        if not chat:
            body |= {"prompt": self._prompt()} | self._some(
                0.3, logprobs=lambda: draw.randrange(6), echo=lambda: draw.random() < 0.5
            )
            return "/v1/completions", body
        body["messages"] = self._messages()
        if draw.random() < 0.3:
            body |= {"logprobs": True} | self._some(0.5, top_logprobs=lambda: draw.randrange(21))
        if draw.random() < 0.25:
            body |= self._tools()
        return "/v1/chat/completions", body | self._some(
            0.05, continue_final_message=lambda: True, add_generation_prompt=lambda: draw.random() < 0.5
        )

    def _some(self, share: float, **fields: Any) -> Json:
        return {name: make() for name, make in fields.items() if self._random.random() < share}

    def _prompt(self) -> Any:
        draw = self._random
        text = " ".join(draw.choices(_WORDS, k=draw.randrange(1, 5)))
        return draw.choice((text, [text, draw.choice(_WORDS)], [draw.randrange(250) for _ in range(9)]))

    def _messages(self) -> list[Json]:
        draw = self._random
        said = [{"role": "user", "content": " ".join(draw.choices(_WORDS, k=draw.randrange(1, 4)))}]
        if draw.random() < 0.2:
            said = [{"role": "system", "content": "Be brief."}, *said]
        if draw.random() < 0.2:
            said += [{"role": "assistant", "content": "Well,"}, {"role": "user", "content": "go on"}]
        return said

    def _format(self) -> Json:
        draw = self._random
        schema = draw.choice(SCHEMAS)
        strict = draw.choice(({}, {"strict": False}))
        return draw.choice((
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **strict}}},
            {"response_format": {"type": "json_object", "schema": schema, **strict}},
            {"guided_json": schema, **strict},
            {"response_format": {"type": "json_object"}},
            {"guided_regex": draw.choice(("[a-c]{3,9}", "(ab|c)+d", "([0-9]{2}-){2,4}x"))},
            {"guided_choice": ["red", "green", 'q"uote']},
            {"guided_grammar": 'start: ("a" | "b")+ NUM\nNUM: /[0-9]{1,3}/'},
            {"response_format": {"type": "text"}},
        )) | self._some(0.1, unbounded_json=lambda: True)  # fmt: skip

    def _tools(self) -> Json:
        draw = self._random
        root = draw.choice(SCHEMAS)
        look = {"properties": {"a": root}, "$defs": root.get("$defs", {}) if isinstance(root, dict) else {}}
        tools = [
            {"type": "function", "function": {"name": "weather", "parameters": _TOOL, "strict": draw.random() < 0.5}},
            {"type": "function", "function": {"name": "look", "parameters": look}},
        ]
        choice = draw.choice(("auto", "required", "none", {"type": "function", "function": {"name": "weather"}}))
        more = self._some(0.3, parallel_tool_calls=lambda: draw.random() < 0.5)
        return {"tools": tools[: draw.randrange(1, 3)], "tool_choice": choice, **more}


async def whole(client: httpx2.AsyncClient, path: str, body: Json) -> Json:
    reply = await client.post(path, json=body)
    found = reply.json()
    if reply.status_code != 200:
        return {"status": reply.status_code, "error": found["error"]["message"]}
    choices = [_choice(one.get("message") or one, one) for one in found["choices"]]
    return {"choices": choices, "usage": _usage(found["usage"]), "unheld": found.get("unheld")}


async def streamed(client: httpx2.AsyncClient, path: str, body: Json) -> Json:
    """The same of the pieces of a stream."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    reply = await client.post(path, json=body)
    if reply.status_code != 200:
        return {"status": reply.status_code, "error": reply.json()["error"]["message"]}
    lines = reply.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], f"the stream ends with {lines[-2:]}"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    if wrong := [chunk["error"]["message"] for chunk in chunks if "error" in chunk]:
        return {"status": 200, "error": wrong[0]}
    found: dict[int, tuple[Json, Json]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            message, choice = found.setdefault(piece["index"], ({}, {"logprobs": None}))
            _add(message, piece.get("delta", piece))
            if piece["logprobs"]:
                choice["logprobs"] = _joined(choice["logprobs"], piece["logprobs"])
            choice |= {name: piece[name] for name in ("finish_reason", "seed") if piece.get(name) is not None}
    choices = [_choice(*found[index]) for index in sorted(found)]
    return {"choices": choices, "usage": _usage(chunks[-1]["usage"]), "unheld": chunks[0].get("unheld")}


def _add(message: Json, delta: Json) -> None:
    for name in ("content", "text", "reasoning_content"):
        message[name] = message.get(name, "") + (delta.get(name) or "")
    calls = message.setdefault("tool_calls", [])
    for call in delta.get("tool_calls", ()):
        if call["index"] == len(calls):
            calls.append({"function": {"name": call["function"]["name"], "arguments": ""}})
        calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def _joined(before: Any, more: Any) -> Any:
    return {name: (before or {}).get(name, []) + (value or []) for name, value in more.items()}


def _choice(message: Json, choice: Json) -> Json:
    logprobs = choice.get("logprobs")
    return {
        **{name: message.get(name) or "" for name in ("content", "text", "reasoning_content")},
        "calls": [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or ()],
        "logprobs": {name: value for name, value in logprobs.items() if value} if logprobs else None,
        "finish_reason": choice["finish_reason"],
        "seed": choice.get("seed"),
    }


def _usage(usage: Json) -> list[int]:
    return [usage["prompt_tokens"], usage["completion_tokens"]]


async def gone(client: httpx2.AsyncClient, path: str, body: Json, after: int) -> None:
    """A client that leaves after some bytes."""
    read = 0
    async with client.stream("POST", path, json={**body, "stream": True}) as reply:
        async for piece in reply.aiter_bytes():
            read += len(piece)
            if read > after:
                return


async def compare(urls: list[str], plain: str, requests: int, seed: object) -> tuple[Counter[str], list[Json]]:
    draw, leave = Requests(seed), random.Random(f"leave {seed}")
    seen, wrong = Counter[str](), list[Json]()
    limits = httpx2.Limits(max_connections=64)
    async with AsyncExitStack() as stack:
        made = [httpx2.AsyncClient(base_url=url, timeout=_HANG, limits=limits) for url in (*urls, plain)]
        *clients, reference = [await stack.enter_async_context(one) for one in made]
        for start in range(0, requests, _BATCH):
            client = clients[start // _BATCH % len(clients)]
            asked = [draw.draw() for _ in range(min(_BATCH, requests - start))]
            work = [run(client, *one) for one in asked for run in (whole, streamed)]
            work += [gone(client, *one, leave.randrange(2000)) for one in leave.sample(asked, 1)]
            answers = await asyncio.gather(*work, return_exceptions=True)
            for number, (path, body) in enumerate(asked):
                expected = await asyncio.gather(whole(reference, path, body), return_exceptions=True)
                found = [expected[0], *answers[2 * number : 2 * number + 2]]
                seen[_kind(found[0])] += 1
                if any(isinstance(one, BaseException) or one != found[0] for one in found) or _failed(found[0]):
                    names = ("plain, alone", "whole", "stream")
                    wrong.append({"path": path, "body": body, **dict(zip(names, map(_shown, found), strict=True))})
    return seen, wrong


def _kind(found: Any) -> str:
    """Of what the reference says: an answer, or a refusal by its beginning."""
    return f"{found['status']} {found['error'][:40]}" if isinstance(found, dict) and "status" in found else "answers"


def _failed(found: Json) -> bool:
    return found.get("status", 200) >= 500


def _shown(found: Any) -> Any:
    return repr(found) if isinstance(found, BaseException) else found


def requests(place: Place, seed: int) -> str:
    folder = place.cache / "served"
    if not folder.exists():
        write_model(folder, tiny_model(3), max_position_embeddings=2048)

    def engine() -> Engine:
        made = Engine.from_pretrained(folder, dtype="float32", threads=1, exit_head="norm:2")
        made.name = NAME
        return made

    with ExitStack() as stack:
        one, other = engine(), engine()
        quiet = {"log": lambda *_, **__: None}
        urls = [stack.enter_context(serving(one, schedule=parse_schedule(name), **quiet)).url for name in SCHEDULES]
        plain = stack.enter_context(serving(other, schedule=parse_schedule("plain"), **quiet)).url
        seen, wrong = asyncio.run(compare(urls, plain, _REQUESTS, seed))
    if wrong or seen["answers"] < _REQUESTS / 4:
        raise Fault(f"{seen}; {json.dumps(wrong[:1])[:4000]}")
    return f"{seen['answers']} answers"


TARGETS = {"requests": (lambda place: st.integers(0, 2**62), requests)}
