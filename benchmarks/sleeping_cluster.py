"""Replicas of sleeping ranks behind a real front, beside what `ppsd-run simulate --cluster` says of the same requests.

    python benchmarks/sleeping_cluster.py > benchmarks/results/...-sleeping-cluster.json

Front, queue, connections, ranks, scheduler and messages are the product's; only the arithmetic is made up, see
sleeping_ranks.py. A replica of one stage is a process whose answers share passes, `--batch` at a time. One of several
stages is ranks, which decode one answer at a time. Requests arrive at random, at `--load` of what the replicas can do.
The prediction knows the costs that stages are told to take, when requests came, and nothing of this machine.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import SimpleNamespace
from typing import Any

import sleeping_ranks

from ppsd_rt._native import StageCosts
from ppsd_rt.backend import Cancellation, Oracle, RunOptions
from ppsd_rt.cli.info import machine
from ppsd_rt.front.backend import FrontBackend
from ppsd_rt.front.engines import Engines
from ppsd_rt.front.work import work as work_for_front
from ppsd_rt.lab.cluster import Replica, Shape, accepted, poisson, run
from ppsd_rt.lab.stage_costs import costs_of_stages, growth
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import PLAIN, Schedule, parse_schedule
from ppsd_rt.ranks.world import find_world
from ppsd_rt.sampling.params import SamplingParams
from ppsd_rt.serve.run import listen

KEY = "sleeping"
SILENCE = 60.0


class OneProcess:
    """The backend of a replica of one stage: a pass takes what `Replica.first` says, and all answers take part."""

    name = device = dtype = "sleeping"
    threads, longest, copies, siblings, extras, head = 1, 1 << 31, False, False, frozenset[str](), None

    def __init__(self, replica: Replica, truth: list[int]) -> None:
        self._replica, self._truth, self.concurrency = replica, truth, replica.batch
        self._arrived: SimpleQueue[tuple[int, int, SimpleQueue[Round]]] = SimpleQueue()
        self._stage = sleeping_ranks.Stage()
        threading.Thread(target=self._work, daemon=True).start()

    def facts(self) -> dict[str, Any]:
        return {}

    def rounds(self, prompt: list[int], params: SamplingParams, schedule: Any, limits: Limits, *_: Any) -> Any:
        told: SimpleQueue[Round] = SimpleQueue()
        self._arrived.put((params.seed or 0, limits.end, told))
        done = len(prompt)
        while done < limits.end:
            round = told.get()
            done += len(round.committed)
            yield round

    def _work(self) -> None:
        replica, running = self._replica, list[Any]()
        while True:
            while not (running and self._arrived.empty()):
                seed, end, told = self._arrived.get()
                running.append(SimpleNamespace(rng=Random(seed), place=1, end=end, told=told))
            prompts = [one for one in running if one.place == 1]
            writing = len(running) - len(prompts)
            self._stage.spend(replica.first(writing, len(prompts)), None)
            for one in running:
                right = 0 if one in prompts else accepted(one.rng, replica.drafts, replica.acceptance)
                committed = self._truth[one.place : min(one.place + 1 + right, one.end)]
                one.told.put(Round(0, one.place, 1, tuple(committed)))
                one.place += len(committed)
            running = [one for one in running if one.place < one.end]


class Drafting:
    """Ranks whose drafts are an oracle's, with the coins of the answer's seed."""

    def __init__(self, backend: Any, truth: list[int], acceptance: float) -> None:
        self._backend, self._truth, self._acceptance = backend, truth, acceptance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def rounds(
        self,
        prompt: list[int],
        params: SamplingParams,
        schedule: Schedule,
        limits: Limits,
        options: RunOptions,
        *rest: Any,
    ) -> Generator[Any, None, None]:
        oracle = Oracle((*self._truth, 0), self._acceptance, params.seed or 0) if schedule.drafts else None
        yield from self._backend.rounds(prompt, params, schedule, limits, replace(options, oracle=oracle), *rest)


def serve_front(backend: Any, task: dict[str, Any]) -> None:
    engine: Any = SimpleNamespace(backend=backend, checkpoint=SimpleNamespace(hash="sleeping"))
    work_for_front(engine, ("127.0.0.1", task["port"]), KEY, SILENCE, once=True)


def lead(groups: dict[int, Any], control: Any, costs: StageCosts, task: dict[str, Any]) -> None:
    stage = sleeping_ranks.SleepingDraft(costs)
    stage.confidence = task["acceptance"]
    backend = sleeping_ranks.open_backend(groups, control, stage)
    truth = sleeping_ranks.text_of(2 + task["tokens"])
    serve_front(Drafting(backend, truth, task["acceptance"]), task)
    backend.close()


def replica_of(args: argparse.Namespace, stages: int, schedule: str) -> Replica:
    seconds = args.token_ms / 1000
    made = Replica(
        (seconds / stages,) * stages, head=args.head_ms / 1000, row_share=args.row_share, acceptance=args.acceptance
    )
    if stages == 1:
        drafts = 0 if schedule == "plain" else args.drafts
        return replace(made, early=seconds / 10, batch=args.batch, drafts=drafts)
    return replace(made, early=made.stages[0], schedule=parse_schedule(schedule))


def start(
    args: argparse.Namespace, replica: Replica, port: int, number: int, folder: Path
) -> "subprocess.Popen[bytes]":
    stages = len(replica.stages)
    costs = costs_of_stages(replica.stages, replica.head, growth(replica.row_share), 0.0, 0.0) if stages > 1 else None
    task = {"port": port, "tokens": args.tokens, "acceptance": args.acceptance, "link_ms": 0.0, "stages": stages}
    task |= {"costs": costs.to_dict() if costs else None, "replica": asdict(replace(replica, schedule=None))}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(stages)] if stages > 1 else []
    command = [sys.executable, *launcher, __file__, "--worker", json.dumps(task)]
    with open(folder / f"{number}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def measure(args: argparse.Namespace, replicas: int, stages: int, schedule: str) -> dict[str, Any]:
    replica = replica_of(args, stages, schedule)
    count, shape = args.requests * replicas, Shape(answer=args.tokens, exact=True)
    alone = run([replica], poisson(1e9, 64, shape))  # what one can do, when nobody waits for requests
    rate = args.load * replicas * 64 / alone.now
    requests = poisson(rate, count, shape, seed=args.seed)
    predicted = run([replica] * replicas, requests)
    truth = sleeping_ranks.text_of(2 + args.tokens)
    found: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder, listen("127.0.0.1", 0) as listener:
        engines = Engines(listener, KEY, SILENCE)
        port = listener.getsockname()[1]
        processes = [start(args, replica, port, number, Path(folder)) for number in range(replicas)]
        try:
            while len(engines._engines) < replicas:
                if any(process.poll() is not None for process in processes):
                    raise SystemExit("\n".join(path.read_text() for path in Path(folder).glob("*.log")))
                time.sleep(0.1)
            backend = FrontBackend(engines.first(), engines)

            def ask(number: int, arrival: float) -> None:
                limits, params = Limits(1 + args.tokens), SamplingParams(seed=number, temperature=1.0)
                asked = backend.rounds([0], params, parsed, limits, RunOptions(), Cancellation())
                ids = [id for event in asked if isinstance(event, Round) for id in event.committed]
                if ids != truth[1 : 1 + args.tokens]:
                    raise AssertionError("the answer differs from the text")
                found.append((time.perf_counter() - begun - arrival, time.perf_counter() - begun))

            parsed = parse_schedule(schedule) if stages > 1 else PLAIN
            ask_first = [threading.Thread(target=ask, args=(0, 0.0)) for _ in range(replicas)]
            begun = time.perf_counter()
            for thread in ask_first:  # each engine once, so that all is loaded
                thread.start()
            for thread in ask_first:
                thread.join()
            found.clear()
            threads = [threading.Thread(target=ask, args=(r.number, r.arrival)) for r in requests]
            begun = time.perf_counter()
            for request, thread in zip(requests, threads, strict=True):
                time.sleep(max(request.arrival - (time.perf_counter() - begun), 0.0))
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            engines.close()
            for process in processes:
                process.terminate()
                process.wait()
    if len(found) != count:
        raise SystemExit("an answer was lost")
    took = sum(seconds for seconds, _ in found) / count
    made = count * args.tokens / max(end for _, end in found)
    expected = sum(a.ended - a.request.arrival for a in predicted.answered) / count
    return {
        "replicas": replicas,
        "stages": stages,
        "schedule": schedule,
        "requests": count,
        "seconds_an_answer": took,
        "predicted_seconds": expected,
        "seconds_over_predicted": took / expected,
        "tokens_per_second": made,
        "predicted_tokens_per_second": count * args.tokens / predicted.now,
        "speed_over_predicted": made / (count * args.tokens / predicted.now),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=lambda text: list(map(int, text.split(","))), default=[1, 2, 3, 4])
    parser.add_argument("--stages", type=lambda text: list(map(int, text.split(","))), default=[1, 2, 3, 4])
    parser.add_argument("--schedules", type=lambda text: text.split("/"), default=["plain", "elastic"])
    parser.add_argument("--requests", type=int, default=6, help="for each replica")
    parser.add_argument("-n", "--tokens", type=int, default=16)
    parser.add_argument("--load", type=float, default=0.8, help="of what the replicas can do")
    parser.add_argument("--token-ms", type=float, default=200.0)
    parser.add_argument("--head-ms", type=float, default=1.0)
    parser.add_argument("--row-share", type=float, default=0.05)
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--batch", type=int, default=4, help="of a replica of one stage")
    parser.add_argument("--drafts", type=int, default=3, help="the same, in each round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        if args.worker["stages"] == 1:
            replica = Replica(**{**args.worker["replica"], "stages": tuple(args.worker["replica"]["stages"])})
            serve_front(OneProcess(replica, sleeping_ranks.text_of(2 + args.worker["tokens"])), args.worker)
            os._exit(0)
        world = find_world()
        assert world is not None
        sleeping_ranks.work(world, args.worker, lead)
    rows = []
    for stages in args.stages:
        for replicas in args.replicas:
            for schedule in args.schedules:
                rows.append(row := measure(args, replicas, stages, schedule))
                print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()},
                      file=sys.stderr, flush=True)  # fmt: skip
    options = {name: value for name, value in vars(args).items() if name != "worker"}
    print(json.dumps({"measurement": "sleeping-cluster", "machine": machine(), "options": options, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
