"""Second choices in a pipeline, for real: the default model over slowed-down processes, with siblings and without."""

from functools import partial
from typing import Any

import sleeping_loop

from .experiment import Experiment, Found, Parts, markdown
from .stages import shown

BESIDE = ":siblings=0.01"
SCHEDULES = ("ppsd", "elastic")


def parts(quick: bool) -> Parts:
    return {
        f"{n} stages, {link} ms": partial(part, n, link, 32 if quick else 128) for link in (0, 5) for n in (2, 4, 8)
    }


def part(stages: int, link_ms: float, tokens: int) -> dict[str, Any]:
    names = ",".join(["plain", *SCHEDULES, *(name + BESIDE for name in SCHEDULES), "auto"])
    args = sleeping_loop.parser().parse_args(["--clients", "1", "--schedules", names, "--link-ms", f"{link_ms}"])
    args.tokens = tokens
    rows = [row for row in sleeping_loop.run(args, stages) if not row["in_turn"]]
    return {"stages": stages, "link_ms": link_ms, "tokens": tokens, "token_ms": args.token_ms, "rows": rows}


def table(found: Found) -> str:
    rows = []
    for measured in found.values():
        speeds = {row["schedule"]: row["tokens_per_second"] for row in measured["rows"]}
        times = {name: speed / speeds["plain"] for name, speed in speeds.items()}
        for name in SCHEDULES:
            without, beside = times[name], times[name + BESIDE]
            values = map(shown, (without, beside, beside / without, times["auto"]))
            rows.append((str(measured["stages"]), f"{measured['link_ms']:g}", name, *values))
    head = ("stages", "link, ms", "schedule", "without", "with siblings", "gain", "`auto`")
    return markdown(head, rows, left=3)


SIBLINGS = Experiment("siblings", parts, table)
