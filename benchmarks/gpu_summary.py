#!/usr/bin/env python3
"""The results of gpu_check.sh in one JSON file, and a line for each target: met, missed or not measured.

benchmarks/gpu_summary.py FOLDER RESULT     FOLDER holds NAME.json of each part, and `parts` with their exit status;
                                            parts that an earlier RESULT has, and FOLDER has not, stay in it
"""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Results = dict[str, Any]
Check = tuple[str, str, Callable[[Results], float | None], Callable[[float], bool]]


def plain_milliseconds(results: Results, name: str) -> float | None:
    row = find(results, name, "results", schedule="plain")
    return 1e3 / row["decode_tokens_per_second"] if row else None


def on_card(card: str, name: str, results: Results) -> float | None:
    return plain_milliseconds(results, name) if card in results.get("build", {}).get("gpu", "") else None


def best_ratio(results: Results, name: str, oracle: float, overlapped: bool | None = None) -> float | None:
    """Of the schedules (that overlap, that do not) against plain decoding."""
    rows = [row for row in of(results, name, "results") if row.get("oracle") == oracle and row.get("ratio")]
    if overlapped is not None:
        rows = [row for row in rows if row["schedule"].startswith(("ppsd", "elastic")) == overlapped]
        rows = [row for row in rows if row["schedule"] != "auto"]
    return max((row["ratio"] for row in rows), default=None)


def kernel(results: Results, name: str, figure: str, **labels: Any) -> float | None:
    row = find(results, name, "results", **labels)
    return row[figure] if row else None


def default_model(results: Results) -> float | None:
    row = find(results, "answers-default", "results", schedule="auto")
    return row["ratio"] if row else None


def rows_cost(results: Results, name: str) -> float | None:
    one, many = (kernel(results, name, "microseconds", kernel="pass", rows=rows) for rows in (1, 16))
    return many / one if one and many else None


def faster(results: Results, format: str) -> float | None:
    """Plain decoding in bfloat16 over that in a quantised format, of the 8B shape."""
    wide, ours = (find(results, "answers-formats", "results", schedule="plain", dtype=d) for d in ("bfloat16", format))
    return ours["decode_tokens_per_second"] / wide["decode_tokens_per_second"] if wide and ours else None


def against(results: Results, shape: str, field: str = "milliseconds_per_token") -> float | None:
    ours, theirs = plain_milliseconds(results, f"answers-{shape}"), results.get(f"baseline-{shape}", {}).get(field)
    return theirs / ours if ours and theirs else None


def overlap_gain(results: Results) -> float | None:
    """The best schedule that overlaps, against the best that does not: medians of repeated answers in the same part."""
    overlapped, serial = (best_ratio(results, "oracle-135m", 0.8, overlapped=o) for o in (True, False))
    return overlapped / serial if overlapped and serial else None


def idle_share(results: Results) -> float | None:
    """Of the time between launches; graphs are black boxes in it, see `inside_graphs`."""
    return next((run["idle_share"] for run in of(results, "idle-135m", "runs") if not run["in_turns"]), None)


def inside_graphs(results: Results) -> float | None:
    """Of a captured pass over one row, the share that its kernels do not take where each is timed alone."""
    names = ("qkv", "attention", "output", "gate_up", "down", "lm_head")
    rows = [find(results, "kernels-135m", "results", kernel=name, rows=1) for name in names]
    whole = kernel(results, "kernels-135m", "microseconds", kernel="pass", rows=1)
    if whole is None or None in rows:
        return None
    return 1 - sum(row["count"] * row["microseconds"] for row in rows if row) / whole


def company(results: Results, name: str, answers: int = 1, head: str = "none") -> float | None:
    """Tokens a second of so many answers at once, with the best schedule, over those of one that decodes plainly."""
    one = find(results, name, "results", answers=1, head="none")
    rows = [row for row in of(results, name, "results") if (row["answers"], row["head"]) == (answers, head)]
    return max(row["tokens_per_second"] for row in rows) / one["tokens_per_second"] if one and rows else None


def differing(results: Results) -> float | None:
    """Answers that were not plain decoding's, of all that were measured."""
    parts = ("answers-", "oracle-", "company-")
    rows = [row for name in results if name.startswith(parts) for row in of(results, name, "results")]
    return sum(row.get("differing", 0) for row in rows) if rows else None


def passed(name: str) -> Callable[[Results], float | None]:
    """Its exit status; none of a part that was not run, or not to its end, or for which there is no tool."""

    def status(results: Results) -> float | None:
        found = results["parts"].get(name, {}).get("status")
        return None if found is None or found >= 124 else found

    return status


def tests_failed(name: str) -> Callable[[Results], float | None]:
    """How many did; none where no test ran to its end (all skipped: that proves nothing), or pytest itself failed."""

    def failed(results: Results) -> float | None:
        counts = results.get(name, {})
        bad = counts.get("failed", 0) + counts.get("error", 0)
        status = results["parts"].get(name, {}).get("status")
        return bad if bad or (counts.get("passed") and status == 0) else None

    return failed


def below(most: float) -> Callable[[float], bool]:
    return lambda value: value <= most


def above(least: float) -> Callable[[float], bool]:
    return lambda value: value >= least


CHECKS: list[Check] = [
    ("kernels: row invariance, error, exactness", "0 failed", tests_failed("tests-kernels"), below(0)),
    ("captured stages, streams, mapped memory", "0 failed", tests_failed("tests-captured"), below(0)),
    ("answers that are not plain decoding's", "0", differing, below(0)),
    ("compute-sanitizer: memory", "exit status 0", passed("memcheck"), below(0)),
    ("compute-sanitizer: races in shared memory", "exit status 0", passed("racecheck"), below(0)),
    *(
        (f"plain, {shape} shape, {card}", f"<= {most} ms", partial(on_card, card, part), below(most))
        for shape, part, h200, h100 in (
            ("8B", "answers-8b", 4.6, 6.2), ("default", "answers-135m", 0.42, 0.45), ("1B", "answers-1b", 0.80, 1.05),
        )
        for card, most in (("H200", h200), ("H100", h100))
    ),
    ("8B shape int8: plain, over bfloat16", ">= 1.6", lambda r: faster(r, "int8"), above(1.6)),
    ("8B shape int4: plain, over bfloat16", ">= 2.6", lambda r: faster(r, "int4"), above(2.6)),
    ("8B shape fp8: plain, over bfloat16", ">= 1.6", lambda r: faster(r, "fp8"), above(1.6)),
    ("8B shape, oracle 0.8, exit 4, best / plain", ">= 2.6", lambda r: best_ratio(r, "oracle-8b", 0.8), above(2.6)),
    ("default shape, oracle 0.8, best / plain", ">= 1.70", lambda r: best_ratio(r, "oracle-135m", 0.8), above(1.70)),
    *(
        (f"{shape.upper()} shape: {name} / plain", "> 1", partial(against, shape=shape, field=field), above(1.0))
        for shape in ("8b", "135m", "1b")
        for name, field in (
            ("torch.compile and graphs", "milliseconds_per_token"),
            ("transformers", "transformers_milliseconds_per_token"),
        )
    ),
    ("16 rows / 1 row, default shape", "<= 1.15", lambda r: rows_cost(r, "kernels-135m"), below(1.15)),
    ("16 rows / 1 row, 1B shape", "<= 1.15", lambda r: rows_cost(r, "kernels-1b"), below(1.15)),
    ("16 rows / 1 row, 8B shape", "<= 1.15", lambda r: rows_cost(r, "kernels-8b"), below(1.15)),
    (
        "draft step, default shape, exit 6", "<= 90 us",
        lambda r: kernel(r, "kernels-135m", "microseconds", kernel="draft_step"), below(90),
    ),
    ("default shape: overlap / best in turns", "(no target)", overlap_gain, above(1.0)),
    ("default model, its own head, auto / plain", "(no target)", default_model, above(1.0)),
    ("8B shape, 8 at once / one", ">= 6", lambda r: company(r, "company-8b", 8), above(6)),
    ("default shape, 8 at once / one", "(no target)", lambda r: company(r, "company-135m", 8), above(1.0)),
    (
        "8B shape, EAGLE-3, oracle 0.8, best / plain", "(no target)",
        lambda r: company(r, "company-8b", head="eagle3"), above(1.0),
    ),
    ("13B shape, oracle 0.8, best / plain", "(no target)", lambda r: best_ratio(r, "answers-13b", 0.8), above(1.0)),
    (
        "70B shape int8, oracle 0.8, best / plain", "(no target)",
        lambda r: best_ratio(r, "answers-70b-int8", 0.8), above(1.0),
    ),
    (
        "8B shape int8: gate and up, of copy bandwidth", "(no target)",
        lambda r: kernel(r, "kernels-8b-int8", "bandwidth_share", kernel="gate_up", rows=1), above(0.5),
    ),
    (
        "8B shape int4: gate and up, of copy bandwidth", "(no target)",
        lambda r: kernel(r, "kernels-8b-int4", "bandwidth_share", kernel="gate_up", rows=1), above(0.5),
    ),
    ("GPU idle between launches, overlapped rounds", "< 3 %", idle_share, lambda value: value < 0.03),
    ("a pass: what its kernels alone do not take", "(no target)", inside_graphs, below(0.1)),
    (
        "attention at 4k, 8B shape, of copy bandwidth", ">= 0.70",
        lambda r: kernel(r, "kernels-8b-4k", "bandwidth_share", kernel="attention", rows=1), above(0.70),
    ),
    (
        "attention at 8k, 8B shape, of copy bandwidth", ">= 0.70",
        lambda r: kernel(r, "kernels-8b-8k", "bandwidth_share", kernel="attention", rows=1), above(0.70),
    ),
    ("answers at 4k, 8k equal plain decoding's", "exit status 0", passed("answers-8b-far"), below(0)),
]  # fmt: skip


def of(results: Results, name: str, key: str) -> list[dict[str, Any]]:
    part = results.get(name)
    return part.get(key, []) if isinstance(part, dict) else []


def find(results: Results, name: str, key: str, **labels: Any) -> dict[str, Any] | None:
    rows = of(results, name, key)
    return next((row for row in rows if all(row.get(k) == v for k, v in labels.items())), None)


def counted(line: str) -> dict[str, int] | None:
    """What pytest's last line counts: `3 failed, 41 passed, 2 skipped in 61.2s`."""
    return {word: int(count) for count, word in re.findall(r"(\d+) (failed|passed|skipped|error)", line)} or None


def read(folder: Path, earlier: Results) -> Results:
    results = {name: part for name, part in earlier.items() if name != "targets"}
    parts = results.setdefault("parts", {})
    if (folder / "parts").exists():
        for line in (folder / "parts").read_text().splitlines():
            name, status, seconds = line.split()
            parts[name] = {"status": int(status), "seconds": int(seconds)}
            results.pop(name, None)
    for path in sorted(folder.glob("*.json")):
        line = path.read_text()
        try:
            value = json.loads(line)
        except ValueError:
            value = counted(line)
        if isinstance(value, dict):
            results[path.stem] = value
    return results


def verdict(results: Results, check: Check) -> dict[str, Any]:
    what, target, figure, holds = check
    try:
        value = figure(results)
    except (KeyError, TypeError, ZeroDivisionError):
        value = None
    said = "not measured" if value is None else "met" if holds(value) else "missed"
    return {"what": what, "target": target, "value": value, "verdict": said}


def main() -> int:
    folder, result = Path(sys.argv[1]), Path(sys.argv[2])
    results = read(folder, json.loads(result.read_text()) if result.exists() else {})
    verdicts = [verdict(results, check) for check in CHECKS]
    result.write_text(json.dumps({"targets": verdicts, **results}, ensure_ascii=False) + "\n")
    for line in verdicts:
        value = "-" if line["value"] is None else f"{line['value']:.3f}"
        print(f"{line['verdict']:<13} {line['what']:<46} {value:>10}   {line['target']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
