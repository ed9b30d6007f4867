#!/usr/bin/env python3
"""Decoding beside other programs: tokens per second while 0, 1, ... programs keep a core busy each.

    benchmarks/neighbours.py --programs 0,1,2 -r 3          the last line is a JSON object

Plain decoding and `auto`, with one thread and with all, take turns. What to expect of a team that waits for a thread
which has lost its core: less than one thread has alone. (csrc/cpu/roster.h is there to prevent it.)
"""

import argparse
import json
import subprocess
import sys
from statistics import median
from time import perf_counter, sleep

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.cpu.default_threads import default_threads
from ppsd_rt.errors import PpsdError
from ppsd_rt.lab.cli.bench import run_facts

BUSY = [sys.executable, "-c", "while True: pass"]
QUESTION = [{"role": "user", "content": "Explain how rainbows form."}]


def speed(engine: Engine, schedule: str, tokens: int) -> float:
    begun = perf_counter()
    completion = engine.generate(QUESTION, SamplingParams(max_tokens=tokens, ignore_eos=True), schedule).run()
    return completion.statistics.tokens / (perf_counter() - begun)


def measure(engines: dict[int, Engine], programs: int, tokens: int, repeats: int) -> list[dict[str, object]]:
    """One result for each number of threads and schedule: tokens per second, the prompt's time included."""
    samples: dict[tuple[int, str], list[float]] = {}
    busy = [subprocess.Popen(BUSY) for _ in range(programs)]
    try:
        sleep(1.0 if busy else 0.0)
        for _ in range(repeats):
            for threads, engine in engines.items():
                for schedule in ("plain", "auto"):
                    samples.setdefault((threads, schedule), []).append(speed(engine, schedule, tokens))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return [
        {"programs": programs, "threads": threads, "schedule": schedule, "tokens_per_second": median(speeds),
         "samples": speeds}
        for (threads, schedule), speeds in samples.items()
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--programs", default="0,1,2", help="busy programs beside it")
    parser.add_argument("-n", "--tokens", type=int, default=96)
    parser.add_argument("-r", "--repeats", type=int, default=3)
    args = parser.parse_args()
    try:
        engines = {threads: Engine.from_pretrained(args.model, threads=threads) for threads in {1, default_threads()}}
        for engine in engines.values():
            for schedule in ("plain", "auto"):
                speed(engine, schedule, args.tokens)
        results = []
        for programs in map(int, args.programs.split(",")):
            for result in measure(engines, programs, args.tokens, args.repeats):
                results.append(result)
                print(f"{programs} busy programs, {result['threads']} threads, {result['schedule']}: "
                      f"{result['tokens_per_second']:.0f} tokens/s")  # fmt: skip
    except (PpsdError, ValueError) as error:
        print(f"neighbours: {error}", file=sys.stderr)
        return 1
    print(json.dumps({**run_facts("neighbours", args.model), "command": " ".join(sys.argv), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
