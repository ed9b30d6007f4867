"""Is the answer that of plain decoding? What campaigns have counted."""

import json
from pathlib import Path
from typing import Any

from .experiment import Experiment, Found, Parts, markdown

RESULTS = Path(__file__).parents[1] / "results"


def parts(quick: bool) -> Parts:
    return {"campaigns": lambda: [campaign(path) for path in sorted(RESULTS.glob("*-check-*.json"))]}


def campaign(path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text(encoding="utf-8"))
    schedules = result["by"]["schedule"].values()
    keys = ("date", "cpu", "build", "seed", "answers", "tokens")
    return {"file": path.name, "differences": sum(each["differences"] for each in schedules)} | {
        key: result[key] for key in keys
    }


def table(found: Found) -> str:
    rows = [
        (f"`{c['file']}`", c["cpu"], str(c["seed"]), *(f"{c[key]:,}" for key in ("answers", "tokens", "differences")))
        for c in found["campaigns"]
    ]
    longest: dict[int, dict[str, Any]] = {}  # campaigns of one seed begin with the same cases: each seed counts once
    for c in sorted(found["campaigns"], key=lambda c: int(c["tokens"])):
        longest[c["seed"]] = c
    answers, tokens, differences = (sum(c[k] for c in longest.values()) for k in ("answers", "tokens", "differences"))
    counts = (f"{answers:,}", f"{tokens:,}", f"{differences:,}")
    rows.append(("**the longest of each seed**", "", ", ".join(map(str, sorted(longest))), *counts))
    if not differences:  # the rule of three
        rows.append(("at 95 % confidence, fewer than", "", "", f"{3 / answers:.1e}", f"{3 / tokens:.1e}", ""))
    return markdown(("campaign", "processor", "seed", "answers", "tokens", "answers that differ"), rows, left=3)


LOSSLESS = Experiment("lossless", parts, table)
