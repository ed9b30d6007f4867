#!/usr/bin/env python3
"""How much of decoding the GPU waits for the host: the idle share of a traced answer, overlapped and in turns.

benchmarks/gpu_idle.py -m random:smollm2-135m --exit-head norm:6:8192 --oracle 0.8      the last line is JSON
"""

import argparse
import json
import os
import sys

from ppsd_rt import Engine, PpsdError, SamplingParams
from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.trace import occupancy


def traced(args: argparse.Namespace, *, in_turns: bool) -> dict[str, object]:
    os.environ["PPSD_CUDA_SERIAL"] = str(int(in_turns))
    engine = Engine.from_pretrained(args.model, exit_head=args.exit_head, backend="cuda", device=args.device)
    prompt, params = list(range(3, 67)), SamplingParams(max_tokens=args.tokens, ignore_eos=True)
    plain = engine.generate(prompt, params, "plain").run()
    options = RunOptions(trace=True, oracle=Oracle((*prompt, *plain.ids), args.oracle, 1))
    for _ in range(2):  # the first one warms up
        answer = engine.generate(prompt, params, args.schedule, options).run()
    if answer.ids != plain.ids:
        raise PpsdError(f"{args.schedule}: the answer differs from plain decoding")
    busy = occupancy(engine.backend.spans())
    return {
        "in_turns": in_turns,
        "idle_share": busy.idle / busy.wall if busy.wall else None,
        "overlap_efficiency": busy.overlap_efficiency,
        "tokens_per_second": answer.statistics.decode_tokens_per_second,
        "plain_tokens_per_second": plain.statistics.decode_tokens_per_second,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="random:smollm2-135m")
    parser.add_argument("--exit-head", default="norm:6:8192")
    parser.add_argument("--schedule", default="elastic")
    parser.add_argument("--oracle", type=float, default=0.8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    try:
        runs = [traced(args, in_turns=in_turns) for in_turns in (False, True)]
    except PpsdError as error:
        print(f"gpu_idle: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"measurement": "gpu-idle", "model": args.model, "schedule": args.schedule, "runs": runs}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
