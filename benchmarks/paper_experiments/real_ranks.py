"""Speed-up against stages with a real model: processes that compute, beside tensor parallelism and one process."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import ranks

from .experiment import Experiment, Found, Parts, markdown

# Layers of each rank, by how many there are. The LM head costs what eight layers do.
ORACLE = {2: "17,13", 3: "12,13,5", 4: "9,10,10,1", 8: "4,4,4,4,4,5,4,1"}  # stages of equal length
TRAINED = {2: "3,27", 3: "3,18,9", 4: "3,12,12,3", 8: "3,5,5,4,4,4,4,1"}  # the head that ships exits after 3
KINDS = {"oracle, 0.8": ORACLE, "trained head": TRAINED}
SCHEDULES = "plain,eesd,ppsd,elastic,auto"
SHARES = "plain, tensor-parallel"  # of older results: the baseline is gone
LINKS = (0, 1, 5)  # milliseconds


def parts(quick: bool) -> Parts:
    """As many ranks as there are cores for them, and 3 everywhere."""
    counts = [n for n in ORACLE if n <= max(3, os.cpu_count() or 1)]
    found: dict[str, Callable[[], Any]] = {}
    for drafts in KINDS:
        found[f"one process, {drafts}"] = partial(one_process, drafts, quick)
    for n in counts:
        for link in LINKS:
            for drafts in KINDS:
                found[f"{n} processes, {link} ms, {drafts}"] = partial(pipeline, n, link, drafts, quick)
    return found


def options(drafts: str, stages: str, quick: bool) -> list[str]:
    given = ["--stages", stages, "--schedules", SCHEDULES]
    given += ["-n", "64", "-r", "1"] if quick else ["-n", "192", "-r", "4"]
    given += ["--trained", "--seeds", "2" if quick else "6"] if drafts == "trained head" else ["--acceptance", "0.8"]
    return given


def pipeline(count: int, link: int, drafts: str, quick: bool) -> dict[str, Any]:
    args = ranks.parsed(options(drafts, KINDS[drafts][count], quick))
    result = ranks.pipeline(args, link)
    return {"processes": count, "stages": args.stages, "load": round(os.getloadavg()[0], 1), **result}


def one_process(drafts: str, quick: bool) -> dict[str, Any]:
    """With a thread for each core: the same devices, and no pipeline."""
    args = ranks.parsed(options(drafts, KINDS[drafts][2], quick))
    result = ranks.one_process(args, os.cpu_count() or 1)
    return {"processes": 1, "link_ms": 0.0, "load": round(os.getloadavg()[0], 1), **result}


def speed(case: dict[str, Any], schedule: str) -> float:
    return next(row["tokens_per_second"] for row in case["rows"] if row["schedule"] == schedule)


def table(found: Found) -> str:
    """Speeds are times the plain decoding of the same processes."""
    rows = []
    for part, case in found.items():
        drafts = next((kind for kind in KINDS if part.endswith(kind)), None)
        if drafts is None:
            continue
        plain = speed(case, "plain")
        row = [drafts.partition(",")[0], str(case["processes"]), f"{case['link_ms']:g}", f"{case['load']:.0f}"]
        row += [f"{plain:.0f}", f"{plain / speed(found[f'one process, {drafts}'], 'plain'):.2f}"]
        for each in case["rows"]:
            row += [f"{each['tokens_per_second'] / plain:.2f}"] if each["schedule"] != "plain" else []
        shares = found.get(f"tensor-parallel, {case['processes']}, {case['link_ms']:g} ms")
        rows.append((*row, f"{speed(shares, SHARES) / plain:.2f}" if shares else "-"))
    head = ("drafts", "processes", "link, ms", "load", "plain, tokens/s", "plain, of one process")
    return markdown((*head, "eesd", "ppsd", "elastic", "auto", "tensor-parallel"), rows)


RANKS = Experiment("ranks", parts, table)
