"""A draft stage and verification stations wired in one process, without a network."""

import threading

import numpy as np

from ppsd_rt import _native
from ppsd_rt.find_head import find_head
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import Schedule, copying, parse_schedule
from ppsd_rt.ranks.slices import layers_of, slices_for
from ppsd_rt.ranks.stage import lengths


class Pipeline:
    """Threads instead of ranks; a message goes from hand to hand. serves: else the stations wait to be told."""

    def __init__(self, folder, sizes, head=None, format="int8", kv="auto", backend="cpu", device="cpu", serves=True):
        checkpoint = Checkpoint(folder)
        self.hidden = checkpoint.config.hidden_size
        head = find_head(str(head or f"norm:{sizes[0]}"), checkpoint)
        self.slices = [slices_for(backend, device, (format, kv), 1, [], rank) for rank in range(len(sizes))]
        self.drafter = self.slices[0].drafter(checkpoint, head, sizes[0])
        self.stations = []
        for rank in range(1, len(sizes)):
            first, last = layers_of(sizes, rank)
            self.stations.append(self.slices[rank].station(checkpoint, first, last, 0.0))
        self.epoch, self.answer, self.failures = 1, None, []
        self.threads = [threading.Thread(target=self._serve, args=(i,)) for i in range(len(self.stations) * serves)]
        for thread in self.threads:
            thread.start()

    def buffers(self):
        return np.zeros((_native.WIRE_MESSAGES, _native.wire_words(self.hidden)), np.int32)

    def _serve(self, place):
        out = self.buffers()
        try:
            while (written := self.stations[place].work(out, 50)) >= 0:
                for message, words in zip(out, lengths(out, written, self.hidden), strict=False):
                    if place + 1 < len(self.stations):
                        self.stations[place + 1].post(message[:words])
                    else:
                        self.land(message[:words])
        except Exception as error:  # whatever it is, run() must not wait for ever
            self.failures.append(error)

    def land(self, verdict):
        if self.answer.land(verdict):
            self.announce(self.answer.epoch, self.answer.spared)

    def announce(self, epoch, spared=-1):
        for station in self.stations:
            station.announce(epoch, _native.wire_clock(), spared)

    def start(self, prompt, params, schedule, keep=0, end=None, oracle=None, trace=False, grammar=None, begun=()):
        """grammar: its number, and a mask for drafts. begun: ids that the answer has already."""
        end = end or len(prompt) + (params.max_tokens or 256)
        limits = Limits(end, frozenset(params.stop_token_ids), len(begun))
        if isinstance(schedule, str):
            schedule = parse_schedule(schedule)
        taken = params.for_backend(prompt)  # as an engine hands them on
        told = {"oracle": oracle, "trace": trace, "grammar": grammar}
        self.answer = self.drafter.start([*prompt, *begun], keep, taken, schedule, limits, self.epoch, **told)
        return self.answer

    def run(self, prompt, params, schedule, keep=0, oracle=None, trace=False, grammar=None, begun=()):
        answer = self.start(prompt, params, schedule, keep, oracle=oracle, trace=trace, grammar=grammar, begun=begun)
        drafting = threading.Thread(target=self._draft, args=(answer,))
        drafting.start()
        rounds = []
        while not self.failures:
            try:
                event = answer.next(50)
            except StopIteration:
                break
            if event is not None:
                rounds.append(event)
        answer.cancel()
        drafting.join()
        self.epoch = answer.epoch + 1
        self.announce(self.epoch)
        assert not self.failures, self.failures
        return rounds

    def draft_once(self, answer):
        """How many messages it made; fewer than 0: it is over."""
        out = self.buffers()
        written = answer.work(out)
        for message, words in zip(out, lengths(out, max(written, 0), self.hidden), strict=False):
            self.stations[0].post(message[:words])
        return written

    def _draft(self, answer):
        try:
            while self.draft_once(answer) >= 0:
                pass
        except Exception as error:
            self.failures.append(error)

    @staticmethod
    def choosing(engine):
        """Bytes of the final norm and the LM head."""
        model = engine.backend.model
        return model.lm_head.weight.nbytes + model.model.norm.weight.nbytes

    def close(self):
        for station in self.stations:
            station.close()
        for thread in self.threads:
            thread.join()


def ids_of(rounds):
    return tuple(id for round in rounds if isinstance(round, Round) for id in round.committed)


class LoopOverRanks:
    """The loop of rank 0 and the stations of others, in threads; passes go from hand to hand.

    blocks: of KV caches, on every rank. on_pass: hears every message, (rank that gets it, words).
    """

    def __init__(self, folder, sizes, head=None, format="int8", blocks=64, on_pass=lambda rank, words: None):
        checkpoint = Checkpoint(folder)
        self.hidden, self.on_pass = checkpoint.config.hidden_size, on_pass
        slices = [slices_for("cpu", "cpu", (format, "auto"), 1, [], rank) for rank in range(len(sizes))]
        slices[0].drafter(checkpoint, find_head(str(head or f"norm:{sizes[0]}"), checkpoint), sizes[0])
        self.stations = []
        for rank in range(1, len(sizes)):
            first, last = layers_of(sizes, rank)
            self.stations.append(slices[rank].station(checkpoint, first, last, 0.0))
        self.loop = slices[0].loop(len(sizes), blocks)
        self.words = _native.pass_words(self.hidden)
        self.failures, self._stop = [], threading.Event()
        works = [self._lead, *(lambda rank=rank: self._serve(rank) for rank in range(1, len(sizes)))]
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]
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

    def add(self, prompt, params, schedule, **more):
        """prompt: ids."""
        taken = params.for_backend(prompt)
        limits = Limits(len(prompt) + (params.max_tokens or 256), frozenset(params.stop_token_ids), 0)
        chosen = parse_schedule(schedule)
        automatic = not isinstance(chosen, Schedule)
        steps = copying(chosen) if automatic else chosen
        return self.loop.add(list(prompt), taken, steps, limits, automatic=automatic, **more)

    def close(self):
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for station in self.stations:
            station.close()
