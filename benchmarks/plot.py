"""A result file as a chart: python benchmarks/plot.py benchmarks/results/...-generate.json FILE.svg (or .png)

bench generate, peers.py, peers_prompts.py: decode speed, with the range of the repeats. bench kernels: what more rows
cost. simulate: as its --plot draws it. ranks.py: measured and simulated speed-ups over plain decoding on those ranks.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ppsd_rt.errors import PpsdError
from ppsd_rt.lab.bench.plot import Chart, Line, Panel, PlotFile
from ppsd_rt.lab.cli.simulate import chart as simulate_chart

Row = dict[str, Any]
Name = Callable[[Row], str]


def middle(value: Any) -> float:
    return value["median"] if isinstance(value, dict) else value


def distinct(name: Name, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each name, in the order of the names' first ones."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(name(row), []).append(row)
    return found


def threads(row: Row) -> str:
    return f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"


def decode_speeds(rows: Sequence[Row], category: Name, series: Name, panel: Name) -> Chart:
    """Categories from top to bottom, one mark for each of a series."""
    categories = list(distinct(category, rows))

    def line(name: str, rows: Sequence[Row]) -> Line:
        speeds = [row["decode_tokens_per_second"] for row in rows]
        points = [(middle(s), categories.index(category(row))) for s, row in zip(speeds, rows, strict=True)]
        ranges = [(s["least"], s["most"]) if isinstance(s, dict) else (s, s) for s in speeds]
        return Line(name, points, ranges=ranges)

    panels = [
        Panel(title, [line(name, mine) for name, mine in distinct(series, some).items()])
        for title, some in distinct(panel, rows).items()
    ]
    return Chart("Decoding, medians and ranges", "decode speed (tokens/s)", "", panels, categories=categories)


def generate(result: Row) -> Chart:
    def schedule(row: Row) -> str:
        oracle = row.get("oracle")
        return row["schedule"] + (f", oracle {oracle:g}" if oracle is not None else "")

    def series(row: Row) -> str:
        return f"{row['dtype']}, {threads(row)}"

    def workload(row: Row) -> str:
        unit = "" if "prompt" in row["workload"] else " prompt tokens"
        return f"{row['workload']}{unit}, up to {row['max_tokens']} tokens"

    return decode_speeds(rows_of(result), schedule, series, workload)


def peers(result: Row) -> Chart:
    return decode_speeds(
        rows_of(result),
        lambda row: " ".join(filter(None, (row["engine"], row.get("format")))),
        threads,
        lambda row: f"after {row['prompt_tokens']} prompt tokens" if "prompt_tokens" in row else "development prompts",
    )


def kernels(result: Row) -> Chart:
    """Time of n rows by the time of the fewest, at each number format, instruction set and number of threads."""

    def line(name: str, rows: Sequence[Row]) -> Line:
        fewest = middle(min(rows, key=lambda row: row["rows"])["milliseconds"])
        return Line(name, [(row["rows"], middle(row["milliseconds"]) / fewest) for row in rows])

    panels = [
        Panel(title, [line(name, mine) for name, mine in distinct(lambda row: row["kernel"], some).items()])
        for title, some in distinct(lambda r: f"{r['dtype']}, {r['isa']}, {threads(r)}", rows_of(result)).items()
    ]
    return Chart("Kernels over several rows", "rows", "time (times that of fewest rows)", panels, min(3, len(panels)))


def simulated(result: Row) -> Chart:
    return simulate_chart(rows_of(result))


def ranks(result: Row) -> Chart:
    """Two panels for each link delay: measured speed-ups, and those of the simulator."""
    panels = []
    for run in result["results"]:
        plain = {row["acceptance"]: row["simulated"] for row in run["rows"] if row["schedule"] == "plain"}
        measured, predicted = [], []
        for name, rows in distinct(lambda row: row["schedule"], run["rows"]).items():
            formula = [(row["acceptance"], row["closed_form"]) for row in rows if row.get("closed_form")]
            dashed = [Line(name, formula, dashed=True)] if formula else []
            measured += [*dashed, Line(name, [(row["acceptance"], row["speedup"]) for row in rows])]
            model = [(r["acceptance"], r["simulated"] / plain[r["acceptance"]]) for r in rows if "simulated" in r]
            predicted += [*dashed, Line(name, model)] if model else []
        panels += [
            Panel(f"{kind}, {run['link_ms']:g} ms a link", lines)
            for kind, lines in (("measured", measured), ("simulated", predicted))
        ]
    layers = " + ".join(map(str, result["stages"]))
    return Chart(
        f"{len(result['stages'])} ranks, {layers} layers",
        "acceptance",
        "speed-up (times plain)",
        panels,
        2,
        dashed="closed form",
    )


def rows_of(result: Row) -> list[Row]:
    return result["rows"] if "rows" in result else result["results"]


KNOWN = {
    "generate": generate,
    "kernels": kernels,
    "simulate": simulated,
    "peers": peers,
    "peers-prompts": peers,
    "ranks": ranks,
}


def kind_of(result: Row) -> str | None:
    """None: nothing that has a chart."""
    kind = result.get("measurement") or ("ranks" if "stages" in result else None)
    return kind if kind in KNOWN and "window" not in result else None  # window: of quality, not of speed


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    source, target = arguments
    try:
        plot = PlotFile(target, [source])
        result = json.loads(Path(source).read_text(encoding="utf-8"))
        kind = kind_of(result)
        if kind is None:
            raise PpsdError(f"{source} is of no kind that has a chart: {', '.join(KNOWN)}")
        plot.finish(KNOWN[kind](result))
    except (PpsdError, OSError, ValueError) as error:  # ValueError: it is not JSON
        print(f"plot.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
