"""Kill a random rank at a random moment of an answer, and see how the others end.

    python benchmarks/kill_ranks.py --ranks 3 --times 50 > benchmarks/results/...-kill-ranks.json

The ranks are started one by one, without torchrun, whose agent would end the others by itself. For every kill: how long
the others ran on, whether every one of them ended with a status other than 0 and one line that names the dead rank, and
whether what rank 0 had printed by then is the beginning of the whole answer (of a run that nobody disturbed).
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

PROMPT = "Tell me a long story about a lighthouse keeper and the sea."


@dataclass(frozen=True)
class Kill:
    rank: int
    signal: str
    printed: int  # characters, before the kill
    seconds: float  # from the kill to the end of the last of the others
    statuses: list[int]  # of every rank, the dead one's included
    lines: list[str]  # of standard error, of every rank
    whole: int  # characters that rank 0 had printed in the end
    intact: bool  # these are the beginning of the answer


class Ranks:
    """So many ranks of one command on this host, each with standard output and error of its own."""

    def __init__(
        self, count: int, command: Sequence[str], folder: Path, changed: dict[int, Sequence[str]] | None = None
    ):
        port = free_port()
        self.outputs = [folder / f"out{rank}" for rank in range(count)]
        self.errors = [folder / f"err{rank}" for rank in range(count)]
        self.processes = [
            self._start(rank, count, port, [*command, *(changed or {}).get(rank, [])]) for rank in range(count)
        ]

    def _start(self, rank: int, count: int, port: int, command: Sequence[str]) -> subprocess.Popen[bytes]:
        world = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in world.items()}, "MASTER_ADDR": "127.0.0.1"}
        with open(self.outputs[rank], "wb") as out, open(self.errors[rank], "wb") as err:
            return subprocess.Popen(
                [sys.executable, "-m", "ppsd_rt", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environment,
            )

    def output(self, rank: int = 0) -> str:
        return self.outputs[rank].read_text(encoding="utf-8", errors="replace")

    def wait_for_text(self, characters: int, seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while len(self.output()) < characters:
            if time.monotonic() > end or self.processes[0].poll() is not None:
                raise RuntimeError(f"no answer came: {[e.read_text() for e in self.errors]}")
            time.sleep(0.01)

    def wait(self, seconds: float = 60.0, but: int | None = None) -> list[int | None]:
        """Exit statuses; None: still running after so many seconds."""
        end = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            if rank != but:
                try:
                    process.wait(max(end - time.monotonic(), 0.01))
                except subprocess.TimeoutExpired:
                    return [p.poll() for p in self.processes]
        return [process.poll() for process in self.processes]

    def lines(self) -> list[str]:
        return [path.read_text(encoding="utf-8", errors="replace").strip() for path in self.errors]

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def whole_answer(ranks: int, command: Sequence[str], folder: Path) -> str:
    running = Ranks(ranks, command, folder)
    statuses = running.wait(300)
    running.close()
    if statuses != [0] * ranks:
        raise RuntimeError(f"the undisturbed run ended with {statuses}: {running.lines()}")
    return running.output()


def kill_once(
    ranks: int,
    command: Sequence[str],
    folder: Path,
    answer: str,
    victim: int,
    after: float,
    by: signal.Signals,
    guard: float = 60.0,
) -> Kill:
    """Start them, wait for the first text and `after` seconds, kill one, and after `guard` seconds the others."""
    running = Ranks(ranks, command, folder)
    try:
        running.wait_for_text(1, max(guard, 120.0))
        time.sleep(after)
        printed = len(running.output())
        begun = time.monotonic()
        running.processes[victim].send_signal(by)
        running.wait(guard, but=victim)
        seconds = time.monotonic() - begun
    finally:
        running.close()
    text = running.output()
    return Kill(
        rank=victim,
        signal=by.name,
        printed=printed,
        seconds=seconds,
        statuses=[int(process.returncode) for process in running.processes],
        lines=running.lines(),
        whole=len(text.rstrip("\n")),
        intact=answer.startswith(text.rstrip("\n")) and len(text) >= printed,
    )


def bad(kill: Kill) -> bool:
    """Did a rank end late, well, silently, with another line, or with another text?"""
    others = [rank for rank in range(len(kill.statuses)) if rank != kill.rank]
    told = all(f"rank {kill.rank} " in kill.lines[rank] and "\n" not in kill.lines[rank] for rank in others)
    ended = all(kill.statuses[rank] > 0 for rank in others)  # by themselves: not by a signal
    return not (told and ended and kill.intact)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--schedule", default="elastic")
    parser.add_argument("--hang", action="store_true", help="stop the rank instead (SIGSTOP): it falls silent")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    command = ["-n", str(args.tokens), "--schedule", args.schedule, "--rank-timeout", "4", PROMPT]
    generator = random.Random(args.seed)
    kills = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        answer = whole_answer(args.ranks, command, folder)
        for _ in range(args.times):
            victim, after = generator.randrange(args.ranks), generator.uniform(0.0, 1.0)
            by = signal.SIGSTOP if args.hang else signal.SIGKILL
            kill = kill_once(args.ranks, command, folder, answer, victim, after, by)
            kills.append(kill)
            note = f"{'BAD ' if bad(kill) else ''}rank {victim}: {kill.seconds:.2f} s, {kill.statuses}, {kill.lines}"
            print(note, file=sys.stderr, flush=True)
    slowest = max(kill.seconds for kill in kills)
    result = {
        "ranks": args.ranks,
        "schedule": args.schedule,
        "signal": kills[0].signal,
        "times": len(kills),
        "bad": sum(map(bad, kills)),
        "slowest_seconds": slowest,
        "kills": [asdict(kill) for kill in kills],
    }
    print(json.dumps(result, indent=1))
    return int(result["bad"] > 0 or slowest > 5.0)


if __name__ == "__main__":
    sys.exit(main())
