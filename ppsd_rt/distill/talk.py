"""On-policy text: the model talks to itself, many conversations at a time.

A chat model writes the user's turn too: it continues the template's user header until it ends the turn, as in Magpie
(arXiv 2406.08464), and then answers. A base model simply writes. Half of the answers are greedy, for greedy decoding is
what most drafts are for, the others at a temperature.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import PpsdError
from ..models.llama import Attend, LlamaForCausalLM
from ..models.rope import Rope
from ..models.tokenizer import Tokenizer

MAX_QUESTION, MAX_ANSWER = 64, 256
QUESTION_TEMPERATURES = (0.7, 1.0)
ANSWER_TEMPERATURES = (0.6, 0.8, 1.0)
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Frame:
    """What stands around a sampled question: `before` it, and `between` it and the answer. No question: base model."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    asks: bool
    end_ids: frozenset[int]


@dataclass
class Conversation:
    """ids[answer:] is what the model wrote as the answer; it was greedy when its `temperature` is 0.

    While `answer` is 0 the question is being written; `forced` is what the template has next.
    """

    ids: list[int]
    question_temperature: float
    temperature: float
    answer: int = 0
    forced: list[int] = field(default_factory=list)


def frame_of(tokenizer: Tokenizer, end_ids: frozenset[int]) -> Frame:
    """Cut the chat template where the user's text stands."""
    if tokenizer.chat_template is None:
        if tokenizer.bos_id is None:
            raise PpsdError("the model has neither a chat template nor a beginning-of-sequence id to start a text with")
        return Frame((tokenizer.bos_id,), (), False, end_ids)
    before, mark, between = tokenizer.chat_template.render([{"role": "user", "content": _MARK}]).partition(_MARK)
    if not mark:
        raise PpsdError("the chat template does not show the user's text, so questions cannot be sampled after it")
    first, second = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (before, between))
    return Frame(first, second, True, end_ids)


class Talk:
    """Slots that each hold a conversation; a finished one makes room for a new one, while the others go on."""

    def __init__(self, model: LlamaForCausalLM, frame: Frame, slots: int, seed: int) -> None:
        self.model, self.frame = model, frame
        config, like = model.config, model.model.embed_tokens.weight
        longest = len(frame.before) + MAX_QUESTION + len(frame.between) + MAX_ANSWER
        if longest > config.max_position_embeddings:
            raise PpsdError(f"sampled conversations need a context of {longest}; the model has less")
        self.device = like.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.rope = Rope(config, longest, self.device)
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, longest, config.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.slots = [self._new() for _ in range(slots)]
        self.finished: list[Conversation] = []
        self._share_beginning()

    def run(self, steps: int) -> Iterator[int]:
        """Write `steps` tokens in every slot; yields after each step the number of tokens so far."""
        for step in range(1, steps + 1):
            logits = self._step()
            self._extend(self._sample(logits))
            yield step * len(self.slots)
        self.finished += [slot for slot in self.slots if 0 < slot.answer < len(slot.ids)]

    def _new(self) -> Conversation:
        """A conversation that has only its beginning, and how warm its parts will be."""
        greedy = self._pick((True, False))
        answer = 0.0 if greedy else self._pick(ANSWER_TEMPERATURES)
        new = Conversation(list(self.frame.before), self._pick(QUESTION_TEMPERATURES), answer)
        if not self.frame.asks:
            new.answer = len(new.ids)
        return new

    def _pick(self, options: Sequence[float]) -> float:
        return options[int(torch.randint(len(options), (), generator=self.generator, device=self.device))]

    @torch.no_grad()
    def _share_beginning(self) -> None:
        """Keys and values of all but the last id of `before`, computed once and copied to every slot."""
        for position, id in enumerate(self.frame.before[:-1]):
            ids = torch.full((len(self.slots), 1), id, device=self.device)
            self._rows(ids, torch.full((len(self.slots),), position, device=self.device))

    @torch.no_grad()
    def _step(self) -> Tensor:
        """Feed each slot's last id -> logits [slots, vocabulary] for its next one."""
        ids = torch.tensor([slot.ids[-1:] for slot in self.slots], device=self.device)  # [slots, 1]
        positions = torch.tensor([len(slot.ids) - 1 for slot in self.slots], device=self.device)
        return self.model.lm_head(self.model.model.norm(self._rows(ids, positions)))[:, 0].float()

    def _rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids [slots, 1] at positions [slots] through all layers -> [slots, 1, hidden]."""
        later = self.keys.new_zeros(len(ids), 1, 1, self.keys.shape[3])
        later.masked_fill_(torch.arange(later.shape[3], device=self.device) > positions[:, None, None, None], -1e9)
        x = self.model.model.embed_tokens(ids)
        for number, layer in enumerate(self.model.model.layers):
            x = layer(x, self._attend(number, positions, later))
        return x

    def _attend(self, number: int, positions: Tensor, later: Tensor) -> Attend:
        keys, values = self.keys[number], self.values[number]  # [slots, kv heads, longest, head_dim]
        every = torch.arange(len(positions), device=self.device)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys[every, :, positions] = self.rope.rotate(k, positions[:, None])[:, 0]
            values[every, :, positions] = v[:, 0]
            # [slots, 1, heads, head_dim] -> [slots, kv heads, heads of a group, head_dim]
            queries = self.rope.rotate(q, positions[:, None])[:, 0].unflatten(1, (keys.shape[1], -1))
            scores = queries @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
            # Over the whole cache: a slice of it would be copied before it is multiplied.
            mixed = (scores + later).softmax(-1) @ values
            return mixed.flatten(1, 2)[:, None]

        return attend

    def _sample(self, logits: Tensor) -> list[int]:
        """One id per slot: greedy or at the temperature of what the slot is writing."""
        temperatures = torch.tensor(
            [slot.temperature if slot.answer else slot.question_temperature for slot in self.slots]
        )
        chosen = logits.argmax(-1)
        warm = temperatures.nonzero()[:, 0].to(self.device)
        scaled = logits[warm] / temperatures.to(self.device)[warm, None]
        # Inverse transform sampling: one uniform number per row costs far less than one per row and id.
        cumulative = scaled.softmax(-1).cumsum(-1)
        drawn = torch.rand(len(warm), 1, generator=self.generator, device=self.device) * cumulative[:, -1:]
        chosen[warm] = torch.searchsorted(cumulative, drawn)[:, 0].clamp_max(logits.shape[1] - 1)
        return chosen.tolist()

    def _extend(self, chosen: list[int]) -> None:
        """Give every slot its next id: the sampled one, or what the template has in its place."""
        for number, (slot, id) in enumerate(zip(self.slots, chosen, strict=True)):
            if slot.answer:
                slot.ids.append(id)
                if id in self.frame.end_ids or len(slot.ids) - slot.answer == MAX_ANSWER:
                    self.finished.append(slot)
                    self.slots[number] = self._new()
                continue
            asked = len(slot.ids) - len(self.frame.before)
            if not slot.forced and asked and (id in self.frame.end_ids or asked == MAX_QUESTION):
                slot.forced = list(self.frame.between)
            if slot.forced:
                slot.ids.append(slot.forced.pop(0))
                slot.answer = 0 if slot.forced else len(slot.ids)
            elif id not in self.frame.end_ids:  # an empty question is drawn again
                slot.ids.append(id)
