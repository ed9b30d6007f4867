"""A draft stage and verification stations wired in one process, without a network."""

import threading

import numpy as np

from ppsd_rt import _native
from ppsd_rt.find_head import find_head
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.rounds import Limits, Round
from ppsd_rt.pipeline.schedule import parse_schedule
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
