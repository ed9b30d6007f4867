"""Torch stages: slices of the model with their KV caches, row-invariant by construction.

A row is one token at one position. Its result must not depend on how many rows share the pass, or speculation would
change the answer; yet the BLAS below picks another kernel, and so another rounding, for every number of rows. So a
stage never passes the BLAS anything but whole blocks: `block_rows` rows at positions [i * block_rows, (i + 1) *
block_rows), in which a row has the same slot in every pass, rows that are not in the pass are zeros, and attention
spans a length that the block's position alone decides. Every call that computes a row then has the same shape with the
row in the same place, and what the other rows hold does not enter a row's arithmetic. Hence equal bits, on any machine.

The price is that one row costs as much as a block; verification of many rows costs what one row costs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models.config import LayerAttention, LlamaConfig
from ..models.exit_head import ExitHead
from ..models.head_file import DISTANCES
from ..models.llama import FP32_CPU_ROWS, Attend, LlamaForCausalLM
from ..models.rope import Rope, rotated_as
from .draft_vocabulary import DraftVocabulary

# Attention of a block spans a multiple of this many positions (a multiple of every block size, so that a block never
# straddles two spans).
SPAN = 256


def block_rows(dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a block: as many as cost the same as one. On the CPU that is 4 in float32, else 16."""
    return FP32_CPU_ROWS if dtype == torch.float32 and device.type == "cpu" else 16


def in_blocks(rows: int, start: int, x: Tensor, compute: Callable[[Tensor, "Block"], Tensor]) -> Tensor:
    """Apply `compute` ([rows, n] -> [rows, m]) to x [count, n], the rows at positions start.., block by block."""
    done = []
    for first in range(start - start % rows, start + len(x), rows):
        block = Block(first, max(start, first), min(start + len(x), first + rows))
        padded = x.new_zeros(rows, x.shape[-1])
        padded[block.slots] = x[block.low - start : block.high - start]
        done.append(compute(padded, block)[block.slots])
    return torch.cat(done)


@dataclass(frozen=True)
class Block:
    """A block at `first`, of which the positions [low, high) take part in the pass."""

    first: int
    low: int
    high: int

    @property
    def slots(self) -> slice:
        return slice(self.low - self.first, self.high - self.first)


def zeros(like: Tensor, *shape: int) -> Tensor:
    """What keeps rows from call to call: torch.inference_mode() would make tensors that only it may write to."""
    with torch.inference_mode(False):
        return like.new_zeros(shape)


class Void(Exception):
    """What is being computed is wanted no more."""


class Stage:
    """Consecutive layers with their KV cache: rows [0, length) have passed through."""

    def __init__(self, layers: Iterable[nn.Module], config: LlamaConfig, like: Tensor) -> None:
        """`like` gives the dtype and the device."""
        self.layers = list(layers)
        self.config = config
        self.rows = block_rows(like.dtype, like.device)
        self.length = 0
        self._like = like
        self._keys = self._values = like.new_zeros(len(self.layers), config.num_key_value_heads, 0, config.head_dim)
        self._rope = Rope(config, 0)
        self._text = 0
        self._siblings: dict[int, tuple[Tensor, ...]] = {}  # their keys and values, by position
        self._cancelled: Callable[[], bool] | None = None

    def reserve(self, capacity: int) -> None:
        """Make room for at least `capacity` rows; what the cache holds stays."""
        have = self._keys.shape[2]
        if capacity <= have:
            return
        capacity = -(-capacity // SPAN) * SPAN
        shape = (*self._keys.shape[:2], capacity, self._keys.shape[3])  # [layers, kv heads, capacity, head_dim]
        keys, values = zeros(self._like, *shape), zeros(self._like, *shape)
        keys[:, :, :have], values[:, :, :have] = self._keys, self._values
        self._keys, self._values = keys, values
        self._rope = Rope(self.config, capacity, self._like.device, text=self._text)

    def begin_text(self, length: int) -> None:
        """What comes is a text of that length: rows that were rotated as another one's are void."""
        if (text := rotated_as(self.config, length)) != self._text:
            self._text = text
            self.rollback(0)
            self._rope = Rope(self.config, self._keys.shape[2], self._like.device, text=text)

    def run(self, x: Tensor) -> Tensor:
        """The rows x [count, hidden] at positions [length, length + count) -> [count, hidden]."""
        x = in_blocks(self.rows, self.length, x, self._through_layers) if self.layers else x
        self.length += len(x)
        return x

    def run_while(self, x: Tensor, cancelled: Callable[[], bool] | None) -> Tensor:
        """`run`, which raises Void where `cancelled` says so in front of a layer."""
        self._cancelled = cancelled
        try:
            return self.run(x)
        finally:
            self._cancelled = None

    def rollback(self, length: int) -> None:
        """Forget the rows from `length` on. Nothing is copied: later rows overwrite them."""
        self.length = min(self.length, length)
        self._siblings.clear()

    def run_beside(self, x: Tensor, position: int) -> Tensor:
        """A row x [1, hidden] at a position that another row holds, which it does not see -> [1, hidden]."""
        length, self.length = self.length, position
        kept = self._row(position)
        x = self.run(x)
        self._siblings[position] = self._row(position)
        self._put(position, kept)
        self.length = length
        return x

    def adopt(self, position: int) -> None:
        """The row that ran beside the one at `position` takes its place; those after it are void."""
        self._put(position, self._siblings[position])
        self.length = position + 1

    def _row(self, position: int) -> tuple[Tensor, ...]:
        return self._keys[:, :, position].clone(), self._values[:, :, position].clone()

    def _put(self, position: int, row: tuple[Tensor, ...]) -> None:
        self._keys[:, :, position], self._values[:, :, position] = row

    def _through_layers(self, x: Tensor, block: Block) -> Tensor:
        span = SPAN * (block.first // SPAN + 1)
        positions = torch.arange(block.first, block.first + len(x), device=x.device)
        behind = positions[:, None] - torch.arange(span, device=x.device)  # [rows, span]: how far, or negative
        for number, layer in enumerate(self.layers):
            if self._cancelled is not None and self._cancelled():
                raise Void
            self._tap(number, x, block)
            x = layer(x, self._attend(number, block, span, behind))
        self._tap(len(self.layers), x, block)
        return x

    def _tap(self, number: int, x: Tensor, block: Block) -> None:
        """What the block [rows, hidden] is after `number` layers."""

    def _attend(self, number: int, block: Block, span: int, behind: Tensor) -> Attend:
        keys, values = self._keys[number], self._values[number]  # [kv heads, capacity, head_dim]
        positions = slice(block.first, block.first + self.rows)

        def attend(q: Tensor, k: Tensor, v: Tensor, how: LayerAttention) -> Tensor:
            if how.rotary:
                q, k = self._rope.rotate(q, positions), self._rope.rotate(k, positions)
            hidden = behind < 0 if how.window is None else (behind < 0) | (behind >= how.window)
            keys[:, block.low : block.high] = k[block.slots].transpose(0, 1)
            values[:, block.low : block.high] = v[block.slots].transpose(0, 1)
            kv_heads, head_dim = k.shape[1:]
            # [rows, heads, head_dim] -> [kv heads, heads of a group * rows, head_dim]
            queries = q.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
            scores = queries @ keys[:, :span].float().transpose(1, 2) * head_dim**-0.5
            scores = scores.unflatten(1, (-1, self.rows)).masked_fill(hidden, -torch.inf).softmax(-1).flatten(1, 2)
            mixed = scores @ values[:, :span].float()  # [kv heads, group * rows, head_dim]
            return mixed.unflatten(1, (-1, self.rows)).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)

        return attend


class DraftStage(Stage):
    """Layers [0, E), the exit head, and the exit hidden states that verification starts from."""

    def __init__(self, model: LlamaForCausalLM, head: ExitHead | None, layers: int = 0) -> None:
        """layers: how many there are where no head says so; none: the hidden states are the embeddings."""
        config, like = model.config, model.model.embed_tokens.weight
        super().__init__(model.model.layers[: head.info.exit_layer if head else layers], config, like)
        self._embed = model.model.embed_tokens
        self._head, self._lm_head = head, model.lm_head
        self.begin_vocabulary()
        self._head_stage = Stage(head.layers if head else [], config, like)
        self._exit_hidden = like.new_zeros(0, config.hidden_size)
        self._sibling_hidden: dict[int, Tensor] = {}  # [1, hidden] by position
        self._verified = (-1, like.new_zeros(config.hidden_size))  # position and last hidden state of a verified row

    @property
    def draft_ids(self) -> Tensor | None:
        """[draft vocabulary] int64, ascending; None: all."""
        return self._vocabulary.ids if self._vocabulary else None

    def follow(self, text: Sequence[int]) -> None:
        """From now on the ids of the text so far may be drafted too."""
        if self._vocabulary:
            self._vocabulary.follow(text)

    def begin_vocabulary(self) -> None:
        """Of another text."""
        listed = self._head.draft_ids if self._head else None
        self._vocabulary = None if listed is None else DraftVocabulary(listed, self._lm_head.weight)

    def reserve(self, capacity: int) -> None:
        super().reserve(capacity)
        self._head_stage.reserve(capacity)
        if capacity > len(self._exit_hidden):
            grown = zeros(self._exit_hidden, capacity, self._exit_hidden.shape[1])
            grown[: len(self._exit_hidden)] = self._exit_hidden
            self._exit_hidden = grown

    def run_tokens(self, ids: Sequence[int], cancelled: Callable[[], bool] | None = None) -> None:
        """Early layers over the tokens at positions [length, length + len(ids)). cancelled: see `run_while`."""
        start = self.length
        x = self._embed(torch.tensor(ids, device=self._exit_hidden.device))  # [count, hidden]
        self._exit_hidden[start : start + len(ids)] = self.run_while(x, cancelled)

    def exit_hidden(self, start: int, count: int) -> Tensor:
        return self._exit_hidden[start : start + count]

    def run_sibling(self, position: int, token: int) -> None:
        """Early layers over another token than the one at `position`, beside it."""
        x = self._embed(torch.tensor([token], device=self._exit_hidden.device))  # [1, hidden]
        self._sibling_hidden[position] = self.run_beside(x, position)

    def sibling_hidden(self, position: int) -> Tensor:
        """[1, hidden]"""
        return self._sibling_hidden[position]

    def adopt(self, position: int) -> None:
        super().adopt(position)
        self._head_stage.rollback(position)
        self._exit_hidden[position : position + 1] = self._sibling_hidden[position]

    def learn(self, position: int, last_hidden: Tensor) -> None:
        """The newest verified row, as the last layer left it [hidden]: for heads of the kind `feedback`."""
        self._verified = (position, last_hidden)

    def draft_logits(self) -> Tensor:
        """[draft vocabulary]: the exit head after the last row, for the token at position `length`.

        The head's own layers first catch up with the rows that came since it was last asked.
        """
        head, stage = self._head, self._head_stage
        assert head is not None, "drafting needs an exit head"
        start = min(stage.length, self.length - 1)
        stage.rollback(start)
        exits = self._exit_hidden[start : self.length]
        position, verified = self._verified
        if head.feedback is not None and 1 <= (distance := self.length - 1 - position) <= DISTANCES:
            exits = torch.cat([exits[:-1], head.feedback(exits[-1:], verified, distance)])
        x = head.norm(stage.run(exits)[-1:])
        logits = in_blocks(self.rows, self.length - 1, x, lambda rows, _: head.lm_head(rows))[0]
        return self._vocabulary.logits(x[0], logits) if self._vocabulary else logits

    def begin_text(self, length: int) -> None:
        super().begin_text(length)
        self._head_stage.begin_text(length)
        self.begin_vocabulary()

    def rollback(self, length: int) -> None:
        super().rollback(length)
        self._head_stage.rollback(length)
        if self._vocabulary:
            self._vocabulary.text.roll_back(length)
        self._sibling_hidden.clear()
        if self._verified[0] >= length:
            self._verified = (-1, self._verified[1])


class Taps:
    """Hidden states of the verified rows [0, length) after some layers, for a head that reads them."""

    def __init__(self, layers: Sequence[int], like: Tensor) -> None:
        """layers: after how many of them. like: as of Stage, [..., hidden]."""
        self.layers, self.length = tuple(layers), 0
        self._states = like.new_zeros(0, len(layers), like.shape[-1])

    def reserve(self, capacity: int) -> None:
        if capacity > len(self._states):
            grown = zeros(self._states, capacity, *self._states.shape[1:])
            grown[: len(self._states)] = self._states
            self._states = grown

    def rows(self, start: int, end: int) -> Tensor:
        """[end - start, taps * hidden]"""
        return self._states[start:end].flatten(1)

    def keep(self, layer: int, start: int, x: Tensor) -> None:
        """The rows x [count, hidden] from position `start` on, after `layer` layers."""
        for place in (place for place, tapped in enumerate(self.layers) if tapped == layer):
            self._states[start : start + len(x), place] = x

    def put(self, position: int, states: Tensor) -> None:
        """Of one row, [taps, hidden]."""
        self._states[position] = states

    def row(self, position: int) -> Tensor:
        return self._states[position].clone()


class VerifyStage(Stage):
    """Layers [E, L), the final norm and the LM head; or some of these layers."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        first_layer: int,
        last_layer: int | None = None,
        like: Tensor | None = None,
        taps: Taps | None = None,
    ) -> None:
        """taps: kept for a head that reads them, where all layers are this stage's."""
        like = model.model.embed_tokens.weight if like is None else like
        super().__init__(model.model.layers[first_layer:last_layer], model.config, like)
        self._model, self._taps = model, taps
        self._last = like.new_zeros(0, model.config.hidden_size)

    def logits(self, exit_hidden: Tensor, last: int) -> Tensor:
        """Verify rows exit_hidden [count, hidden] at positions [length, ..) -> logits of the `last` rows [last, V]."""
        x = self.run(exit_hidden)[-last:]
        if self._taps is not None:
            self._taps.length = self.length
        return self.choices(x, self.length - last)

    def sibling_logits(self, exit_hidden: Tensor, position: int) -> Tensor:
        """The same for a row exit_hidden [1, hidden] beside the one at `position` -> [1, V]."""
        return self.choices(self.run_beside(exit_hidden, position), position)

    def choices(self, x: Tensor, start: int) -> Tensor:
        """The rows x [count, hidden] from position `start` on, as the last layer left them -> logits [count, V]."""
        self._last = x
        return in_blocks(self.rows, start, x, lambda rows, _: self._model.lm_head(self._model.model.norm(rows)))

    def last_hidden(self) -> Tensor:
        """[last, hidden]: the rows of the last `logits` or `sibling_logits`, after the last layer."""
        return self._last

    def adopt(self, position: int) -> None:
        super().adopt(position)
        if self._taps is not None:
            self._taps.length = self.length

    def rollback(self, length: int) -> None:
        super().rollback(length)
        if self._taps is not None:
            self._taps.length = min(self._taps.length, length)

    def _tap(self, number: int, x: Tensor, block: Block) -> None:
        if self._taps is not None:
            self._taps.keep(number, block.low, x[block.slots])

    def _row(self, position: int) -> tuple[Tensor, ...]:
        return super()._row(position) + (() if self._taps is None else (self._taps.row(position),))

    def _put(self, position: int, row: tuple[Tensor, ...]) -> None:
        super()._put(position, row[:2])
        if self._taps is not None:
            self._taps.put(position, row[2])
