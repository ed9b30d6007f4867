"""Tries inputs for as long as it is given, in child processes: a crash or a hang is recorded like any other fault.

    make fuzz MINUTES=60
    PYTHONPATH=tests python -m fuzz.campaign --minutes 60 --seed 7 --out counts.json
    PYTHONPATH=tests python -m fuzz.campaign --replay build/fuzz/config-1a2b3c4d.txt

Every target gets slices of time in turn; a slice has a process and a seed of its own. Faults are told apart by the kind
of error and the place in the product; of each the smallest input is kept as a file that --replay takes.
"""

import os

# As tests/conftest.py has it; before numpy is there, whose threads would not survive the forks below.
os.environ.update(OMP_WAIT_POLICY="passive", OPENBLAS_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import argparse
import ast
import faulthandler
import hashlib
import json
import multiprocessing
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import hypothesis
import torch

from .file_targets import FILES
from .known import KNOWN
from .mutations import PIPE
from .oracle import ROOT, signature
from .place import Place
from .targets import TARGETS, examples

CPU_SECONDS, WALL_SECONDS = 20.0, 10.0  # for one input, which takes some milliseconds; the latter where it only waits
DIED = "the process died"
SHRINKING = 20.0  # seconds that a slice may go over its time for a smaller input
Report = Callable[..., None]

torch.set_num_threads(1)


class _Over(BaseException):
    """The slice's time; no handler of hypothesis or the product takes it for a failure."""


def _slice(place: Place, name: str, seed: int, seconds: float, known: set[str], first: bool, report: Report) -> None:
    """Tries inputs until the time is over; faults that are in `known` are reported, and not made smaller."""
    end = time.monotonic() + seconds
    new = False

    def try_one(value: Any) -> None:
        nonlocal new
        if time.monotonic() > end + SHRINKING * new:
            raise _Over
        report("begin", repr(value))
        try:
            outcome = TARGETS[name][1](place, value)
        except Exception as error:
            fault = signature(error)
            report("fault", fault, repr(value), traceback.format_exc())
            if fault in known:
                return
            new = True
            raise
        report("end", outcome)

    pipe = [PIPE] if name in FILES - {"prompts"} else []  # prompts may come from a pipe, and wait for its writer
    for value in [*KNOWN.get(name, ()), *pipe] if first else []:
        with _dropped(set()):
            try_one(value)
    while True:
        seed, new = seed + 1, False
        with _dropped(known):
            examples(place, name, 10**6, seed, try_one)


@contextmanager
def _dropped(seen: set[str]) -> Iterator[None]:
    """Faults that have been reported; `seen` gets their signatures."""
    try:
        yield
    except Exception as error:
        seen.add(signature(error))


def _child(connection: Connection, folder: Path, name: str, *slice: Any) -> None:
    """The process of a slice. What it writes, or native code does, goes to a file."""
    output = (folder / "output").open("wb", buffering=0)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    trace = (folder / "trace").open("w")
    faulthandler.enable(trace)
    faulthandler.register(signal.SIGUSR1, trace)
    with Place(folder).entered() as place:
        try:
            _slice(place, name, *slice, lambda *event: connection.send(event))
        except _Over:
            connection.send(("over",))
    os._exit(0)  # threads of the product are its own affair


@dataclass
class Fault:
    """count: how often. smallest: `repr` of the input."""

    count: int = 0
    smallest: str = ""
    trace: str = ""


@dataclass
class Counts:
    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: dict[str, Fault] = field(default_factory=dict)

    def fault(self, what: str, value: str, trace: str) -> bool:
        """Whether this is the smallest input for it by now."""
        fault = self.faults.setdefault(what, Fault())
        fault.count += 1
        if fault.smallest and len(value) >= len(fault.smallest):
            return False
        fault.smallest, fault.trace = value, trace
        return True


def _queued_seconds(process: int | str | None) -> float:
    """How long the threads of a process were ready to work, and had no core: a busy machine."""
    seconds = 0.0
    for task in Path(f"/proc/{process}/task").glob("*/schedstat"):
        try:
            seconds += int(task.read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # it has ended, or the kernel keeps no such account
            continue
    return seconds


def _children(process: int | str | None) -> Iterator[str]:
    """And theirs."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            continue
        if parent == str(process):
            yield stat.parent.name
            yield from _children(stat.parent.name)


class _Watched:
    """A slice in the making, seen from outside."""

    def __init__(self, name: str, counts: Counts, *slice: Any) -> None:
        self.name, self.counts = name, counts
        self.folder = tempfile.TemporaryDirectory(prefix="ppsd-fuzz-")
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_child, args=(theirs, Path(self.folder.name), name, *slice))
        self.process.start()
        theirs.close()
        self.input: str | None = None
        self.over = False
        self._begin()

    def _begin(self) -> None:
        self.began, self.cpu, self.queued = time.monotonic(), self._cpu_seconds(), _queued_seconds(self.process.pid)

    def _cpu_seconds(self) -> float:
        try:
            ticks = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError):
            return 0.0

    def hear(self) -> Iterator[str]:
        """Takes in what the child has to say -> the faults whose input is smaller than what was known."""
        try:
            while self.connection.poll():
                what, *rest = self.connection.recv()
                self._begin()
                if what == "begin":
                    self.input = rest[0]
                    self.counts.inputs += 1
                elif what == "end":
                    self.counts.outcomes[rest[0]] += 1
                    self.input = None
                elif what == "fault":
                    self.input = None
                    if self.counts.fault(*rest):
                        yield rest[0]
                else:
                    self.over = True
        except (EOFError, ConnectionResetError):
            self.process.join()
            if not self.over:
                code = self.process.exitcode or 0
                name = signal.Signals(-code).name if code < 0 else f"status {code}"
                yield from self._lost(f"{DIED} ({name})")

    def watch(self) -> Iterator[str]:
        """Ends a child that works too long on one input, or waits too long for anything but a core."""
        spent = self._cpu_seconds() - self.cpu
        waited = time.monotonic() - self.began
        if waited > WALL_SECONDS:  # then it is worth a look at what it had to wait for
            waited += self.queued - sum(map(_queued_seconds, (self.process.pid, *_children(self.process.pid))))
        works = spent > CPU_SECONDS
        if not self.over and (works or waited > WALL_SECONDS * (1 + spent)):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.5)
            self.process.kill()
            self.process.join()
            yield from self._lost("works without end" if works else "waits without end")

    def _lost(self, what: str) -> Iterator[str]:
        self.over = True
        trace = (Path(self.folder.name) / "trace").read_text(errors="replace")
        output = (Path(self.folder.name) / "output").read_bytes()[-2000:].decode(errors="replace")
        product = f'{re.escape(str(ROOT))}/((?:ppsd_rt|models)/[^"]*)", line \\d+ in (\\S+)'
        place = re.search(product, trace)
        where = f" in {place[1]}:{place[2]}" if place else ""
        if self.counts.fault(what + where, self.input or repr("before the first input"), f"{output}\n{trace}"):
            yield what + where

    def close(self) -> None:
        self.process.join()
        self.connection.close()
        self.folder.cleanup()


def run_campaign(names: list[str], minutes: float, seed: int, workers: int, failures: Path) -> dict[str, Counts]:
    counts = {name: Counts() for name in names}
    end = time.monotonic() + 60 * minutes
    length = min(max(60 * minutes * workers / len(names) / 3, 3.0), 30.0)
    order, running, number = random.Random(seed), [], 0
    queue: list[str] = []
    visited: set[str] = set()
    while running or time.monotonic() < end:
        while len(running) < workers and time.monotonic() < end:
            queue = queue or order.sample(names, len(names))
            name, number = queue.pop(), number + 1
            known, seconds = set(counts[name].faults), min(length, end - time.monotonic())
            first = name not in visited
            visited.add(name)
            running.append(_Watched(name, counts[name], seed * 1_000_003 + 1000 * number, seconds, known, first))
        wait([each.connection for each in running], 0.5)
        for each in list(running):
            for found in (*each.hear(), *each.watch()):
                _write(failures, each.name, found, counts[each.name].faults[found])
            if each.over:
                each.close()
                running.remove(each)
    return counts


def _write(failures: Path, name: str, what: str, fault: Fault) -> None:
    failures.mkdir(parents=True, exist_ok=True)
    path = failures / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:8]}.txt"
    if not path.exists():
        print(f"{name}: {what}\n    {path}", flush=True)
    path.write_text(f"{name}\n{fault.smallest}\n{what}\n\n{fault.trace}", encoding="utf-8", errors="backslashreplace")


def replay(path: Path) -> None:
    """Once more, here, with the traceback of what goes wrong."""
    name, value, *_ = path.read_text(encoding="utf-8").split("\n")
    with tempfile.TemporaryDirectory() as folder, Place(Path(folder)).entered() as place:
        print(TARGETS[name][1](place, ast.literal_eval(value)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz.campaign", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes at a time [2]")
    parser.add_argument("--targets", default=",".join(TARGETS), metavar="A,B,...", help="[all]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the counts, as JSON")
    parser.add_argument("--failures", type=Path, default=Path("build/fuzz"), metavar="FOLDER", help="[%(default)s]")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="one of the files in that folder, once more")
    args = parser.parse_args()
    if args.replay:
        replay(args.replay)
        return 0
    counts = run_campaign(args.targets.split(","), args.minutes, args.seed, args.workers, args.failures.absolute())
    print(f"{'target':<20}{'inputs':>9}{'accepted':>9}{'outcomes':>9}{'faults':>7}")
    for name, each in counts.items():
        row = each.inputs, _accepted(each), len(each.outcomes), len(each.faults)
        print(f"{name:<20}" + "".join(f"{n:>{w}}" for n, w in zip(row, (9, 9, 9, 7), strict=True)))
    if args.out:
        args.out.write_text(json.dumps(_summary(args, counts), indent=1) + "\n", encoding="utf-8")
    return 1 if any(each.faults for each in counts.values()) else 0


def _accepted(counts: Counts) -> int:
    refused = ("PpsdError", "UsageError", "RuntimeError", "status 1", "status 2", "no values")
    return sum(count for outcome, count in counts.outcomes.items() if not outcome.startswith(refused))


def _summary(args: argparse.Namespace, counts: dict[str, Counts]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "minutes": args.minutes,
        "seed": args.seed,
        "workers": args.workers,
        "python": sys.version.split()[0],
        "hypothesis": hypothesis.__version__,
        "inputs": sum(each.inputs for each in counts.values()),
        "faults": sum(len(each.faults) for each in counts.values()),
        "targets": {
            name: {
                "inputs": each.inputs,
                "accepted": _accepted(each),
                "outcomes": len(each.outcomes),
                "faults": {what: fault.count for what, fault in each.faults.items()},
            }
            for name, each in counts.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
