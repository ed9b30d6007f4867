"""Pipelines over ranks of one host, against plain decoding on the same ranks and one process.

    python benchmarks/ranks.py --stages 17,13 --acceptance 0.6,0.8,0.9 > benchmarks/results/...-ranks.json
    python benchmarks/ranks.py --stages 17,13 --link-ms 0.1,1,5 --schedules plain,eesd,ppsd,elastic,auto
    python benchmarks/ranks.py --stages 3,27 --trained --seeds 6      # with the exit head that ships

For every link delay the ranks are started anew by torchrun. Drafts come from an oracle of the given acceptance, through
an untrained head of one layer and 8192 ids after the first stage (the work is what a trained one would do). With
`--trained` they come from the head that ships, on one development prompt of each family. Schedules
take turns, so that slow moments of the machine hit all of them; of the repeats of one answer the lower quartile counts.
Every answer is compared with plain decoding's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.bench.cli.prompt_files import first_of_each_family, read_prompts
from ppsd_rt.cli.info import machine
from ppsd_rt.cli.values import several
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import HeadInfo, save_head
from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.ranks.world import find_world

PROMPT = "Why is the sky blue?"
DRAFT_VOCABULARY = 8192
MEASURED = "measured:"  # begins the line with a worker's result


def untrained_head(model: str, exit_layer: int, path: Path) -> None:
    """The last layer and the final norm as a head, over the first ids."""
    import numpy as np

    checkpoint = Checkpoint(resolve_model(model))
    prefix = f"model.layers.{checkpoint.config.num_hidden_layers - 1}."
    tensors = {"layers.0." + n.removeprefix(prefix): t for n, t in checkpoint.tensors.items() if n.startswith(prefix)}
    tensors["norm.weight"] = checkpoint.tensors["model.norm.weight"]
    info = HeadInfo("layer", exit_layer, model, checkpoint.hash)
    save_head(path, info, tensors, np.arange(DRAFT_VOCABULARY, dtype=np.int32))


# -- one process, or rank 0 --------------------------------------------------------------------------------------------


def questions(args: argparse.Namespace) -> list[str]:
    """One for each seed: the same for oracles that differ, and one of each family for a trained head."""
    if not args.trained:
        return [PROMPT] * args.seeds
    return [prompt.prompt for prompt in first_of_each_family(read_prompts(None), 1)][: args.seeds]


def measure(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Every schedule at every acceptance (None: what the head has).

    tokens: of each seed's answer, after the first one.
    """
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=not args.trained)
    prompts = [engine.encode([{"role": "user", "content": question}]) for question in questions(args)]
    truths = [engine.generate(prompt, params, "plain").run().ids for prompt in prompts]
    times: dict[tuple[str, float | None, int], list[float]] = {}
    judged: dict[tuple[float | None, int], tuple[int, int]] = {}
    for _ in range(args.repeats):
        for acceptance in args.acceptance:
            for seed, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
                for name in args.schedules:
                    drafts = name != "plain" and acceptance is not None
                    options = RunOptions(oracle=Oracle((*prompt, *truth), acceptance, seed) if drafts else None)
                    completion = engine.generate(prompt, params, name, options).run()
                    if completion.ids != truth:
                        raise SystemExit(f"{name} at {acceptance}: the answer differs from plain decoding")
                    statistics = completion.statistics
                    times.setdefault((name, acceptance, seed), []).append(statistics.decode_seconds)
                    if statistics.judged and (name == "ppsd" or (acceptance, seed) not in judged):
                        # `ppsd` judges nearly every draft.
                        judged[acceptance, seed] = statistics.accepted, statistics.judged
    rows, tokens = [], [len(truth) - 1 for truth in truths]
    for acceptance in args.acceptance:
        right = [judged[acceptance, seed] for seed in range(len(tokens)) if (acceptance, seed) in judged]
        realised = sum(a for a, _ in right) / sum(n for _, n in right) if right else acceptance
        for name in args.schedules:
            seconds = [times[name, acceptance, seed] for seed in range(len(tokens))]
            speed = sum(tokens) / sum(sorted(each)[len(each) // 4] for each in seconds)
            row = {"schedule": name, "acceptance": acceptance, "realised": realised, "tokens_per_second": speed}
            rows.append({**row, "seconds": seconds})
    return {"rows": rows, "tokens": tokens}


def work(args: argparse.Namespace) -> None:
    """As a rank, or as the one process: prints the result after MEASURED."""
    world = find_world()
    if world is None:
        engine = Engine.from_pretrained(
            args.model, exit_head=args.head, backend="cpu", dtype=args.dtype, threads=args.threads
        )
        print(MEASURED, json.dumps(measure(engine, args)))
        return
    from ppsd_rt.ranks.launch import RankOptions, join, leave

    options = RankOptions(
        model=args.model,
        exit_head=args.head,
        dtype=args.dtype,
        threads=args.threads,
        sizes=None if args.stages is None else tuple(args.stages),
        schedule="",
        link_delay=args.link_ms[0] / 1000,
        silence=60.0,  # measurements pause other processes, and these may be paused too
    )
    joined = join(world, options)
    if joined is not None:
        print(MEASURED, json.dumps(measure(joined, args)), flush=True)
    leave(joined, 0)


# -- the driver --------------------------------------------------------------------------------------------------------


def launch(script: str, ranks: int, task: dict[str, Any]) -> Any:
    """What rank 0 of the script, started with `--worker` and the task as JSON, prints after MEASURED."""
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, script, "--worker", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [line for line in done.stdout.splitlines() if line.startswith(MEASURED)]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix(MEASURED))


def run(args: argparse.Namespace, ranks: int, **changes: Any) -> Any:
    """With the head that ships, or an untrained one after the first stage."""
    with tempfile.TemporaryDirectory() as folder:
        head = "auto" if args.trained else str(Path(folder) / "head.safetensors")
        if not args.trained:
            untrained_head(args.model, args.stages[0], Path(head))
        return launch(__file__, ranks, {**vars(args), "head": head, **changes})


def pipeline(args: argparse.Namespace, delay: float) -> dict[str, Any]:
    """Of len(args.stages) ranks, with links of `delay` milliseconds."""
    result = run(args, len(args.stages), link_ms=[delay])
    plain = {r["acceptance"]: r["tokens_per_second"] for r in result["rows"] if r["schedule"] == "plain"}
    for row in result["rows"]:
        row["speedup"] = row["tokens_per_second"] / plain[row["acceptance"]]
    return {"link_ms": delay, **result}


def one_process(args: argparse.Namespace, threads: int) -> Any:
    return run(args, 1, threads=threads)


def parsed(options: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--stages", type=lambda text: list(map(int, text.split(","))), help="layers of each rank")
    parser.add_argument("--acceptance", type=several(float), default=[0.6, 0.8, 0.9])
    parser.add_argument("--link-ms", type=several(float), default=[0.0])
    parser.add_argument("--schedules", type=several(str), default=["plain", "ppsd", "elastic"])
    parser.add_argument("-n", "--tokens", type=int, default=192)
    parser.add_argument("-r", "--repeats", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2, help="of the oracle")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--dtype", default="int8", help="float32, bfloat16, int8 or int4 [int8]")
    parser.add_argument("--one-process", action="store_true", help="also one process with as many threads as ranks")
    parser.add_argument("--trained", action="store_true", help="drafts of the head that ships, and no oracle")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args(options)
    if args.trained:
        args.acceptance = [None]
    return args


def main() -> int:
    args = parsed()
    if args.worker:
        work(argparse.Namespace(**args.worker))
        return 0
    report: dict[str, Any] = {"machine": machine(), "stages": args.stages, "tokens": args.tokens}
    report["results"] = [pipeline(args, delay) for delay in args.link_ms]
    if args.one_process:
        report["one_process"] = one_process(args, args.threads or len(args.stages))
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
