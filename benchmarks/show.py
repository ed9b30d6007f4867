"""A result file as a table in Markdown: python benchmarks/show.py benchmarks/results/...-generate.json"""

import json
import sys
from pathlib import Path
from typing import Any

from peers import COLUMNS as PEERS
from peers import QUALITY_COLUMNS
from peers_prompts import COLUMNS as PEERS_PROMPTS

from ppsd_rt.lab.bench.generate import COLUMNS as GENERATE
from ppsd_rt.lab.bench.kernels import COLUMNS as KERNELS
from ppsd_rt.lab.bench.report import Report
from ppsd_rt.lab.bench.spread import Spread
from ppsd_rt.lab.cli.eval import COLUMNS as EVAL

KNOWN = {
    "kernels": KERNELS,
    "generate": GENERATE,
    "eval": EVAL,
    "peers": PEERS,
    "peers-prompts": PEERS_PROMPTS,
}


def report(result: dict[str, Any]) -> Report:
    """As it was before it became JSON, without the columns that hold nothing."""
    rows = [
        {key: _value(value) for key, value in row.items()}
        for row in (result["rows"] if "rows" in result else result["results"])
    ]
    quality = "window" in result and result["measurement"] == "peers"
    columns = QUALITY_COLUMNS if quality else KNOWN[result["measurement"]]
    used = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    return Report(result["measurement"], used, rows, {})


def _value(value: Any) -> Any:
    return Spread(tuple(value["samples"])) if isinstance(value, dict) else value


if __name__ == "__main__":
    for name in sys.argv[1:]:
        result = json.loads(Path(name).read_text(encoding="utf-8"))
        if result.get("measurement") not in KNOWN:
            sys.exit(f"{name} is of no kind that has a table: {', '.join(KNOWN)}")
        machine = result["machine"]
        print(f"`{result['command']}`, {result['date']}, {machine['cpu']} ({machine['cores']} cores)\n")
        print(report(result).lines("md").rsplit("\n", 2)[0] + "\n")
