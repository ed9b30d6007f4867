"""A server under mixed load for a long time: does its memory stay flat, does every request end, is every answer right?

    python benchmarks/soak.py                              # half an hour, twelve clients
    python benchmarks/soak.py --minutes 2 --clients 4

Clients send requests of every kind to a `ppsd-run serve`: chats and completions, streamed and whole, greedy and
sampled, one answer and several, JSON by a schema, calls of tools, grammars that are new or hopeless, prompts of all
lengths, refused ones. Some go away in the middle. The memory for KV caches is small, so that answers wait and lose
their places. A request that is sent again must get the text that it got before, whatever else the server does then.
Before, the cache of compiled grammars is filled: it takes 75 kB for each of the last 256, for half an hour otherwise.

The exit status is 1 if a request is lost, waits longer than --patience, gets another text than before, or leaves an
answer running, or if the server's memory grows by more than 2 % from the second third of the time to the last.
The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import random
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import httpx2
from serve import Served

from ppsd_rt.bench.cli.bench import run_facts
from ppsd_rt.bench.cli.options import positive
from ppsd_rt.bench.cli.prompt_files import read_prompts
from ppsd_rt.cli.common import print_json
from ppsd_rt.cli.progress import progress_bar

FILL = 300  # grammars: more than the server keeps
GROWTH = 0.02  # of the server's memory, that is taken for none
SAMPLE = 2.0  # seconds between two looks at the memory
HOPELESS = "start: A\nA: " + " & ".join(f"/(a{{{prime}}})*/" for prime in (2, 3, 5, 7, 11, 13, 17, 19))
SCHEMA = {"type": "object", "properties": {"answer": {"type": "string", "maxLength": 30}}, "required": ["answer"]}


@dataclass
class Found:
    """What has happened so far. texts: of every request that was answered whole."""

    requests: Counter[str] = field(default_factory=Counter)
    texts: dict[str, list[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)


def draw(rng: random.Random, prompts: list[str]) -> dict[str, Any]:
    """A request's path, body, and after how many pieces of its stream the client goes away (None: never)."""
    words = rng.choice(prompts)
    if rng.random() < 0.3:
        words = " ".join(rng.choice(prompts) for _ in range(rng.randint(2, 12)))
    body: dict[str, Any] = {"max_tokens": int(200 ** rng.random()), "temperature": 0, "seed": rng.randrange(1000)}
    if rng.random() < 0.5:
        body |= {"temperature": 0.8, "top_p": rng.choice((0.9, 1))}
    if rng.random() < 0.2:
        body["n"] = 2
    path = rng.choice(("/v1/chat/completions", "/v1/completions"))
    if path == "/v1/completions":
        body["prompt"] = words
    else:
        body["messages"] = [{"role": "user", "content": words}]
        body |= _held(rng)
    if rng.random() < 0.05:
        body["temperature"] = -1  # refused
    leaves = None
    if rng.random() < 0.6:
        body["stream"] = True
        leaves = rng.randint(1, 20) if rng.random() < 0.3 else None
    return {"path": path, "body": body, "leaves": leaves}


def _held(rng: random.Random) -> dict[str, Any]:
    """What may hold a chat: a schema, tools, a grammar that nobody has sent before, one that nobody can compile."""
    kind = rng.random()
    if kind < 0.1:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
    if kind < 0.3:
        choice = rng.choice(("auto", "required", {"type": "function", "function": {"name": "say"}}))
        function = {"name": "say", "parameters": SCHEMA}
        return {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    if kind < 0.4:
        return {"response_format": {"type": "regex", "regex": f"[a-z ]{{1,{rng.randint(2, 60)}}}{rng.random()}"}}
    if kind < 0.41:
        return {"response_format": {"type": "lark", "lark": f"{HOPELESS}\n// {rng.random()}"}}
    return {}


async def ask(client: httpx2.AsyncClient, request: dict[str, Any], found: Found) -> None:
    """Sends it and notes what comes of it."""
    path, body, leaves = request["path"], request["body"], request["leaves"]
    key = path + json.dumps({name: value for name, value in body.items() if name != "stream"}, sort_keys=True)
    if body["temperature"] < 0 or HOPELESS in str(body.get("response_format", {}).get("lark")):
        reply = await client.post(path, json=body)
        found.requests["refused"] += 1
        if reply.status_code != 400:
            found.wrong.append(f"{reply.status_code} instead of 400 for {key}")
        return
    events: list[dict[str, Any]] = []
    if not body.get("stream"):
        reply = await client.post(path, json=body)
        status, text = reply.status_code, reply.text
        events.append(reply.json())
    else:
        async with client.stream("POST", path, json=body) as stream:
            status, text = stream.status_code, ""
            if status != 200:
                text = (await stream.aread()).decode()
            else:
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line[6:]))
                    if leaves is not None and len(events) >= leaves:
                        found.requests["left"] += 1
                        return
    texts = _texts(events)
    if status != 200 or any("error" in event for event in events):
        found.wrong.append(f"status {status} for {key}: {text[:200]}")
        return
    found.requests["streamed" if body.get("stream") else "whole"] += 1
    if found.texts.setdefault(key, texts) != texts:
        found.wrong.append(f"another text than before for {key}: {texts} after {found.texts[key]}")
    elif found.texts[key] is not texts:
        found.requests["repeated"] += 1


def _texts(events: list[dict[str, Any]]) -> list[str]:
    """Of each answer of a request, from its pieces."""
    texts: dict[int, str] = {}
    for event in events:
        for choice in event.get("choices", []):
            said = choice.get("delta") or choice.get("message") or {}
            piece = choice.get("text") or said.get("content") or ""
            calls = "".join(call["function"]["arguments"] for call in said.get("tool_calls") or ())
            texts[choice["index"]] = texts.get(choice["index"], "") + piece + calls
    return [texts[index] for index in sorted(texts)]


async def fill(url: str, patience: float) -> None:
    """The cache of compiled grammars, each as large as using it makes it."""
    async with httpx2.AsyncClient(base_url=url, timeout=patience) as client:

        async def use(number: int) -> None:
            held = {"type": "regex", "regex": f"[a-z ]{{1,{2 + number % 59}}}{number}"}
            message = {"role": "user", "content": "Hi"}
            body = {"messages": [message], "max_tokens": 40, "seed": number, "response_format": held}
            (await client.post("/v1/chat/completions", json=body)).raise_for_status()

        for begin in range(0, FILL, 30):
            await asyncio.gather(*(use(number) for number in range(begin, min(begin + 30, FILL))))


async def soak(url: str, pid: int, prompts: list[str], args: argparse.Namespace, found: Found) -> None:
    begin, end = monotonic(), monotonic() + 60 * args.minutes
    sent: list[dict[str, Any]] = []  # a few, to be sent again

    async def client(number: int) -> None:
        rng = random.Random(f"{args.seed}/{number}")
        async with httpx2.AsyncClient(base_url=url, timeout=args.patience) as connection:
            while True:
                request = rng.choice(sent) if sent and rng.random() < 0.3 else draw(rng, prompts)
                if request["leaves"] is None and len(sent) < 200:
                    sent.append(request)
                try:
                    await ask(connection, request, found)
                except httpx2.HTTPError as error:
                    found.wrong.append(f"{type(error).__name__} for {request}: {error}")
                if monotonic() >= end:
                    return

    async def watch() -> None:
        with progress_bar("soaking") as advance:
            while (now := monotonic()) < end:
                found.megabytes.append(resident(pid))
                advance(int(now - begin), int(end - begin) or 1)
                await asyncio.sleep(SAMPLE)

    await asyncio.gather(watch(), *(client(number) for number in range(args.clients)))


def resident(pid: int) -> float:
    """The memory of a process, in megabytes."""
    return int(re.findall(r"VmRSS:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) / 1000


def growth(megabytes: list[float]) -> float:
    """Of the memory, from the second third of the time to the last; at first caches fill."""
    third = max(len(megabytes) // 3, 1)
    return median(megabytes[-third:]) / median(megabytes[-2 * third : -third] or megabytes) - 1


async def left_running(url: str, patience: float) -> float:
    """Answers that the server still works on when nobody asks any more; 0 if they end within `patience` seconds."""
    end = monotonic() + patience
    async with httpx2.AsyncClient(base_url=url, timeout=patience) as client:
        while True:
            metrics = (await client.get("/metrics")).text
            left = sum(float(count) for count in re.findall(r"^ppsd_answers_(?:waiting|running) (\S+)", metrics, re.M))
            if not left or monotonic() > end:
                return left
            await asyncio.sleep(0.1)


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    prompts = [prompt.prompt for prompt in read_prompts(None)]
    command = [sys.executable, "-m", "ppsd_rt", "serve", "--model", args.model, "--exit-head", args.exit_head]
    command += ["--port", "0", "--queue", "1000", "--kv-memory", args.kv_memory]
    served = Served("ppsd-run serve", [*command, *(["--threads", args.threads] if args.threads else [])], None)
    found = Found()
    try:
        asyncio.run(fill(served.url, args.patience))
        asyncio.run(soak(served.url, served.pid, prompts, args, found))
        left = asyncio.run(left_running(served.url, args.patience))
    finally:
        served.close()
    if left:
        found.wrong.append(f"{left:.0f} answers are still in the works after the last request")
    grown = growth(found.megabytes)
    if grown > GROWTH:
        found.wrong.append(f"memory has grown by {grown:.1%}")
    for text in found.wrong:
        print(text, file=sys.stderr)
    facts = run_facts("soak", args.model) | {"command": " ".join(["python", *sys.argv])}
    counts = dict(found.requests)
    print(f"{sum(found.requests.values()):,} requests {counts}, {len(found.wrong)} wrong, memory {grown:+.2%}")
    facts |= vars(args) | {"requests": counts, "wrong": found.wrong, "megabytes": found.megabytes, "growth": grown}
    print_json(facts)
    return 1 if found.wrong else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--exit-head", default="auto", help="[auto]")
    parser.add_argument("--minutes", type=float, default=30, help="[30]")
    parser.add_argument("--clients", type=positive, default=12, help="[12]")
    parser.add_argument("--kv-memory", default="160M", help="of the server [160M]")
    parser.add_argument("--patience", type=float, default=300, help="seconds that a request may wait [300]")
    parser.add_argument("--seed", type=int, default=1, help="of what is asked [1]")
    parser.add_argument("-t", "--threads", type=positive, help="of the server [one for each core]")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
