"""Is the answer that of plain decoding? What the campaigns of `ppsd-run check` have counted."""

import json
from pathlib import Path
from typing import Any

from .experiment import Claim, Experiment, Found, Parts, markdown

RESULTS = Path(__file__).parents[1] / "results"


def parts(quick: bool) -> Parts:
    return {"campaigns": lambda: [campaign(path) for path in sorted(RESULTS.glob("*check*.json"))]}


def campaign(path: Path) -> dict[str, Any]:
    result = json.loads(path.read_text(encoding="utf-8"))
    schedules = result["by"]["schedule"].values()
    keys = ("date", "cpu", "build", "answers", "tokens")
    return {"file": path.name, "differences": sum(each["differences"] for each in schedules)} | {
        key: result[key] for key in keys
    }


def table(found: Found) -> str:
    rows = [
        (f"`{c['file']}`", c["cpu"], f"{c['answers']:,}", f"{c['tokens']:,}", str(c["differences"]))
        for c in found["campaigns"]
    ]
    return markdown(("campaign", "processor", "answers", "tokens", "answers that differ"), rows, left=2)


LOSSLESS = Experiment(
    "lossless",
    (
        Claim("PPSD", "abstract", "the output is that of the model (greedy; no rule for sampling is given)"),
        Claim("EESD", "abstract", "the output distribution is kept"),
    ),
    parts,
    table,
)
