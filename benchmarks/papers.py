"""The papers' claims beside what this runtime does: measures, keeps results and fills in docs/papers.md.

    python benchmarks/papers.py --quick      # less than an hour on two cores; says what each part took
    python benchmarks/papers.py              # some hours; goes on where it was ended
    python benchmarks/papers.py --only lossless,clock
    python benchmarks/papers.py --page       # measures nothing: tables of the results that are there

Experiments are in paper_experiments/. Each leaves benchmarks/results/papers/NAME.json, part by part. A part that is
there is not measured again, unless with --again, or if it was measured with --quick and now is not.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from paper_experiments import EXPERIMENTS, Experiment
from paper_experiments.experiment import NotGiven
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ppsd_rt.cli.info import machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "papers"
PAGE = ROOT / "docs" / "papers.md"


def kept(path: Path, quick: bool, again: bool) -> dict[str, Any]:
    """What earlier runs have measured, as far as it counts for this one."""
    if again or not path.exists():
        return {}
    result = json.loads(path.read_text(encoding="utf-8"))
    return result["parts"] if quick or not result["quick"] else {}


def measure(experiment: Experiment, folder: Path, args: argparse.Namespace, progress: Progress) -> None:
    """What is missing of an experiment; every part is written as soon as it is there."""
    path, parts = folder / f"{experiment.name}.json", experiment.parts(args.quick)
    found = kept(path, args.quick, args.again)
    missing = [name for name in parts if name not in found]
    task = progress.add_task(experiment.name, total=len(parts), completed=len(parts) - len(missing))
    for name in missing:
        progress.update(task, description=f"{experiment.name}: {name}")
        begun, used = monotonic(), cpu_seconds()
        value = parts[name]()
        facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(monotonic() - begun, 1)}
        facts["cpu_seconds"] = round(cpu_seconds() - used, 1)
        # The load says how far the cores were others'.
        found[name] = {**facts, "load": os.getloadavg()[0], "machine": machine(), "found": value}
        result = {"measurement": "papers", "experiment": experiment.name, "quick": args.quick}
        in_order = {name: found[name] for name in parts if name in found}
        result |= {"command": f"python benchmarks/papers.py --only {experiment.name}", "parts": in_order}
        result["command"] += " --quick" if args.quick else ""
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(result) + "\n", encoding="utf-8")
        partial.replace(path)
        progress.advance(task)
    progress.update(task, description=experiment.name)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for: what a part takes however busy the machine is."""
    return sum(os.times()[:4])


def times(experiment: Experiment, folder: Path) -> str:
    """A line: how long the parts took that are there."""
    path = folder / f"{experiment.name}.json"
    parts = json.loads(path.read_text(encoding="utf-8"))["parts"] if path.exists() else {}
    each = ", ".join(f"{name}: {part['seconds']:.0f} s" for name, part in parts.items())
    return f"{experiment.name}: {sum(part['seconds'] for part in parts.values()):.0f} s ({each})"


def found_in(path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text(encoding="utf-8"))
    return {name: part["found"] for name, part in result["parts"].items()}


def filled(page: str, name: str, text: str) -> str:
    """The page with the text between the experiment's two marks."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = page.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise SystemExit(f"papers.py: {PAGE.name} has no place for {name}: {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def publish(experiments: Sequence[Experiment], folder: Path, page: Path) -> None:
    """Tables of all results that are there."""
    text = page.read_text(encoding="utf-8")
    for experiment in experiments:
        path = folder / f"{experiment.name}.json"
        if path.exists():
            text = filled(text, experiment.name, experiment.table(found_in(path)))
    page.write_text(text, encoding="utf-8")


def chosen(names: str) -> list[Experiment]:
    known = {experiment.name: experiment for experiment in EXPERIMENTS}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise SystemExit(f"papers.py: {unknown[0]!r} is no experiment; there are {', '.join(known)}")
    return [known[name] for name in names.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter, with fewer settings")
    parser.add_argument("--only", metavar="NAMES", help="A,B,... [all that have the files they need]")
    parser.add_argument("--again", action="store_true", help="measure what is there once more")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    args = parser.parse_args(arguments)
    experiments = chosen(args.only) if args.only else EXPERIMENTS
    RESULTS.mkdir(parents=True, exist_ok=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for experiment in () if args.page else experiments:
            try:
                measure(experiment, RESULTS, args, progress)
            except NotGiven as lacking:
                if args.only:
                    raise
                progress.console.print(f"{lacking}: {experiment.name} is left out", markup=False)
                continue
            progress.console.print(times(experiment, RESULTS), markup=False)
    publish(EXPERIMENTS, RESULTS, PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
