"""Several clients at once, over HTTP: `ppsd-run serve` beside llama.cpp's llama-server, in turns.

    python benchmarks/serve.py                                        # 1 to 32 clients: many minutes
    python benchmarks/serve.py --clients 1,4 --requests 8 -n 32 -r 1
    python benchmarks/serve.py -m model-q4_k_m.gguf --engines ppsd-rt:int4+auto:recycle=off,llama.cpp:file

Every client sends a request, reads the whole answer as it streams, and sends its next one. The requests are the
development prompts, in order and as token ids; every answer is greedy and has -n tokens, past any end: the same work
for all engines. `direct:FORMAT+SCHEDULE` is ours in this process without HTTP: what it is faster by is what HTTP costs.

`tokens/s`: of all answers, from the first request to the end of the last answer. `first`: from a request to the first
bytes of its answer. `pause`: between arrivals of bytes in an answer, 0 where every answer came at once; ours may bring
several tokens at once. `loop` and `client`: processor time of the event loop that hands tokens on, and of these
clients, in percent of one core, taken from the cores that decode; `direct` has neither HTTP nor clients. `x`: the first
engine over this one, with as many clients. llama-server is what `benchmarks/build_llama_cpp.sh server` builds; it gets
as many slots (-np) as there are clients. `llama.cpp:file` reads the .gguf file that -m names as it is. The last line of
the output is one JSON object.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep, thread_time
from typing import Any, Protocol

import httpx2
import numpy as np
from export_gguf import FORMATS
from peer_worker import LLAMA_SERVER as SERVER
from peers import FILE, model_for, print_with_summary

from ppsd_rt import Engine, SamplingParams, _native
from ppsd_rt.bench.cli.bench import run_facts
from ppsd_rt.bench.cli.options import positive
from ppsd_rt.bench.cli.prompt_files import read_prompts
from ppsd_rt.bench.report import Report, columns, medians
from ppsd_rt.bench.spread import Spread, take_turns
from ppsd_rt.cli.progress import progress_bar
from ppsd_rt.cli.values import several
from ppsd_rt.generation import Committed

# The same prompts come again with every repeat: what `recycle` counted in the first would answer the second.
AUTO = "auto:recycle=off"
ENGINES = f"ppsd-rt:int8+{AUTO},ppsd-rt:int8+plain,direct:int8+{AUTO},llama.cpp:Q8_0"

COLUMNS = columns(
    engine="engine", clients="clients", tokens_per_second="tokens/s|1", times="x|2", first_ms="first ms|0",
    first_ms_99="99th|0", pause_ms="pause ms|1", pause_ms_99="99th|1", loop_cpu="loop %|1", client_cpu="client %|1"
)  # fmt: skip


@dataclass
class Arrivals:
    """Of one answer: seconds to the first bytes of text, then between bytes; how many tokens it has."""

    first: float = 0.0
    pauses: list[float] = field(default_factory=list)
    tokens: int = 0


class Failed(Exception):
    """A server does not do what it was asked for. What has been measured before is reported."""


class Target(Protocol):
    """What the clients ask."""

    async def ask(self, ids: list[int], tokens: int) -> Arrivals: ...
    def loop_seconds(self) -> float: ...
    def close(self) -> None: ...


class Served:
    """A server in a process of its own."""

    def __init__(self, name: str, command: list[object], url: str | None) -> None:
        """url: where it will listen; None: it says so on standard error."""
        self._name = name
        # Every engine waits for its threads as its makers chose: told to sleep, llama-server is 2.3 times slower.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
        words = [str(word) for word in command]
        self._process = subprocess.Popen(
            words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        self._said: deque[str] = deque(maxlen=20)
        try:
            self.url = url or self._heard()
            threading.Thread(target=self._listen, daemon=True).start()
            self._wait()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, ids: list[int], tokens: int) -> Arrivals:
        """By hand, for the client has the cores of the server: httpx takes a tenth of one, with 16 clients."""
        body = json.dumps({
            "prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True},
        })  # fmt: skip
        host, port = self.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        loop, begin = asyncio.get_running_loop(), perf_counter()
        try:
            _, reader = await loop.create_connection(lambda: _Reader((head + body).encode()), host, int(port))
            pieces = await reader.whole
        except OSError as error:
            raise Failed(f"{self._name}: {error}. {self._status()}") from None
        # Some servers send the reply's head before they have any text.
        times = [begin, *(now for place, (now, piece) in enumerate(pieces) if place or b"data:" in piece)]
        steps = [after - before for before, after in pairwise(times)]
        found, reply = Arrivals(steps[0] if steps else 0.0, steps[1:]), b"".join(piece for _, piece in pieces)
        counted = re.findall(rb'"completion_tokens":\s*(\d+)', reply)
        if not reply.startswith(b"HTTP/1.1 200 ") or not counted:
            raise Failed(f"{self._name} answers {reply[:2000].decode(errors='replace')!r}. {self._status()}")
        found.tokens = int(counted[-1])
        return found

    def loop_seconds(self) -> float:
        """Of the thread that ours has its event loop in; llama-server's decodes, too."""
        fields = Path(f"/proc/{self.pid}/task/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _heard(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said.append(line)
            if found := re.search(r"http://[\d.]+:\d+", line):
                return found[0]
        raise self._failed()

    def _listen(self) -> None:
        assert self._process.stderr is not None
        self._said.extend(self._process.stderr)

    def _wait(self) -> None:
        while True:
            if self._process.poll() is not None:
                raise self._failed()
            try:
                if httpx2.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx2.TransportError:
                pass
            sleep(0.1)

    def _status(self) -> str:
        return f"Its status: {self._process.poll()}. It said:\n" + "".join(self._said)

    def _failed(self) -> Failed:
        return Failed(f"{self._name} has failed. {self._status()}")


class Direct:
    """The engine itself, in this process."""

    def __init__(self, engine: Engine, schedule: str) -> None:
        self._engine, self._schedule = engine, schedule

    async def ask(self, ids: list[int], tokens: int) -> Arrivals:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        found, before = Arrivals(), perf_counter()
        generation = self._engine.agenerate(ids, params, self._schedule)
        async for event in generation.events():
            if isinstance(event, Committed):
                now = perf_counter()
                if found.tokens:
                    found.pauses.append(now - before)
                else:
                    found.first = now - before
                before = now
                found.tokens += len(event.tokens)
        return found

    def loop_seconds(self) -> float:
        return thread_time()

    def close(self) -> None: ...


class _Reader(asyncio.Protocol):
    """Sends a request, and keeps what comes and when: a callback for each piece, and no task that wakes."""

    def __init__(self, request: bytes) -> None:
        self._request, self._pieces = request, list[tuple[float, bytes]]()
        self.whole: asyncio.Future[list[tuple[float, bytes]]] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._pieces.append((perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.whole.done():
            self.whole.set_result(self._pieces)


@dataclass
class Case:
    """An engine with so many clients; each list has a figure for each repeat."""

    name: str
    clients: int
    target: Target
    prompts: list[list[int]]
    tokens: int
    figures: dict[str, list[float]] = field(default_factory=dict)

    def measure(self) -> None:
        begin, loop, mine = perf_counter(), self.target.loop_seconds(), thread_time()
        answers = asyncio.run(self._all())
        seconds = perf_counter() - begin
        loop, mine = self.target.loop_seconds() - loop, thread_time() - mine
        firsts = [1000 * answer.first for answer in answers]
        pauses = [1000 * pause for answer in answers for pause in answer.pauses] or [0.0]
        found = {
            "tokens_per_second": sum(answer.tokens for answer in answers) / seconds,
            "first_ms": float(np.median(firsts)),
            "first_ms_99": float(np.quantile(firsts, 0.99)),
            "pause_ms": float(np.median(pauses)),
            "pause_ms_99": float(np.quantile(pauses, 0.99)),
            "loop_cpu": 100 * loop / seconds,
            "client_cpu": 0.0 if isinstance(self.target, Direct) else 100 * mine / seconds,
        }
        for name, figure in found.items():
            self.figures.setdefault(name, []).append(figure)

    async def _all(self) -> list[Arrivals]:
        waiting, answers = deque(self.prompts), list[Arrivals]()

        async def client() -> None:
            while waiting:
                answers.append(await self.target.ask(waiting.popleft(), self.tokens))

        await asyncio.gather(*(client() for _ in range(self.clients)))
        if wrong := [answer.tokens for answer in answers if answer.tokens != self.tokens]:
            raise Failed(f"{self.name}: an answer has {wrong[0]} tokens instead of {self.tokens}")
        return answers


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    names, absent = _at_hand(args.engines)
    engine = Engine.from_pretrained(args.model, exit_head=args.exit_head, threads=args.threads, dtype=_direct(names))
    texts = [prompt.prompt for prompt in read_prompts(None)[: args.requests]]
    every = [engine.encode([{"role": "user", "content": text}]) for text in texts]
    prompts = [every[number % len(every)] for number in range(args.requests)]
    context = max(map(len, prompts)) + args.max_tokens
    facts = run_facts("serve", args.model)
    facts |= {"command": " ".join(["python", *sys.argv]), "absent": absent, "threads": args.threads}
    facts |= {"requests": args.requests, "tokens": args.max_tokens}
    cases: list[Case] = []
    whole, status = True, 0
    with progress_bar("measuring") as advance:
        total = len(args.clients) * len(names) * args.repeats
        for place, clients in enumerate(args.clients):
            group: list[Case] = []
            try:
                for name in names:
                    target = _target(name, engine, args, clients, context)
                    group.append(Case(name, clients, target, prompts, args.max_tokens))
                take_turns(group, 1, lambda case: asyncio.run(case.target.ask(case.prompts[0], 4)))
                done = place * len(names) * args.repeats
                whole = take_turns(
                    group, args.repeats, Case.measure, lambda now, _, done=done: advance(done + now, total)
                )
            except Failed as error:
                print(error, file=sys.stderr)
                whole, status = False, 1
            finally:
                for case in group:
                    case.target.close()
            cases += group
            if not whole:
                break
    rows = [_row(case, cases) for case in cases if case.figures]
    summary = {"repeats": args.repeats, "interrupted": not whole, "results": [medians(row) for row in rows]}
    print_with_summary(Report("whole requests, in turns", COLUMNS, rows, facts, summary), args.output)
    return status or (0 if whole else 130)


def _target(name: str, engine: Engine, args: argparse.Namespace, clients: int, context: int) -> Target:
    kind, _, format = name.partition(":")
    format, _, schedule = format.partition("+")
    if kind == "direct":
        return Direct(engine, schedule)
    if kind == "ppsd-rt":
        command: list[object] = [sys.executable, "-m", "ppsd_rt", "serve", "--model", args.model, "--dtype", format]
        command += ["--schedule", schedule, "--exit-head", args.exit_head, "--port", 0, "--queue", 1000]
        return Served(name, [*command, *(["--threads", args.threads] if args.threads else [])], None)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    file = model_for(args.model, "llama-server", format)
    command = [SERVER, "--model", file, "--parallel", clients, "--ctx-size", clients * context]
    command += ["--threads", args.threads or len(_native.usable_cores()), "--host", "127.0.0.1", "--port", port]
    return Served(name, command, f"http://127.0.0.1:{port}")


def _row(case: Case, cases: list[Case]) -> dict[str, Any]:
    figures = {name: Spread(tuple(samples)) for name, samples in case.figures.items()}
    first = next(other for other in cases if other.clients == case.clients)
    speed = Spread(tuple(first.figures["tokens_per_second"]))
    return {
        "engine": case.name, "clients": case.clients, **figures, "times": speed.over(figures["tokens_per_second"])
    }  # fmt: skip


def _at_hand(names: list[str]) -> tuple[list[str], list[str]]:
    if SERVER.exists():
        return names, []
    absent = [name for name in names if name.startswith("llama.cpp")]
    reason = f"no {SERVER}: run benchmarks/build_llama_cpp.sh server"
    if absent:
        print(reason, file=sys.stderr)
    return [name for name in names if name not in absent], [f"{name}: {reason}" for name in absent]


def _direct(names: list[str]) -> str:
    """The format of the engine in this process."""
    return next((re.split("[:+]", name)[1] for name in names if name.startswith("direct")), "auto")


def _name(text: str) -> str:
    kind, _, rest = text.partition(":")
    format, plus, schedule = rest.partition("+")
    if kind in ("ppsd-rt", "direct") and format and plus and schedule:
        return text
    formats = (*FORMATS, FILE)
    if kind == "llama.cpp" and format in formats:
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is not ppsd-rt:FORMAT+SCHEDULE, direct:FORMAT+SCHEDULE or llama.cpp:FORMAT ({', '.join(formats)})"
    )


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names: Callable[[str], list[str]] = several(_name)
    add = partial(parser.add_argument, type=positive)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--exit-head", default="auto", help="of ours [auto]")
    parser.add_argument("--engines", type=names, default=names(ENGINES), help=f"[{ENGINES}]")
    parser.add_argument("--clients", type=several(positive), default=[1, 2, 4, 8, 16, 32], help="[1,2,4,8,16,32]")
    add("--requests", default=64, help="in all, whatever the number of clients [64]")
    add("-n", "--max-tokens", default=128, help="of every answer [128]")
    add("-t", "--threads", help="of every engine [one for each core]")
    add("-r", "--repeats", default=3, help="[3]")
    parser.add_argument("-o", "--output", choices=("table", "md", "csv", "json", "jsonl"), default="table")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
