"""Self-generated (on-policy) text: the model plays both sides of many conversations at a time.

A chat model writes the user's turn too: it continues the template's user header, and some first words, until it ends
the turn, as in Magpie (arXiv 2406.08464), and then answers. A base model simply writes. Most answers are greedy, for
greedy decoding is what most drafts are for, the others at a temperature. A user's prompt is answered greedily the first
time, and then at a temperature.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..errors import PpsdError
from .mix import Beginning, Mix, Recent
from .prompts import FAMILY, Ids
from .samplers import Sampler, States, Writing

MAX_ANSWER = 256
LEAST_ANSWER = 64  # that must fit the context after the longest question
GREEDY_SHARE = 0.6
QUESTION_TEMPERATURES = (0.7, 1.0)
ANSWER_TEMPERATURES = (0.4, 0.8, 1.0)


@dataclass
class Conversation:
    """ids[answer:] is what the model wrote as the answer; it was greedy when its `temperature` is 0.

    While `answer` is 0 the question is being written. `states` are the hidden states [length, kinds, hidden] of a
    finished text (of its last id, which never passes through the model: zeros).
    """

    beginning: Beginning
    ids: list[int]
    seed: int
    question_temperature: float
    temperature: float
    answer: int
    states: States | None = None


class SelfText:
    """Slots that each hold a conversation; a finished one makes room for a new one, while the others go on."""

    def __init__(
        self, sampler: Sampler, mix: Mix, seed: int, share: float = 0.0, prompts: Iterable[tuple[Ids, bool]] = ()
    ) -> None:
        """share: of the conversations, which answer the next of `prompts` (Prompts.of_shard) while there are some."""
        mix = mix.within(sampler.capacity - LEAST_ANSWER)
        needed = mix.longest + LEAST_ANSWER
        if needed > sampler.capacity:
            raise PpsdError(f"sampled conversations need a context of {needed}; the model has {sampler.capacity}")
        self.sampler, self.mix, self.share, self.prompts = sampler, mix, share, iter(prompts)
        self.random, self.recent = random.Random(seed), Recent()
        self.finished: list[Conversation] = []
        self.slots = [self._begin(self._new()) for _ in range(sampler.slots)]

    def run(self, steps: int) -> Iterator[int]:
        """Write in every slot for `steps` passes; yields after each of the sampler's steps the rows so far."""
        for done in range(0, steps, self.sampler.stride):
            self.sampler.step()
            self.slots = [self._go_on(*slot) if slot[1].over else slot for slot in self.slots]
            yield min(done + self.sampler.stride, steps) * len(self.slots)
        self.end()

    def end(self) -> None:
        """Answers are taken as far as they are."""
        self.sampler.stop()
        for conversation, text in self.slots:
            if conversation.answer and text.written:
                self._finish(conversation, text)

    def _new(self) -> Conversation:
        """A conversation that has only its beginning, and how warm its parts will be."""
        draw = self.random
        given = next(self.prompts, None) if draw.random() < self.share else None
        if given is None:
            beginning, greedy = self.mix.draw(draw, self.recent), draw.random() < GREEDY_SHARE
        else:
            beginning, greedy = Beginning(FAMILY, given[0], 0), given[1]
        answer = 0.0 if greedy else draw.choice(ANSWER_TEMPERATURES)
        question, seed = draw.choice(QUESTION_TEMPERATURES), draw.getrandbits(63)
        begun = 0 if beginning.most_question else len(beginning.ids)
        return Conversation(beginning, list(beginning.ids), seed, question, answer, begun)

    def _begin(self, slot: Conversation) -> tuple[Conversation, Writing]:
        """The model writes the next part, in a slot of its own."""
        temperature, most = slot.question_temperature, slot.beginning.most_question
        if slot.answer:
            temperature, most = slot.temperature, min(MAX_ANSWER, self.sampler.capacity - len(slot.ids))
        return slot, self.sampler.write(slot.ids, temperature, slot.seed, most)

    def _go_on(self, slot: Conversation, text: Writing) -> tuple[Conversation, Writing]:
        if slot.answer:
            self._finish(slot, text)
            return self._begin(self._new())
        if question := [id for id in text.written if id not in self.mix.end_ids]:
            slot.ids += [*question, *self.mix.between]
            slot.answer = len(slot.ids)
        else:  # an empty one is drawn again, with other noise
            slot.seed = (slot.seed + 1) % 2**63
        return self._begin(slot)

    def _finish(self, slot: Conversation, text: Writing) -> None:
        slot.ids += text.written
        states = text.states()
        if states is not None:
            slot.states = np.zeros((len(slot.ids), *states.shape[1:]), np.uint16)
            slot.states[: len(states)] = states
        self.finished.append(slot)
        self.recent.add(slot.beginning.family, slot.ids, slot.answer)
