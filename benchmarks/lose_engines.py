"""Lose engines under load, at random, and see whether anybody who asked notices: text for text, and none lost.

    python benchmarks/lose_engines.py --faults 200 > benchmarks/results/...-lose-engines.json
    python benchmarks/lose_engines.py -m model/ --setups process --faults 4 --clients 2

Two setups, half of the faults each. `process`: `ppsd-run serve --restarts`. `ranks`: `ppsd-run serve --engines` and two
ranks by torchrun, in a network namespace of their own. Clients stream answers of every kind: greedy and sampled, with
penalties, stop strings, several choices, log-probabilities and a grammar. Each kind has been answered once before the
first fault. Afterwards every answer must be that one, to the last log-probability.

Faults: `kill` (SIGKILL) and `stop` (SIGSTOP) hit a random process that decodes. `cut` takes the engine's network away
for longer than the time of silence. `disk` fills the disk of the logs and of the cache, and kills a process then; it
has room again when an engine is back. `cut` and `disk` need root, and are left out without.

A fault comes within two seconds after one to three answers have ended. Ctrl-C and SIGTERM end it early, with what there
is by then. The exit status is 1 if an answer is lost or differs. Requests that got 503 are counted, and sent again.
"""

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ppsd_rt.bench.cli.bench import run_facts
from ppsd_rt.cli.common import print_json
from ppsd_rt.models.resolve import resolve_model

PATIENCE = 300.0  # seconds for an engine to come back, and for an answer to end
SILENCE = 3.0  # seconds, of fronts, engines and ranks
NAMESPACE = f"ppsd-{os.getpid()}"
CABLE = f"pp{os.getpid()}a", f"pp{os.getpid()}b"  # its ends
# A network of this run's own. One of a killed run may still be there, and two of the same addresses are none.
_OWN = os.getpid() % (1 << 14) * 4
HERE, THERE = (f"10.123.{_OWN >> 8}.{(_OWN & 255) + end}" for end in (1, 2))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def requests(tokens: int) -> list[dict[str, Any]]:
    """Bodies of /v1/completions. `seed` makes each repeatable."""
    words = ["The lighthouse keeper", "A list of planets:", "def quicksort(numbers):", "Dear sir or madam,"]
    base = {"max_tokens": tokens, "stream": True, "temperature": 0.8, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_p": 0.9, "top_k": 50, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"repetition_penalty": 1.2, "logprobs": 2},
        {"n": 2, "stop": ["\n\n", " and the "]},
        {"min_tokens": 20, "ignore_eos": False},
        {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
    ]
    return [
        {**base, **kind, "prompt": words[(place + turn) % len(words)], "seed": place + 100 * turn}
        for place, kind in enumerate(kinds)
        for turn in range(2)
    ]


@dataclass
class Counts:
    answers: int = 0  # that ended, after the first fault
    in_flight: int = 0  # requests under way when a fault came
    refused: int = 0  # 503
    faults: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)  # seconds from a fault until an engine is there


class Refused(Exception):
    """503."""


def answer(port: int, body: dict[str, Any]) -> dict[int, Any]:
    """Of each choice its text, why it ended, and its log-probabilities. Raises what shows that it was lost."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status == 503 and reply.headers["Retry-After"]:
            raise Refused
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.read(300)!r}")
        found: dict[int, Any] = {}
        for line in reply:
            said = line.decode().removeprefix("data: ").strip()
            if said == "[DONE]":
                if not all(finish for _, finish, _ in found.values()):
                    raise RuntimeError("a stream ended without a reason")
                return found
            if not said:
                continue
            chunk = json.loads(said)
            if "error" in chunk:
                raise RuntimeError(f"an error came in the stream: {chunk['error']}")
            for choice in chunk["choices"]:
                text, _, logprobs = found.get(choice["index"], ("", None, []))
                more = (choice["logprobs"] or {}).get("token_logprobs", [])
                found[choice["index"]] = text + choice["text"], choice["finish_reason"], [*logprobs, *more]
        raise RuntimeError("a stream broke off")
    finally:
        connection.close()


def decodes(port: int) -> bool:
    """Is there an engine? A lost one that nobody has noticed is none: the answer waits for the next one."""
    with suppress(OSError, http.client.HTTPException, Refused):
        return bool(answer(port, {"prompt": "x", "max_tokens": 1, "stream": True}))
    return False


class Load:
    """Clients in threads. `wanted` has the answer to each request."""

    def __init__(self, port: int, bodies: list[dict[str, Any]], clients: int, seed: int, counts: Counts) -> None:
        self._port, self._bodies, self._counts = port, bodies, counts
        self.wanted = [answer(port, body) for body in bodies]
        self._over, self._lock = threading.Event(), threading.Lock()
        self.under_way = 0
        rngs = [random.Random(seed + client) for client in range(clients)]
        self._threads = [threading.Thread(target=self._ask, args=(rng,)) for rng in rngs]
        for thread in self._threads:
            thread.start()

    def wait_for(self, count: int) -> None:
        """So many more answers: an engine that never lives until a first token brings nothing forward."""
        wanted, end = self._counts.answers + count, time.monotonic() + PATIENCE
        while self._counts.answers < wanted and time.monotonic() < end:
            time.sleep(0.02)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, rng: random.Random) -> None:
        while not self._over.is_set():
            number = rng.randrange(len(self._bodies))
            with self._lock:
                self.under_way += 1
            try:
                found: dict[int, Any] | str = answer(self._port, self._bodies[number])
            except Refused:
                found = "refused"
            except Exception as error:  # whatever it is, the answer is lost
                found = f"request {number}: {type(error).__name__}: {error}"
            with self._lock:
                self.under_way -= 1
                if isinstance(found, dict):
                    self._counts.answers += 1
                    if found != self.wanted[number]:
                        self._counts.different.append(f"request {number}: {found} instead of {self.wanted[number]}")
                elif found == "refused":
                    self._counts.refused += 1
                else:
                    self._counts.lost.append(found)
            if found == "refused":
                self._over.wait(0.5)


class Setup:
    """A server, what decodes for it, and a disk of their own."""

    def __init__(self, folder: Path, stack: ExitStack, root: bool) -> None:
        self.folder, self.root, self._stack = folder, root, stack
        self.port = free_port()
        folder.mkdir()
        if root:
            run("mount", "-t", "tmpfs", "-o", "size=4m", "none", folder)
            stack.callback(run, "umount", "-l", folder)

    def start(self, *command: object, log: str) -> "subprocess.Popen[bytes]":
        out = open(self.folder / log, "ab", buffering=0)  # noqa: SIM115 (the process's)
        environment = {**os.environ, "PPSD_CACHE": str(self.folder), "PPSD_ENGINE_KEY": "lose engines under load"}
        process = subprocess.Popen([str(word) for word in command], stdout=out, stderr=out, env=environment)
        self._stack.callback(end, process)
        return process

    def wait(self) -> float:
        """Until an engine is there; seconds."""
        begun = time.monotonic()
        while not decodes(self.port):
            if time.monotonic() - begun > PATIENCE:
                logs = [path.read_text(errors="replace")[-2000:] for path in self.folder.glob("*.log")]
                raise RuntimeError(f"no engine has come back: {logs}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def fill(self) -> None:
        with suppress(OSError), open(self.folder / "full", "wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)

    def empty(self) -> None:
        (self.folder / "full").unlink()


class Process(Setup):
    """One process decodes, a child of the server."""

    def __init__(self, model: list[str], folder: Path, stack: ExitStack, root: bool) -> None:
        super().__init__(folder, stack, root)
        serve = [sys.executable, "-m", "ppsd_rt", "serve", "--port", self.port, "--engine-timeout", SILENCE]
        self._server = self.start(*serve, "--restarts", 10**6, *model, log="serve.log")

    kinds = property(lambda self: ["kill", "stop"] + ["disk"] * self.root)

    def decoding(self) -> list[int]:
        return children(self._server.pid)


class Ranks(Setup):
    """Two ranks by torchrun; as root in a network namespace."""

    def __init__(self, model: list[str], folder: Path, stack: ExitStack, root: bool) -> None:
        super().__init__(folder, stack, root)
        inside: list[object] = []
        host = "127.0.0.1"
        if root:
            inside, host = ["ip", "netns", "exec", NAMESPACE], HERE
            namespace(stack)
        engines = f"{host}:{free_port()}"
        serve = [sys.executable, "-m", "ppsd_rt", "serve", "--port", self.port, "--engine-timeout", SILENCE]
        self.start(*serve, "--engines", engines, *model, log="serve.log")
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--max-restarts", 10**6]
        ranks += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        ranks += ["-m", "ppsd_rt", "engine", "--front", engines, "--engine-timeout", SILENCE, "--rank-timeout", SILENCE]
        self._agent = self.start(*inside, sys.executable, *ranks, *model, log="ranks.log")

    kinds = property(lambda self: ["kill", "kill", "stop"] + ["cut", "disk"] * self.root)

    def decoding(self) -> list[int]:
        return children(self._agent.pid)


def namespace(stack: ExitStack) -> None:
    """With one cable to here. A killed run that had this one's number may have left both."""
    subprocess.run(["ip", "netns", "delete", NAMESPACE], capture_output=True)
    run("ip", "netns", "add", NAMESPACE)
    stack.callback(run, "ip", "netns", "delete", NAMESPACE)
    run("ip", "link", "add", CABLE[0], "type", "veth", "peer", "name", CABLE[1], "netns", NAMESPACE)
    run("ip", "address", "add", f"{HERE}/30", "dev", CABLE[0])
    run("ip", "link", "set", CABLE[0], "up")
    run("ip", "-n", NAMESPACE, "address", "add", f"{THERE}/30", "dev", CABLE[1])
    for device in (CABLE[1], "lo"):
        run("ip", "-n", NAMESPACE, "link", "set", device, "up")


def cut(setup: Setup, rng: random.Random) -> None:
    run("ip", "-n", NAMESPACE, "link", "set", CABLE[1], "down")
    time.sleep(SILENCE * rng.uniform(1.2, 2.0))
    run("ip", "-n", NAMESPACE, "link", "set", CABLE[1], "up")


def inject(kind: str, setup: Any, rng: random.Random) -> None:
    if kind == "cut":
        return cut(setup, rng)
    if kind == "disk":
        setup.fill()
    with suppress(ProcessLookupError, IndexError):
        os.kill(rng.choice(setup.decoding()), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    return None


def play(
    setup: Any, kinds: Sequence[str], bodies: list[dict[str, Any]], clients: int, seed: int, counts: Counts
) -> None:
    rng = random.Random(seed)
    setup.wait()
    load = Load(setup.port, bodies, clients, seed, counts)
    try:
        for number, kind in enumerate(kinds):
            load.wait_for(rng.randint(1, 3))
            time.sleep(rng.uniform(0.0, 2.0))
            counts.in_flight += load.under_way
            inject(kind, setup, rng)
            counts.pauses.append(setup.wait())
            counts.faults[kind] += 1
            if kind == "disk":
                setup.empty()
            print(f"{number + 1} of {len(kinds)}: {kind}, {counts.pauses[-1]:.1f} s", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("interrupted: what follows is as far as it came", file=sys.stderr)
    finally:
        load.end()


def children(pid: int) -> list[int]:
    """Of all its threads; those that decode, for a server has others too, which try out grammars."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, task.read_text().split())
    return [child for child in found if _decodes(child)]


def _decodes(pid: int) -> bool:
    with suppress(OSError):
        return b"\0engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True)


def end(process: "subprocess.Popen[bytes]") -> None:
    """With all that it has started."""
    below = children(process.pid)
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


SETUPS = {"process": Process, "ranks": Ranks}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--exit-head", default="auto")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=120, help="of an answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--setups", default="process,ranks")
    args = parser.parse_args()
    model = ["-m", str(resolve_model(args.model)), "--exit-head", args.exit_head, "--threads", "1"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all is taken down
    rng = random.Random(args.seed)
    names = args.setups.split(",")
    report: dict[str, Any] = {**run_facts("lose-engines", args.model), "silence": SILENCE, "clients": args.clients}
    report["command"] = " ".join(["python", *sys.argv])
    fine = True
    for place, name in enumerate(names):
        share = args.faults // len(names) + (place < args.faults % len(names))
        counts = Counts()
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            setup: Any = SETUPS[name](model, Path(folder, "disk"), stack, os.geteuid() == 0)
            kinds = [setup.kinds[fault % len(setup.kinds)] for fault in range(share)]
            rng.shuffle(kinds)
            play(setup, kinds, requests(args.tokens), args.clients, args.seed, counts)
        fine = fine and not counts.lost and not counts.different
        report[name] = {
            "faults": dict(counts.faults),
            "answers": counts.answers,
            "requests under way at a fault": counts.in_flight,
            "refused with 503": counts.refused,
            "lost": counts.lost,
            "different": counts.different,
            "seconds until an engine is back": {
                "median": sorted(counts.pauses)[len(counts.pauses) // 2],
                "most": max(counts.pauses),
            },
        }
    print_json(report)
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
