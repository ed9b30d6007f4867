"""Self-generated (on-policy) text: the model plays both sides of many conversations at a time.

A chat model writes the user's turn too: it continues the template's user header, and some first words, until it ends
the turn, as in Magpie (arXiv 2406.08464), and then answers. A base model simply writes. Most answers are greedy, for
greedy decoding is what most drafts are for, the others at a temperature.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import PpsdError
from .mix import Beginning, Mix
from .samplers import Sampler, States

MAX_ANSWER = 256
LEAST_ANSWER = 64  # that must fit the context after the longest question
GREEDY_SHARE = 0.6
QUESTION_TEMPERATURES = (0.7, 1.0)
ANSWER_TEMPERATURES = (0.4, 0.8, 1.0)


@dataclass
class Conversation:
    """ids[answer:] is what the model wrote as the answer; it was greedy when its `temperature` is 0.

    While `answer` is 0 the question is being written. The first `fed` ids have passed through the model; `states` are
    their hidden states [length, kinds, hidden] once the text is finished (of its last id, which is never fed: zeros).
    """

    beginning: Beginning
    ids: list[int]
    seed: int
    question_temperature: float
    temperature: float
    answer: int
    fed: int = 0
    states: States | None = None

    def inverse_temperature(self) -> float:
        temperature = self.temperature if self.answer else self.question_temperature
        return 1 / temperature if temperature else 0.0


class SelfText:
    """Slots that each hold a conversation; a finished one makes room for a new one, while the others go on."""

    def __init__(self, sampler: Sampler, mix: Mix, seed: int) -> None:
        needed = mix.longest + LEAST_ANSWER
        if needed > sampler.capacity:
            raise PpsdError(f"sampled conversations need a context of {needed}; the model has {sampler.capacity}")
        self.sampler, self.mix = sampler, mix
        self.random = random.Random(seed)
        self.slots = [self._new() for _ in range(sampler.slots)]
        self.finished: list[Conversation] = []
        self._states: States | None = None  # [slots, capacity, kinds, hidden]

    def run(self, steps: int) -> Iterator[int]:
        """Write `steps` tokens in every slot; yields after each step the number of tokens so far."""
        for step in range(1, steps + 1):
            self._step()
            yield step * len(self.slots)
        for number, slot in enumerate(self.slots):
            if 0 < slot.answer < len(slot.ids):
                self._finish(number)

    def _new(self) -> Conversation:
        """A conversation that has only its beginning, and how warm its parts will be."""
        beginning, draw = self.mix.draw(self.random), self.random
        answer = 0.0 if draw.random() < GREEDY_SHARE else draw.choice(ANSWER_TEMPERATURES)
        question, seed = draw.choice(QUESTION_TEMPERATURES), draw.getrandbits(63)
        begun = 0 if beginning.asks else len(beginning.ids)
        return Conversation(beginning, list(beginning.ids), seed, question, answer, begun)

    def _step(self) -> None:
        """Feed every slot its next id, and those that have none left what the model says."""
        slots = self.slots
        positions = np.array([slot.fed for slot in slots], dtype=np.int32)
        chosen, states = self.sampler.step(
            np.array([slot.ids[slot.fed] for slot in slots], dtype=np.int32),
            positions,
            np.array([slot.inverse_temperature() for slot in slots], dtype=np.float32),
            np.array([slot.seed for slot in slots], dtype=np.uint64),
        )
        if states is not None:
            if self._states is None:
                self._states = np.zeros((len(slots), self.sampler.capacity, *states.shape[1:]), np.uint16)
            self._states[np.arange(len(slots)), positions] = states
        for number, id in enumerate(chosen.tolist()):
            slots[number].fed += 1
            if slots[number].fed == len(slots[number].ids):
                self._extend(number, id)

    def _extend(self, number: int, id: int) -> None:
        slot, ends = self.slots[number], self.mix.end_ids
        if slot.answer:
            slot.ids.append(id)
            if id in ends or len(slot.ids) in (slot.answer + MAX_ANSWER, self.sampler.capacity):
                self._finish(number)
                self.slots[number] = self._new()
            return
        asked = len(slot.ids) - len(slot.beginning.ids)
        if id not in ends:
            slot.ids.append(id)
            asked += 1
        # An empty question is drawn again, with other noise.
        slot.seed = (slot.seed + (asked == 0)) % 2**63
        if asked and (id in ends or asked == slot.beginning.most_question):
            slot.ids += self.mix.between
            slot.answer = len(slot.ids)
        elif asked == 0:
            slot.fed -= 1

    def _finish(self, number: int) -> None:
        slot = self.slots[number]
        if self._states is not None:
            slot.states = self._states[number, : len(slot.ids)].copy()
            slot.states[slot.fed :] = 0
        self.finished.append(slot)
