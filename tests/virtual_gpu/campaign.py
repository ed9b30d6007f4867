"""`make virtual-gpu`: answers of a toy model in every format, schedule and order on both chips, and every mutation.

The last line is one JSON object: answers, tokens, differences (answers other than plain decoding's, and faults), seeds,
mutations, caught. Exit status 1 where an answer differs or a mutation is missed.

--save FILE keeps what each job and mutation gave, as JSON; a later call with the same file and as many seeds goes on
from there. Delete it when a kernel has changed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

from filelock import FileLock

import ppsd_rt.errors  # noqa: F401  before the folder tests/ppsd_rt can be taken for it

sys.path.append(str(Path(__file__).parents[1]))
from virtual_gpu.answers import REQUESTS, SCHEDULES, toy_model
from virtual_gpu.mutations import MUTATIONS

PROGRAM, ROOT = Path(__file__).parent / "answers.py", Path(__file__).parents[2]
FORMATS = {90: ("bfloat16", "int8", "int4", "fp8"), 80: ("bfloat16", "int8", "int4")}
OTHERS = [name for name in SCHEDULES if name != "plain"]
LONG = 130  # a prompt of three tiles of attention
MUTATION_SEEDS = (0, 6)
SEEDS_AT_ONCE = 5  # in one process


def build() -> Path:
    """The virtual GPU (csrc/tests/virtual_gpu), built in build/ -> the driver's path. Raises RuntimeError."""
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if sys.platform != "linux" or cmake is None:
        raise RuntimeError("the virtual GPU is built with cmake, on Linux")
    folder = ROOT / "build" / "virtual_gpu"
    folder.mkdir(parents=True, exist_ok=True)
    configure = [cmake, "-S", ROOT, "-B", folder, "-DPPSD_MODULE=OFF", "-DPPSD_VIRTUAL_GPU=ON"]
    with FileLock(folder / "lock"):
        for command in (configure, [cmake, "--build", folder, "--target", "virtual_gpu"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return folder / "libcuda.so.1"


def environment(library: Path, **variables: str) -> dict[str, str]:
    """Of a process on the virtual GPU."""
    others = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return {**others, "TRITON_CACHE_DIR": str(library.parent / "triton"), "PPSD_CUDA_TIMEOUT": "3600", **variables}


def ask(library: Path, folder: Path, job: dict[str, Any], **variables: str) -> dict[str, Any]:
    """A job of answers.py -> its result."""
    done = subprocess.run(
        [sys.executable, PROGRAM],
        input=json.dumps({"library": str(library), "folder": str(folder), **job}),
        env=environment(library, **variables),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def jobs(seeds: int) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """What, the job, variables of the environment. The seeds are dealt to the formats of both chips."""
    turns: list[list[tuple[str, dict[str, Any], dict[str, str]]]] = []
    places = [(sm, format) for sm, formats in FORMATS.items() for format in formats]
    for number, (sm, format) in enumerate(places):
        each = {"sm": sm, "format": format}
        share = range(seeds)[number :: len(places)]
        chunks = [[first, min(first + SEEDS_AT_ONCE, len(share))] for first in range(0, len(share), SEEDS_AT_ONCE)]
        names = [f"sm_{sm} {format} seeds {first} to {end - 1}" for first, end in chunks]
        orders = [{**each, "schedules": OTHERS, "seeds": chunk} for chunk in chunks]
        turns.append([(name, order, {}) for name, order in zip(names, orders, strict=True)])
        for request in REQUESTS:
            yield f"sm_{sm} {format} {request}", {**each, "schedules": ["turns", "overlap"], "request": request}, {}
        yield f"sm_{sm} {format} feedback", {**each, "schedules": ["fixed", "overlap"], "feedback": True}, {}
        yield f"sm_{sm} {format} company", {**each, "schedules": [], "feedback": number % 2 > 0, "company": "fixed"}, {}
        yield f"sm_{sm} {format} long", {**each, "schedules": ["fixed", "turns"], "prompt": LONG}, {}
        yield f"sm_{sm} {format} eager", {**each, "schedules": ["turns"]}, {"PPSD_CUDA_EAGER": "1"}
        yield f"sm_{sm} {format} alone", {**each, "schedules": ["fixed", "overlap"]}, {"PPSD_NO_PDL": "1"}
    for turn in zip_longest(*turns):  # every format has had its share wherever the campaign stops
        yield from (each for each in turn if each is not None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--save", type=Path, metavar="FILE")
    options = parser.parse_args()
    kept: dict[str, Any] = {"jobs": {}, "mutations": {}}
    if options.save and options.save.exists():
        kept = json.loads(options.save.read_text())

    def keep(kind: str, name: str, what: Any) -> None:
        kept[kind][name] = what
        if options.save:
            options.save.write_text(json.dumps({**kept, "total": total}) + "\n")

    library = build()
    total = {
        "answers": 0,
        "tokens": 0,
        "differences": 0,
        "seeds": options.seeds,
        "mutations": len(MUTATIONS),
        "caught": 0,
    }
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.jobs) as pool:
        folder = toy_model(Path(name) / "toy")

        def add(counts: dict[str, Any]) -> None:
            for each in ("answers", "tokens", "differences"):
                total[each] += counts[each]

        def mutated(name: str) -> tuple[str, str]:
            mutation = MUTATIONS[name]
            job = {"sm": 90, "format": "int8", "schedules": [mutation.schedule], "prompt": mutation.prompt}
            result = ask(library, folder, {**job, "mutation": name, "seeds": MUTATION_SEEDS})
            if not result["changed"]:
                return name, ""
            if result["fault"]:
                return name, result["fault"]
            right = ask(library, folder, {**job, "schedules": []})["answers"][0]["ids"]
            wrong = sum(answer["ids"] != right for answer in result["answers"])
            return name, f"{wrong} wrong answers" if wrong else ""

        def answered(each: tuple[str, dict[str, Any], dict[str, str]]) -> tuple[str, dict[str, Any]]:
            return each[0], ask(library, folder, each[1], **each[2])

        for counts in kept["jobs"].values():
            add(counts)
        left = [each for each in jobs(options.seeds) if each[0] not in kept["jobs"]]
        for what, result in pool.map(answered, left):
            tokens = sum(len(answer["ids"]) for answer in result["answers"])
            wrong = result["differences"] + bool(result["fault"])
            counts = {"answers": len(result["answers"]), "tokens": tokens, "differences": wrong}
            add(counts)
            keep("jobs", what, {**counts, "fault": result["fault"]})
            print(f"{what}: {counts['answers']} answers, {wrong} wrong {result['fault']}", flush=True)
        total["caught"] += sum(bool(how) for how in kept["mutations"].values())
        for what, how in pool.map(mutated, [name for name in MUTATIONS if name not in kept["mutations"]]):
            total["caught"] += bool(how)
            keep("mutations", what, how)
            print(f"mutation, {what}: {how or 'MISSED'}", flush=True)
    print(json.dumps(total))
    return int(total["differences"] > 0 or total["caught"] < total["mutations"])


if __name__ == "__main__":
    sys.exit(main())
