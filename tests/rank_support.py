"""The loop and the stations of ranks in one process, without a network."""

import threading

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
            self.stations.append(self.slices[rank].station(first, last, taps))
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
