"""Pipelines over ranks of one host, against plain decoding on the same ranks, formulas, simulator and one process.

    python benchmarks/ranks.py --stages 17,13 --acceptance 0.6,0.8,0.9 > benchmarks/results/...-ranks.json
    python benchmarks/ranks.py --stages 17,13 --link-ms 0.1,1,5 --schedules plain,eesd,ppsd,elastic,auto
    python benchmarks/ranks.py --stages 3,27 --trained --seeds 6      # with the exit head that ships

For every link delay the ranks are started anew by torchrun. Drafts come from an oracle of the given acceptance, through
an untrained head of one layer and 8192 ids after the first stage (the work is what a trained one would do). With
`--trained` they come from the head that ships, on one development prompt of each family. Schedules
take turns, so that slow moments of the machine hit all of them; of the repeats of one answer the lower quartile counts.
Formula and simulator get the acceptance that the oracle's coins came to. Every answer is compared with
plain decoding's. Stages are timed right before each round of schedules, for the machine changes its pace from minute to
minute; over_simulated: the median of answers, each against the simulator with the costs of its own moment.
closed_form: with the costs of each rank by itself; closed_form_beside: of all at work at once, against plain decoding.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ppsd_rt import Engine, SamplingParams
from ppsd_rt._native import StageCosts
from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.cli.info import machine
from ppsd_rt.lab.cli.prompt_files import first_of_each_family, read_prompts
from ppsd_rt.lab.simulate import simulate
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import HeadInfo, save_head
from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.pipeline.schedule import Schedule, parse_schedule
from ppsd_rt.planning.closed_forms import closed_form
from ppsd_rt.ranks.world import find_world

PROMPT = "Why is the sky blue?"
DRAFT_VOCABULARY = 8192
MEASURED = "measured:"  # begins the line with the worker's result


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


def measure(engine: Engine, args: argparse.Namespace, costs: Callable[[], Any] | None) -> dict[str, Any]:
    """Every schedule at every acceptance (None: what the head has), and the costs right before each round of them.

    tokens: of each seed's answer, after the first one.
    """
    params = SamplingParams(max_tokens=args.tokens, ignore_eos=not args.trained)
    prompts = [engine.encode([{"role": "user", "content": question}]) for question in questions(args)]
    truths = [engine.generate(prompt, params, "plain").run().ids for prompt in prompts]
    moments: list[Any] = []
    times: dict[tuple[str, float | None, int], list[float]] = {}
    judged: dict[tuple[float | None, int], tuple[int, int]] = {}
    work: dict[tuple[str, float | None], list[list[tuple[float, float]]]] = {}
    for _ in range(args.repeats):
        for acceptance in args.acceptance:
            for seed, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
                if costs:
                    moments.append({"acceptance": acceptance, "seed": seed, "costs": costs()})
                for name in args.schedules:
                    drafts = name != "plain" and acceptance is not None
                    options = RunOptions(oracle=Oracle((*prompt, *truth), acceptance, seed) if drafts else None)
                    earlier = report(engine)
                    completion = engine.generate(prompt, params, name, options).run()
                    count_work(work.setdefault((name, acceptance), []), earlier, report(engine))
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
            speed = sum(tokens) / sum(quartile(each) for each in seconds)
            rows.append(
                {"schedule": name, "acceptance": acceptance, "realised": realised, "tokens_per_second": speed}
                | {"seconds": seconds, "seconds_a_piece": middle(work[name, acceptance])}
            )
    return {"rows": rows, "tokens": tokens, "moments": moments, "reports": report(engine)}


def quartile(seconds: list[float]) -> float:
    """The lower one of repeats of the same answer: what it takes when nothing disturbs it."""
    return sorted(seconds)[len(seconds) // 4]


def report(engine: Engine) -> list[list[float]]:
    """Of every rank, see ppsd_rt/ranks/report.py; empty where there are none."""
    ask = getattr(engine.backend, "report", None)
    return ask() if ask else []


def count_work(into: list[list[tuple[float, float]]], before: list[list[float]], after: list[list[float]]) -> None:
    """How many pieces of work an answer took on every rank, and the seconds of one of them."""
    pieces = [(b[3] - a[3], b[5] - a[5]) for a, b in zip(before, after, strict=True)]
    into.append([(count, seconds / count if count else 0.0) for count, seconds in pieces])


def middle(answers: list[list[tuple[float, float]]]) -> list[float]:
    """Seconds of a piece of work on every rank: the median of the answers."""
    return [sorted(each[1] for each in rank)[len(rank) // 2] for rank in zip(*answers, strict=True)]


def work(args: argparse.Namespace) -> None:
    """As a rank, or as the one process: prints the result after MEASURED."""
    world = find_world()
    if world is None:
        engine = Engine.from_pretrained(
            args.model, exit_head=args.head, backend="cpu", dtype=args.dtype, threads=args.threads
        )
        print(MEASURED, json.dumps(measure(engine, args, None)))
        return
    from ppsd_rt.ranks.launch import join, leave
    from ppsd_rt.ranks.options import RankOptions

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
        known = getattr(joined.backend, "measure", None)
        costs = (lambda: [c.to_dict() for c in known()]) if known else None
        print(MEASURED, json.dumps(measure(joined, args, costs)), flush=True)
    leave(joined, 0)


# -- the driver --------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, ranks: int, **changes: Any) -> dict[str, Any]:
    """With the head that ships, or an untrained one after the first stage."""
    with tempfile.TemporaryDirectory() as folder:
        head = "auto" if args.trained else str(Path(folder) / "head.safetensors")
        if not args.trained:
            untrained_head(args.model, args.stages[0], Path(head))
        return run_with(head, args, ranks, **changes)


def run_with(head: str, args: argparse.Namespace, ranks: int, **changes: Any) -> dict[str, Any]:
    values = {**vars(args), **changes}
    options = ["--worker", "-m", args.model, "--head", head, "--dtype", args.dtype]
    options += ["-n", str(args.tokens), "-r", str(args.repeats), "--seeds", str(args.seeds)]
    options += ["--trained"] if args.trained else []
    for name in ("acceptance", "schedules", "stages", "link_ms"):
        if values[name] and values[name] != [None]:
            options += ["--" + name.replace("_", "-"), ",".join(map(str, values[name]))]
    if values["threads"]:
        options += ["--threads", str(values["threads"])]
    lines = [line for line in launch(__file__, ranks, options).splitlines() if line.startswith(MEASURED)]
    return json.loads(lines[0].removeprefix(MEASURED))


def launch(script: str, ranks: int, options: list[str]) -> str:
    """What it prints."""
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, script, *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode or not done.stdout:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def pipeline(args: argparse.Namespace, delay: float) -> dict[str, Any]:
    """Of len(args.stages) ranks, with links of `delay` milliseconds."""
    result = run(args, len(args.stages), link_ms=[delay])
    compare(args, result, delay / 1000)
    return result


def one_process(args: argparse.Namespace, threads: int) -> dict[str, Any]:
    return run(args, 1, threads=threads, stages=None)


def compare(args: argparse.Namespace, result: dict[str, Any], delay: float) -> None:
    """Beside every row: the ratio to plain, the formula, and the simulator with the costs that were measured."""
    moments = [
        (moment["acceptance"], moment["seed"], *map(StageCosts.from_dict, moment["costs"]))
        for moment in result.pop("moments")
    ]
    free, busy = mean([moment[2] for moment in moments]), mean([moment[3] for moment in moments])
    shared = overlapped(free, busy)
    slowed = free.plain_step / busy.plain_step
    result["link_ms"] = 1000 * delay
    result["stage_ms"] = [1000 * free.row_step, *(1000 * verify[0] for verify in free.stages)]
    result["exit_head_ms"] = 1000 * (free.draft_step - free.row_step)
    result["measured_link_ms"] = 1000 * free.links[0]
    result["interference"] = [shared.draft_interference, shared.verify_interference]
    plain = {row["acceptance"]: row for row in result["rows"] if row["schedule"] == "plain"}
    for row in result["rows"]:
        row["speedup"] = row["tokens_per_second"] / plain[row["acceptance"]]["tokens_per_second"]
        schedule, acceptance = parse_schedule(row["schedule"]), row["realised"] or 0.0  # 0: nothing was drafted
        if not isinstance(schedule, Schedule):
            continue
        row["closed_form"] = closed_form(schedule, free, acceptance)
        formula = closed_form(schedule, busy, acceptance)
        row["closed_form_beside"] = formula * (slowed if schedule.overlap else 1) if formula else None
        then = [
            [
                predicted(tokens, schedule, overlapped(alone, beside), acceptance)
                for at, of, alone, beside in moments
                if (at, of) == (row["acceptance"], seed)
            ]
            for seed, tokens in enumerate(result["tokens"])
        ]
        row["simulated"] = median(speed for speeds in then for speed in speeds)
        row["over_simulated"] = median(
            tokens / seconds / speed
            for tokens, answers, speeds in zip(result["tokens"], row["seconds"], then, strict=True)
            for seconds, speed in zip(answers, speeds, strict=True)
        )
        usual = round(fmean(result["tokens"]))
        row["simulated_in_place"] = predicted(usual, schedule, in_place(free, row["seconds_a_piece"]), acceptance)
        row["simulated_free"] = predicted(usual, schedule, free, acceptance)
    for acceptance, reference in plain.items():
        named = [r for r in result["rows"] if r["acceptance"] == acceptance and r["schedule"] != "auto"]
        best = max(named, key=lambda r: r["tokens_per_second"])
        for row in result["rows"]:
            if row["acceptance"] == acceptance:
                row["of_best"] = row["tokens_per_second"] / best["tokens_per_second"]
        reference["best"] = best["schedule"]


def overlapped(alone: StageCosts, beside: StageCosts) -> StageCosts:
    """Each rank alone, and how many times longer they take beside each other."""
    from ppsd_rt.ranks.costs import side_by_side

    costs = side_by_side(alone, beside).overlapped
    assert costs is not None
    return costs


def in_place(costs: StageCosts, pieces: list[float]) -> StageCosts:
    """With what a draft step and a pass took in this row's own answers; they grow with rows as was measured."""
    draft = pieces[0] / costs.draft_step if pieces[0] else 1.0
    verify = tuple(
        tuple(s * piece / table[0] for s in table) for table, piece in zip(costs.stages, pieces[1:], strict=True)
    )
    return costs.replace(row_step=costs.row_step * draft, draft_step=costs.draft_step * draft, verify=verify)


def predicted(tokens: int, schedule: Schedule, costs: StageCosts, acceptance: float) -> float:
    """Tokens per second of answers of this length, over several seeds."""
    runs = [simulate(schedule, costs, acceptance, tokens, seed=seed) for seed in range(8)]
    return sum(len(r.tokens) for r in runs) / sum(r.seconds for r in runs)


def mean(costs: list[StageCosts]) -> StageCosts:
    def middle(values: list[Any]) -> Any:
        if isinstance(values[0], dict):
            return {name: middle([value[name] for value in values]) for name in values[0]}
        if isinstance(values[0], list | tuple):
            return [middle(list(places)) for places in zip(*values, strict=True)]
        return sum(values) / len(values)

    return StageCosts.from_dict(middle([c.to_dict() for c in costs]))


def numbers(text: str) -> list[float]:
    return [float(item) for item in text.split(",")]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--stages", type=lambda t: list(map(int, t.split(","))), help="layers of each rank")
    parser.add_argument("--acceptance", type=numbers, default=[0.6, 0.8, 0.9])
    parser.add_argument("--link-ms", type=numbers, default=[0.0])
    parser.add_argument("--schedules", type=lambda t: t.split(","), default=["plain", "ppsd", "elastic"])
    parser.add_argument("-n", "--tokens", type=int, default=192)
    parser.add_argument("-r", "--repeats", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=2, help="of the oracle")
    parser.add_argument("-t", "--threads", type=int)
    parser.add_argument("--dtype", default="int8", help="float32, bfloat16, int8 or int4 [int8]")
    parser.add_argument("--one-process", action="store_true", help="also one process with as many threads as ranks")
    parser.add_argument("--trained", action="store_true", help="drafts of the head that ships, and no oracle")
    parser.add_argument("--head", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def parsed(options: Sequence[str] | None = None) -> argparse.Namespace:
    args = parser().parse_args(options)
    if args.trained:
        args.acceptance = [None]
    return args


def main() -> int:
    args = parsed()
    if args.worker:
        work(args)
        return 0
    ranks = len(args.stages)
    report: dict[str, Any] = {"machine": machine(), "stages": args.stages, "tokens": args.tokens}
    report["results"] = [pipeline(args, delay) for delay in args.link_ms]
    if args.one_process:
        report["one_process"] = one_process(args, args.threads or ranks)
    for result in report["results"]:
        note(
            f"stages {result['stage_ms']} ms, head {result['exit_head_ms']:.3f}, "
            f"link {result['measured_link_ms']:.3f}, interference {result['interference']}"
        )
        for row in result["rows"]:
            keys = ("speedup", "closed_form", "closed_form_beside", "simulated", "over_simulated")
            keys += ("simulated_in_place", "of_best")
            note(
                f"link {result['link_ms']:g} α {row['realised'] or 0:.2f} {row['schedule']:10} "
                f"{row['tokens_per_second']:7.1f} tok/s "
                + " ".join(f"{key} {row[key]:.2f}" for key in keys if row.get(key))
            )
    for row in report.get("one_process", {}).get("rows", []):
        note(f"one process α {row['realised'] or 0:.2f} {row['schedule']:10} {row['tokens_per_second']:7.1f} tok/s")
    print(json.dumps(report, indent=1))
    return 0


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
