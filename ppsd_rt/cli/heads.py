"""`ppsd-run heads`: exit heads side by side, by what counts: how often they are right, what a draft costs, the speed."""

import argparse
from pathlib import Path

from ..bench.heads import COLUMNS, HeadMeasure, measure_head, speeds_plot
from ..bench.report import Report
from ..engine import Engine
from ..errors import PpsdError, UsageError
from .bench import print_report, run_facts
from .common import first_of_each_family, read_prompts
from .progress import progress_bar


def run(args: argparse.Namespace) -> int:
    prompts = first_of_each_family(read_prompts(args.prompts), args.limit)
    measures: list[HeadMeasure] = []
    engines = {name: _engine(args, name) for name in args.heads}
    with progress_bar("drafting") as advance:
        for number, (name, engine) in enumerate(engines.items()):
            head = engine.head
            if head is None:
                raise UsageError(f"{name} is no exit head: nothing can be drafted")
            done = number * len(prompts)

            def tick(prompt: int, done: int = done) -> None:
                advance(done + prompt, len(engines) * len(prompts))

            measures.append(measure_head(engine, Path(name).stem, prompts, args.max_tokens, args.length, tick))
    first = engines[args.heads[0]].backend
    facts = run_facts("heads", args.model) | {"dtype": first.dtype, "threads": first.threads, "prompts": len(prompts)}
    title = f"{len(prompts)} prompts, up to {args.max_tokens} tokens, drafts of {args.length}: {first.dtype}"
    best = max(measures, key=lambda measure: measure.speed)
    summary = {"best": best.name, "predicted_speed": round(best.speed, 3), "results": [m.as_dict() for m in measures]}
    if args.plot:
        try:
            Path(args.plot).write_text(speeds_plot(measures), encoding="utf-8")
        except OSError as error:
            raise PpsdError(f"cannot write --plot to {args.plot}: {error.strerror}") from None
    print_report(Report(title, COLUMNS, [m.as_row() for m in measures], facts, summary), args.output)
    return 0


def _engine(args: argparse.Namespace, name: str) -> Engine:
    return Engine.from_pretrained(
        args.model, exit_head=name, backend="cpu", dtype=args.dtype, threads=args.threads, device="cpu"
    )
