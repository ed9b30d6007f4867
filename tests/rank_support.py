"""Ranks as processes, of which one can be killed; and their loop and stations in one process, without a network."""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np

from ppsd_rt import _native
from ppsd_rt.find_head import find_head
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import Schedule, copying, parse_schedule
from ppsd_rt.ranks.slices import CpuSlices


def ids_of(rounds):
    return tuple(id for round in rounds if isinstance(round, Round) for id in round.committed)


class Clock:
    """Moves by what is slept; `then` is called after every sleep."""

    def __init__(self, then=lambda: None):
        self.time, self.then = 0.0, then

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds
        self.then()


class Pipeline:
    """The loop of rank 0 and the stations of others, in threads; passes go from hand to hand.

    blocks: of KV caches, on every rank. on_pass: hears every message, (rank that gets it, words). serves: else the loop
    and the stations wait to be told.
    """

    def __init__(
        self,
        folder,
        sizes,
        head=None,
        format="int8",
        kv="auto",
        blocks=64,
        on_pass=lambda rank, words: None,
        serves=True,
    ):
        checkpoint = Checkpoint(folder)
        self.on_pass = on_pass
        head = find_head(str(head or f"norm:{sizes[0]}"), checkpoint)
        taps = head.taps if head else ()
        self.slices = [CpuSlices(checkpoint, format, kv, 1, []) for _ in sizes]
        self.slices[0].pack_drafting(head, sizes[0])
        self.stations = []
        for rank in range(1, len(sizes)):
            first, last = sum(sizes[:rank]), sum(sizes[: rank + 1])
            self.stations.append(self.slices[rank].station(first, last, 0.0, taps))
        self.loop = self.slices[0].loop(len(sizes), blocks)
        self.words = _native.pass_words(checkpoint.config.hidden_size, len(taps))
        self.failures, self._stop, self.answer = [], threading.Event(), None
        works = [self._lead, *(lambda rank=rank: self._serve(rank) for rank in range(1, len(sizes)))]
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works] if serves else []
        for thread in self._threads:
            thread.start()

    def _guarded(self, work):
        try:
            while not self._stop.is_set():
                work()
        except Exception as error:
            self.failures.append(error)
            self._stop.set()
        if work == self._lead:
            self.loop.fail("the ranks have ended")

    def _lead(self):
        out = np.zeros(self.words, np.int32)
        if words := self.loop.work(out, 20):
            self.on_pass(1, out[:words])
            self.stations[0].post(out[:words])

    def _serve(self, rank):
        out = np.zeros(self.words, np.int32)
        words = self.stations[rank - 1].work(out, 20)
        if not words:
            return
        last = rank == len(self.stations)
        self.on_pass(0 if last else rank + 1, out[:words])
        (self.loop.land if last else self.stations[rank].post)(out[:words])

    def add(self, prompt, params, schedule, begun=(), **more):
        """prompt: ids. begun: ids that the answer has already."""
        taken = params.for_backend(prompt)
        limits = Limits(len(prompt) + (params.max_tokens or 256), frozenset(params.stop_token_ids), len(begun))
        chosen = parse_schedule(schedule)
        automatic = not isinstance(chosen, Schedule)
        steps = copying(chosen) if automatic else chosen
        return self.loop.add([*prompt, *begun], taken, steps, limits, automatic=automatic, **more)

    def run(self, *asked, **more):
        """As `add`: its rounds."""
        self.answer = self.add(*asked, **more)
        try:
            return list(self.answer)
        except RuntimeError:
            assert not self.failures, self.failures
            raise

    def passes(self, count):
        """So many of rank 0's, by hand."""
        out, found = np.zeros(self.words, np.int32), []
        while len(found) < count:
            if words := self.loop.work(out, 0):
                found.append(out[:words].copy())
        return found

    def verdict(self, place=0):
        """Of a station, on the pass that it works on next, by hand; or the message for the next one; or None."""
        out = np.zeros(self.words, np.int32)
        words = self.stations[place].work(out, 0)
        return out[:words] if words else None

    def close(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for station in self.stations:
            station.close()


class Processes:
    """Ranks of one command, each with output and errors of its own; without torchrun, which would end them all."""

    def __init__(self, count, command, folder):
        with socket.create_server(("127.0.0.1", 0)) as held:
            port = held.getsockname()[1]
        self.outputs = [folder / f"out{rank}" for rank in range(count)]
        self.errors = [folder / f"err{rank}" for rank in range(count)]
        self.processes = []
        for rank in range(count):
            world = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            words = [sys.executable, "-m", "ppsd_rt", *command]
            environment = {**os.environ, **{name: str(value) for name, value in world.items()}}
            with open(self.outputs[rank], "wb") as out, open(self.errors[rank], "wb") as err:
                start = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment)
            self.processes.append(start)

    def output(self):
        """Of rank 0."""
        return self.outputs[0].read_text(encoding="utf-8", errors="replace")

    def lines(self):
        return [path.read_text(encoding="utf-8", errors="replace").strip() for path in self.errors]

    def wait_for_text(self, seconds):
        end = time.monotonic() + seconds
        while not self.output():
            if time.monotonic() > end or self.processes[0].poll() is not None:
                raise RuntimeError(f"no answer came: {self.lines()}")
            time.sleep(0.01)

    def wait(self, seconds, but=None):
        """Exit statuses; None: still running after so many seconds."""
        end = time.monotonic() + seconds
        for rank, process in enumerate(self.processes):
            if rank != but:
                try:
                    process.wait(max(end - time.monotonic(), 0.01))
                except subprocess.TimeoutExpired:
                    break
        return [process.poll() for process in self.processes]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@dataclass(frozen=True)
class Kill:
    """statuses, lines of standard error: of every rank. whole: characters of rank 0 in the end; intact: they are the
    beginning of the answer."""

    rank: int
    statuses: list[int]
    lines: list[str]
    whole: int
    intact: bool

    @property
    def bad(self):
        """Did a rank end well, silently, by a signal, with another line, or with another text?"""
        others = [rank for rank in range(len(self.statuses)) if rank != self.rank]
        told = all(f"rank {self.rank} " in self.lines[rank] and "\n" not in self.lines[rank] for rank in others)
        return not (told and self.intact and all(self.statuses[rank] > 0 for rank in others))


def kill_once(ranks, command, folder, answer, victim, by, guard):
    """Start them, wait for the first text, send one the signal `by`, and after `guard` seconds end the others."""
    running = Processes(ranks, command, folder)
    try:
        running.wait_for_text(guard)
        printed = len(running.output())
        running.processes[victim].send_signal(by)
        running.wait(guard, but=victim)
    finally:
        running.close()
    text = running.output()
    said = text.rstrip("\n")
    statuses = [process.returncode for process in running.processes]
    return Kill(victim, statuses, running.lines(), len(said), answer.startswith(said) and len(text) >= printed)
