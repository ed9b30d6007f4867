#!/usr/bin/env python3
"""Rounds as one graph with a conditional WHILE node (PPSD_CUDA_LOOP) against rounds that the host launches, in turns.

benchmarks/gpu_loop.py -m random:smollm2-135m --exit-head norm:6:8192 --oracle 0.8      the last line is JSON
"""

import argparse
import json
import os
import sys
from statistics import median

from ppsd_rt import Engine, PpsdError, SamplingParams
from ppsd_rt.backend import Oracle, RunOptions

SCHEDULES = ("plain", *(f"eesd:length={drafts},stop_rule=fixed" for drafts in (2, 4, 6)))


def engine_of(args: argparse.Namespace, *, loops: bool) -> Engine:
    os.environ["PPSD_CUDA_LOOP"] = str(int(loops))
    return Engine.from_pretrained(args.model, exit_head=args.exit_head, backend="cuda", device=args.device)


def compare(args: argparse.Namespace) -> list[dict[str, object]]:
    engines = {"host": engine_of(args, loops=False), "loop": engine_of(args, loops=True)}
    prompt, params = list(range(3, 67)), SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    plain = engines["host"].generate(prompt, params, "plain").run().ids
    options = RunOptions(oracle=Oracle((*prompt, *plain), args.oracle, 1))
    rows: list[dict[str, object]] = []
    for schedule in SCHEDULES:
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(args.repeats + 1):  # the first one captures and warms up
            for name, engine in engines.items():
                answer = engine.generate(prompt, params, schedule, options).run()
                if answer.ids != plain:
                    raise PpsdError(f"{schedule}, {name}: the answer differs from plain decoding")
                speed = answer.statistics.decode_tokens_per_second
                if turn > 0 and speed is not None:
                    speeds[name].append(speed)
        ratios = [loop / host for host, loop in zip(speeds["host"], speeds["loop"], strict=True)]
        rows.append({"schedule": schedule, "tokens_per_second": speeds, "ratios": ratios, "ratio": median(ratios)})
    if engines["loop"].backend.facts()["launches"] != "captured, in loops":
        raise PpsdError("the rounds were not run in loops")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="random:smollm2-135m")
    parser.add_argument("--exit-head", default="norm:6:8192")
    parser.add_argument("--oracle", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("-r", "--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    try:
        rows = compare(args)
    except PpsdError as error:
        print(f"gpu_loop: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"measurement": "gpu-loop", "model": args.model, "oracle": args.oracle, "results": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
