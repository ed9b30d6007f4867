"""Speed-up against stages: closed form, simulator, and processes whose stages sleep for what they cost."""

import os
from functools import partial
from typing import Any

import sleeping_ranks

from ppsd_rt.lab.bench.plot import Chart, Line, Panel

from .experiment import Experiment, Found, Parts, markdown

# A part each: the planner of `auto` changes more often than the others.
KINDS = {"": [name for name in sleeping_ranks.SCHEDULES if name != "auto"], ", auto": ["auto"]}


def parts(quick: bool) -> Parts:
    stages, links = (2, 4, 8, 16), (0, 5) if quick else (0, 1, 5)
    options = ["--acceptance", "0.8"] if quick else []
    options += ["-n", "40", "-r", "1"] if quick else ["-n", "128", "-r", "2"]
    return {
        f"{n} stages, {link} ms{kind}": partial(part, [*options, "--schedules", ",".join(names)], n, link)
        for link in links
        for n in stages
        for kind, names in KINDS.items()
    }


def part(options: list[str], stages: int, link_ms: float) -> dict[str, Any]:
    args = sleeping_ranks.parser().parse_args(options)
    measured = sleeping_ranks.measure(args, stages, link_ms)
    return {"tokens": args.tokens, "load": round(os.getloadavg()[0], 1), **measured}


def middle(rows: list[dict[str, Any]], key: str) -> float | None:
    values = sorted(row[key] for row in rows if row.get(key) is not None)
    return values[len(values) // 2] if values else None


def of(part: dict[str, Any], schedule: str, acceptance: float) -> list[dict[str, Any]]:
    return [row for row in part["rows"] if (row["schedule"], row["acceptance"]) == (schedule, acceptance)]


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def table(found: Found) -> str:
    rows = []
    for part in found.values():
        for name in sleeping_ranks.SCHEDULES:
            if not (mine := of(part, name, 0.8)):
                continue
            values = [middle(mine, key) for key in ("speedup", "simulated", "over_simulated", "closed_form")]
            rows.append((str(part["stages"]), f"{part['link_ms']:g}", f"{part['load']:.0f}", name, *map(shown, values)))
    head = ("stages", "link, ms", "load", "schedule", "processes", "simulator", "processes / simulator", "closed form")
    return markdown(head, rows, left=4)


def charts(found: Found) -> dict[str, Chart]:
    acceptances = sorted({row["acceptance"] for part in found.values() for row in part["rows"]})
    links = sorted({part["link_ms"] for part in found.values()})
    panels = []
    for acceptance in acceptances:
        for link in links:
            lines = []
            for name in sleeping_ranks.SCHEDULES:
                each = [(p["stages"], of(p, name, acceptance)) for p in found.values() if p["link_ms"] == link]
                each = [(stages, rows) for stages, rows in each if rows]
                model = [(n, speed) for n, rows in each if (speed := middle(rows, "simulated"))]
                lines += [Line(name, model, dashed=True)] if model else []
                lines.append(Line(name, [(n, middle(rows, "speedup") or 0.0) for n, rows in each]))
            panels.append(Panel(f"acceptance {acceptance:g}, links of {link:g} ms", lines))
    chart = Chart(
        "Processes whose stages sleep", "stages", "speed-up (times plain)", panels, len(links), dashed="simulator"
    )
    return {"stages": chart}


STAGES = Experiment("stages", parts, table, charts)
