"""Is `auto` never slower, from the first tokens on? Answers of a fresh planner against plain decoding, in turns.

    python benchmarks/first_tokens.py --acceptance head,0,0.05,0.3,0.9 -r 3

head: the exit head's own drafts, with copies and siblings. A number: drafts that are right with that probability, while
the head's file claims what it always does. Every answer begins with a planner that has seen no verdict, and stands
between two plain answers to the same prompt. Ratios are the plain time of the first n tokens (the mean of the two) over
that of `auto`. The last line is one JSON object.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.cli.common import as_chat
from ppsd_rt.cli.info import machine
from ppsd_rt.generation import Committed
from ppsd_rt.lab.cli.prompt_files import read_prompts
from ppsd_rt.pipeline.schedule import Auto, Schedule, parse_schedule

LENGTHS = (16, 32, 64, 128, 256)


def seconds_of(
    engine: Engine, ids: list[int], params: SamplingParams, schedule: Schedule | Auto, options: RunOptions
) -> tuple[tuple[int, ...], dict[int, float]]:
    """The answer, and the seconds from its first token to its n-th, for each n of LENGTHS."""
    engine.generate([ids[0]], SamplingParams(max_tokens=1, ignore_eos=True), "plain").run()  # no prefix is left over
    generation = engine.generate(ids, params, schedule, options)
    found: dict[int, float] = {}
    tokens, first, last = 0, 0.0, (0, 0.0)
    for event in generation.events():
        if not isinstance(event, Committed) or event.round.seconds is None:
            continue
        tokens, now = tokens + len(event.tokens), event.round.seconds
        if event.round.prompt:
            first = now
        for length in LENGTHS:
            if length not in found and tokens >= length:  # within a round, tokens are taken to come evenly
                share = (length - last[0]) / (tokens - last[0])
                found[length] = last[1] + share * (now - first - last[1])
        last = (tokens, now - first)
    return generation.completion.ids, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--exit-head", default="auto")
    parser.add_argument("--acceptance", default="head,0,0.05,0.3,0.9")
    parser.add_argument("--dtype", default="int8")
    parser.add_argument("-t", "--threads", type=int, default=None)
    parser.add_argument("--prompts", type=Path, help="JSON lines [the bundled ones]")
    parser.add_argument("--limit", type=int, default=6, help="prompts [6]")
    parser.add_argument("-r", "--repeats", type=int, default=3)
    args = parser.parse_args()

    engine = Engine.from_pretrained(args.model, exit_head=args.exit_head, dtype=args.dtype, threads=args.threads)
    params = SamplingParams(max_tokens=max(LENGTHS), ignore_eos=True)
    plain, auto = parse_schedule("plain"), parse_schedule("auto")
    for _ in range(3):  # what the planner works with is measured in the first runs
        engine.use_head(args.exit_head)
        engine.generate("Once", SamplingParams(max_tokens=2), auto).run()
    prompts = read_prompts(args.prompts)[: args.limit]
    rows: list[dict[str, Any]] = []
    for text in args.acceptance.split(","):
        ratios: dict[int, list[float]] = {length: [] for length in LENGTHS}
        for repeat in range(args.repeats):
            for prompt in prompts:
                ids = engine.encode(as_chat(engine, prompt.prompt, raw=False))
                answer, before = seconds_of(engine, ids, params, plain, RunOptions())
                oracle = None if text == "head" else Oracle((*ids, *answer), float(text), seed=repeat)
                engine.use_head(args.exit_head)  # with it begins another planner
                same, took = seconds_of(engine, ids, params, auto, RunOptions(oracle=oracle))
                _, after = seconds_of(engine, ids, params, plain, RunOptions())
                if same != answer:
                    sys.exit(f"{prompt.id}: auto changed the answer")
                for length in LENGTHS:
                    if length in took:
                        ratios[length].append((before[length] + after[length]) / 2 / took[length])
        row: dict[str, Any] = {"acceptance": text, "answers": len(prompts) * args.repeats}
        for length, values in ratios.items():
            if len(values) > 1:
                low, middle, high = statistics.quantiles(values, n=4)
                row[str(length)] = {"median": middle, "quartiles": [low, high], "least": min(values)}
        rows.append(row)
        shown = "  ".join(
            f"{n}: {row[str(n)]['median']:.3f} (least {row[str(n)]['least']:.2f})" for n in LENGTHS if str(n) in row
        )
        print(f"{text:>5}  {shown}", flush=True)
    command = " ".join(["python", "benchmarks/first_tokens.py", *sys.argv[1:]])
    print(
        json.dumps({"command": command, "model": args.model, "dtype": args.dtype, "rows": rows, "machine": machine()})
    )


if __name__ == "__main__":
    main()
