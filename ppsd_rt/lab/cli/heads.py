"""`ppsd-run heads`: exit heads side by side: how often they are right, what a draft costs, the speed to expect."""

import argparse
from pathlib import Path
from typing import Any

from ...cli.progress import progress_bar
from ...engine import Engine
from ...errors import UsageError
from ..bench.heads import COLUMNS, HeadMeasure, measure_head, speeds_chart
from ..bench.plot import PlotFile
from ..bench.report import Report
from .bench import interrupted, print_report, result_file, run_facts
from .prompt_files import first_of_each_family, read_prompts


def run(args: argparse.Namespace) -> int:
    file = result_file(args)
    prompts = first_of_each_family(read_prompts(args.prompts), args.limit)
    plot = PlotFile(args.plot, [args.prompts, args.model, *args.heads]) if args.plot else None
    measures: list[HeadMeasure] = []
    whole = True
    engines = {name: _engine(args, name) for name in args.heads}
    if none := [name for name, engine in engines.items() if engine.head is None]:
        raise UsageError(f"{none[0]} is no exit head: nothing can be drafted")
    with progress_bar("drafting") as advance:
        for number, (name, engine) in enumerate(engines.items()):
            done = number * len(prompts)

            def tick(prompt: int, done: int = done) -> None:
                advance(done + prompt, len(engines) * len(prompts))

            measure, whole = measure_head(engine, _short(name), prompts, args.max_tokens, args.length, tick)
            measures += [measure] if measure else []
            if not whole:
                break
    if not measures:
        raise KeyboardInterrupt
    first = engines[args.heads[0]].backend
    facts = run_facts("heads", args.model) | {"dtype": first.dtype, "threads": first.threads, "prompts": len(prompts)}
    title = f"{len(prompts)} prompts, up to {args.max_tokens} tokens, drafts of {args.length}: {first.dtype}"
    best = max(measures, key=lambda measure: measure.speed)
    summary: dict[str, Any] = {"interrupted": not whole, "best": best.name, "predicted_speed": round(best.speed, 3)}
    summary["results"] = [measure.as_dict() for measure in measures]
    print_report(Report(title, COLUMNS, [m.as_row() for m in measures], facts, summary), args.output, file)
    if plot:
        plot.finish(speeds_chart(measures))
    return 0 if whole else interrupted()


def _short(name: str) -> str:
    """Of a file, a folder or a hub name, what is last in it."""
    return Path(name).name.removesuffix(".safetensors")


def _engine(args: argparse.Namespace, name: str) -> Engine:
    return Engine.from_pretrained(
        args.model,
        exit_head=name,
        backend="cpu",
        device="cpu",
        dtype=args.dtype,
        threads=args.threads,
    )
