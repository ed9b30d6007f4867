"""Tries inputs for as long as it is given, in child processes: a crash or a hang is a fault like any other.

    make fuzz MINUTES=60
    PYTHONPATH=tests python -m fuzz.campaign --minutes 60 --seed 7
    PYTHONPATH=tests python -m fuzz.campaign --replay build/fuzz/config.txt

Targets take turns; one with a fault gets no further turn. Its smallest input is kept as a file that --replay takes.
"""

import os

# As tests/conftest.py has it, before numpy is there.
os.environ.update(
    OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false"
)

import argparse
import ast
import faulthandler
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

from .place import Place
from .targets import TARGETS, examples

SLICE = 30.0  # seconds of a target's turn
MOST_SECONDS = 60  # for one input, which takes some milliseconds


class _Over(BaseException):
    """The turn's time; no handler of hypothesis or the product takes it for a failure."""


def take_turn(name: str, seed: int, seconds: float, kept: Path) -> Counter[str]:
    """How often inputs came to which outcome. `kept` holds the input that is tried, in the end the smallest fault's."""
    end, outcomes = time.monotonic() + seconds, Counter[str]()

    def try_one(value: Any) -> None:
        nonlocal end
        if time.monotonic() > end:
            raise _Over
        kept.write_text(f"{name}\n{value!r}\n", encoding="utf-8", errors="backslashreplace")
        faulthandler.dump_traceback_later(MOST_SECONDS, exit=True)
        try:
            outcomes[TARGETS[name][1](place, value)] += 1
        except Exception:
            end = float("inf")  # smaller ones are looked for, however long that takes
            raise
        finally:
            faulthandler.cancel_dump_traceback_later()

    with tempfile.TemporaryDirectory() as folder, Place(Path(folder)).entered() as place:
        try:
            for turn in count(seed):
                examples(place, name, 10**6, turn, try_one)
        except _Over:
            kept.unlink()
    return outcomes


def replay(path: Path) -> None:
    """Once more, here, with the traceback of what goes wrong."""
    name, value = path.read_text(encoding="utf-8").split("\n")[:2]
    with tempfile.TemporaryDirectory() as folder, Place(Path(folder)).entered() as place:
        print(TARGETS[name][1](place, ast.literal_eval(value)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.campaign", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", default=",".join(TARGETS), metavar="A,B,...", help="[all]")
    parser.add_argument("--failures", type=Path, default=Path("build/fuzz"), metavar="FOLDER", help="[%(default)s]")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="one of the files in that folder, once more")
    parser.add_argument("--turn", type=float, metavar="SECONDS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    folder = args.failures.absolute()
    if args.replay:
        replay(args.replay)
        return 0
    if args.turn is not None:
        print(json.dumps(take_turn(args.targets, args.seed, args.turn, folder / f"{args.targets}.txt")))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    names, tried, wrong = args.targets.split(","), Counter[str](), 0
    end, length = time.monotonic() + 60 * args.minutes, min(SLICE, 60 * args.minutes / len(names))
    for turn in count():
        if not names or time.monotonic() > end:
            break
        name = names.pop(0)
        own = ["--targets", name, "--seed", str(1000 * args.seed + turn), "--turn", str(length)]
        command = [sys.executable, "-m", "fuzz.campaign", "--failures", str(folder), *own]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if done.returncode:
            wrong += 1
            print(f"{name}: status {done.returncode}, {folder / name}.txt\n{done.stderr[-4000:]}", flush=True)
        else:
            names.append(name)
            tried[name] += sum(json.loads(done.stdout.splitlines()[-1]).values())
    print(json.dumps({"inputs": tried.total(), "faults": wrong, "targets": tried}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
