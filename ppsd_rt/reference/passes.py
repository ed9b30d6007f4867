"""Passes in torch: what the loop of csrc/loop/loop.cpp asks of a backend, in plain tensors. The readable twin.

A row is one token at one position. Its result must not depend on what shares the pass, or speculation and company would
change the answer; yet the BLAS below picks another kernel, and so another rounding, for every number of rows. So a pass
never gives the BLAS anything but whole blocks: `block_rows` rows, in which a row at position p has slot p % block_rows.
Rows of several texts share a block where their slots differ. Attention runs for each text by itself, over a length that
the position of its block alone decides. Every call that computes a row then has the same shape with the row in the same
place, and what the other rows hold does not enter a row's arithmetic. Hence equal bits, on any machine.

The price is that one row costs as much as a block; verification of many rows costs what one row costs.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..cpu.formats import rotary_of
from ..models.config import LayerAttention, LlamaConfig
from ..models.exit_head import Eagle3Head, ExitHead
from ..models.head_file import DISTANCES
from ..models.llama import FP32_CPU_ROWS, Attend, DecoderLayer, LlamaForCausalLM
from ..models.rope import Rope

SPAN = 256  # attention of a block spans a multiple of this many positions; no block straddles two spans
PAGE = 64  # positions of a block of the KV cache, as of the loop

Floats = npt.NDArray[np.float32]  # [rows, hidden], which holds bfloat16 and float16 exactly
# Rows of a text: the first one's position, how many; the text's pages; and how many of the rows are a prompt's.
Where = tuple[int, int, Sequence[int], int]
Cancelled = Callable[[], bool] | None


def block_rows(dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a block: as many as cost the same as one. On the CPU that is 4 in float32, else 16."""
    return FP32_CPU_ROWS if dtype == torch.float32 and device.type == "cpu" else 16


@dataclass(frozen=True)
class Piece:
    """Rows [row, row + high - low) of a pass: positions [low, high) of a text, in the block that begins at `first`."""

    first: int
    low: int
    high: int
    row: int
    pages: Sequence[int]

    @property
    def slots(self) -> slice:
        return slice(self.low - self.first, self.high - self.first)

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.high - self.low)


def in_blocks(size: int, texts: Iterable[Where]) -> list[list[Piece]]:
    """The rows of the texts, in blocks of `size` slots. A text's rows never come before its earlier ones."""
    blocks: list[tuple[set[int], list[Piece]]] = []
    row = 0
    for start, count, pages, _ in texts:
        at = 0  # the block of the text's rows so far
        for first in range(start - start % size, start + count, size):
            piece = Piece(first, max(start, first), min(start + count, first + size), row, pages)
            slots = set(range(piece.slots.start, piece.slots.stop))
            while at < len(blocks) and blocks[at][0] & slots:
                at += 1
            if at == len(blocks):
                blocks.append((set(), []))
            blocks[at][0].update(slots)
            blocks[at][1].append(piece)
            row += piece.high - piece.low
    return [pieces for _, pieces in blocks]


def by_blocks(size: int, x: Tensor, texts: Iterable[Where], compute: Callable[[Tensor, list[Piece]], Tensor]) -> Tensor:
    """Apply `compute` ([size, n] -> [size, m]) to the rows x [count, n] of these texts, block by block."""
    out: Tensor | None = None
    for pieces in in_blocks(size, texts):
        block = x.new_zeros(size, x.shape[-1])
        for piece in pieces:
            block[piece.slots] = x[piece.rows]
        computed = compute(block, pieces)
        out = computed.new_empty(len(x), computed.shape[-1]) if out is None else out
        for piece in pieces:
            out[piece.rows] = computed[piece.slots]
    return x if out is None else out


class Void(Exception):
    """What is being computed is wanted no more."""


@dataclass
class Stack:
    """Consecutive layers and their KV cache, [layers, pages, kv heads, PAGE, head_dim] for keys and for values.

    Page 0 stays zeros: it is what attention spans behind a text's own pages. taps: after so many layers, rows are kept.
    """

    layers: Sequence[nn.Module]
    config: LlamaConfig
    like: Tensor  # gives the dtype and the device
    taps: Sequence[int] = ()
    tapped: Tensor | None = None  # [rows of the last pass, taps, hidden]

    def __post_init__(self) -> None:
        self.size = block_rows(self.like.dtype, self.like.device)
        heads, head_dim = self.config.num_key_value_heads, self.config.head_dim
        self._keys = self._values = self.like.new_zeros(len(self.layers), 0, heads, PAGE, head_dim)
        self._rope = Rope(self.config, 0)

    @property
    def page_bytes(self) -> int:
        """Of the KV cache, for PAGE positions."""
        return 2 * len(self.layers) * self.config.num_key_value_heads * self.config.head_dim * PAGE * self.like.itemsize

    def reserve(self, rows: int, rotated_as: int) -> None:
        self._rope = Rope(self.config, -(-rows // SPAN) * SPAN, self.like.device, text=rotated_as)

    def hold(self, pages: int) -> None:
        """Make room for at least so many; what they hold stays."""
        if (have := self._keys.shape[1]) <= pages:
            more = (0, 0, 0, 0, 0, 0, 0, max(pages + 1, 2 * have) - have)
            self._keys, self._values = F.pad(self._keys, more), F.pad(self._values, more)

    def change(self, wiped: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Pages that become zeros, and then (from, to)."""
        self.hold(max((0, *(page + 1 for page in wiped), *(1 + max(copy) for copy in copies))))
        for cache in (self._keys, self._values):
            for page in wiped:
                cache[:, page + 1] = 0
            for origin, copy in copies:
                cache[:, copy + 1] = cache[:, origin + 1]

    def run(self, x: Tensor, texts: Sequence[Where], cancelled: Cancelled = None) -> Tensor:
        """The rows x [rows, n] of these texts -> [rows, hidden]. Raises Void in front of a layer."""
        self.hold(1 + max((page for _, _, pages, _ in texts for page in pages), default=0))
        self.tapped = x.new_empty(len(x), len(self.taps), self.config.hidden_size)

        def compute(block: Tensor, pieces: list[Piece]) -> Tensor:
            seen = [self._seen(piece) for piece in pieces]
            positions = torch.zeros(self.size, dtype=torch.int64, device=x.device)
            for piece in pieces:
                positions[piece.slots] = torch.arange(piece.low, piece.high, device=x.device)
            for number, layer in enumerate(self.layers):
                if cancelled is not None and cancelled():
                    raise Void
                self._tap(number, block, pieces)
                block = layer(block, self._attend(number, positions, pieces, seen))
            self._tap(len(self.layers), block, pieces)
            return block

        return by_blocks(self.size, x, texts, compute) if self.layers else x

    def _tap(self, number: int, block: Tensor, pieces: list[Piece]) -> None:
        """What the block [size, hidden] is after `number` layers."""
        assert self.tapped is not None
        for place in (place for place, tap in enumerate(self.taps) if tap == number):
            for piece in pieces:
                self.tapped[piece.rows, place] = block[piece.slots]

    def _seen(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The pages that attention of the piece's block spans, and how far each position is behind each row of it."""
        span = SPAN * (piece.first // SPAN + 1)
        pages = [page + 1 for page in piece.pages[: span // PAGE]]
        pages += [0] * (span // PAGE - len(pages))
        device = self.like.device
        rows = torch.arange(piece.first, piece.first + self.size, device=device)
        return torch.tensor(pages, device=device), rows[:, None] - torch.arange(span, device=device)

    def _attend(self, number: int, positions: Tensor, pieces: list[Piece], seen: list[tuple[Tensor, Tensor]]) -> Attend:
        keys, values = self._keys[number], self._values[number]  # [pages, kv heads, PAGE, head_dim]

        def attend(q: Tensor, k: Tensor, v: Tensor, how: LayerAttention) -> Tensor:
            if how.rotary:
                q, k = self._rope.rotate(q, positions), self._rope.rotate(k, positions)
            kv_heads, head_dim = k.shape[1:]
            # [rows, heads, head_dim] -> [kv heads, heads of a group * rows, head_dim]
            queries = q.float().unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
            mixed = torch.zeros_like(q)
            for piece, (pages, behind) in zip(pieces, seen, strict=True):
                own = pages[torch.arange(piece.low, piece.high, device=pages.device) // PAGE]
                places = positions[piece.slots] % PAGE
                keys[own, :, places], values[own, :, places] = k[piece.slots], v[piece.slots]
                hidden = behind < 0 if how.window is None else (behind < 0) | (behind >= how.window)
                there, what = (cache[pages].transpose(0, 1).flatten(1, 2).float() for cache in (keys, values))
                scores = queries @ there.transpose(1, 2) * head_dim**-0.5
                scores = scores.unflatten(1, (-1, self.size)).masked_fill(hidden, -torch.inf).softmax(-1).flatten(1, 2)
                rows = (scores @ what).unflatten(1, (-1, self.size)).permute(2, 0, 1, 3).flatten(1, 2)
                mixed[piece.slots] = rows[piece.slots].to(q.dtype)
            return mixed

        return attend


class HeardLayer(nn.Module):
    """The layer of a head with a tap. Of verified rows, [rows, 2 * hidden], it leaves keys and values alone."""

    def __init__(self, head: ExitHead) -> None:
        super().__init__()
        self._head = head

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        layer = self._head.layers[0]
        assert isinstance(layer, DecoderLayer)
        if x.shape[-1] == len(layer.input_layernorm.weight):
            return layer(x, attend)
        states, tapped = x.chunk(2, dim=-1)
        k, v = self._head.verified(states, tapped)
        attend(layer.self_attn.qkv(states)[0], k, v, layer.self_attn.how)
        return states


class TorchPasses:
    """What csrc/bindings/passes.cpp asks: states come and go as float32 arrays, logits go as float32.

    decoded_rows_differ: has a row other bits as one of a prompt's (Where) than where decoding made it? chooses: does it
    choose(rows of the last `late`: (row, position of the token, key of the noise, temperature)) -> ids, or -1 where a
    logit is no number?
    """

    decoded_rows_differ = chooses = False

    def __init__(self, model: LlamaForCausalLM, head: ExitHead | Eagle3Head | None) -> None:
        config, like = model.config, model.model.embed_tokens.weight
        self._model, self._head, self._like = model, head, like
        self._eagle = head if isinstance(head, Eagle3Head) else None
        exit_layer = head.info.exit_layer if head and not self._eagle else 0
        layers, own = list(model.model.layers), list(head.layers) if head else []
        self._early = Stack(layers[:exit_layer], config, like)
        self._tap = head.info.tap if isinstance(head, ExitHead) else 0
        taps = self._eagle.eagle.taps if self._eagle else (self._tap - exit_layer,) if self._tap else ()
        self._late = Stack(layers[exit_layer:], config, like, taps)
        self._own = Stack(own, self._eagle.eagle.layer if self._eagle else config, like)
        if isinstance(head, ExitHead) and self._tap:
            self._own.layers = [HeardLayer(head)]
        self._stacks = self._early, self._late, self._own
        self._last = like.new_zeros(0, config.hidden_size)  # of the last pass, after the late layers
        # What the loop must know, see facts_of() there.
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.taps = [exit_layer + tap for tap in self._late.taps]
        self.drawn: list[Floats] = []  # of the last `draw` of a head with a tap: what its layer read of the last rows
        self.drafts, self.lags = head is not None, bool(own) and not self._eagle
        self.hears = isinstance(head, ExitHead) and head.feedback is not None
        self.draft_ids: list[int] = [] if head is None or head.draft_ids is None else head.draft_ids.tolist()
        # Ids of the text may be drafted where the head's LM head holds the model's own rows.
        rows = model.lm_head.weight
        self.follows = bool(self.draft_ids) and (
            self._eagle is None or same_rows(self._eagle.lm_head.weight, rows[self._eagle.draft_ids])
        )
        self.rotary = rotary_of(config)
        drafted = _weights(layers[:exit_layer]) + (_weights([head]) if head else 0)
        self.draft_share = drafted / (_weights(layers) + rows.numel())

    @property
    def page_bytes(self) -> int:
        return sum(stack.page_bytes for stack in self._stacks)

    @torch.inference_mode()
    def reserve(self, rows: int, rotated_as: int) -> None:
        """The longest text, and as what texts are rotated (0: lengths do not matter)."""
        for stack in self._stacks:
            stack.reserve(rows, rotated_as)

    @torch.inference_mode()
    def change(self, wiped: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        for stack in self._stacks:
            stack.change(wiped, copies)

    @torch.inference_mode()
    def embed(self, ids: Sequence[int]) -> Floats:
        return _array(self._model.model.embed_tokens(torch.tensor(ids, device=self._like.device)))

    @torch.inference_mode()
    def early(self, texts: Sequence[Where], x: Floats, cancelled: Cancelled) -> Floats | None:
        """Layers [0, E). None: cancelled on the way."""
        try:
            return _array(self._early.run(self._tensor(x), texts, cancelled))
        except Void:
            return None

    @torch.inference_mode()
    def late(self, texts: Sequence[Where], x: Floats, cancelled: Cancelled) -> tuple[Floats, Floats | None] | None:
        """Layers [E, L) -> the rows, and what they are at the taps. None: cancelled on the way."""
        try:
            self._last = self._late.run(self._tensor(x), texts, cancelled)
        except Void:
            return None
        tapped = self._late.tapped
        return _array(self._last), _array(tapped) if tapped is not None and self.taps else None

    @torch.inference_mode()
    def logits(self, rows: Sequence[tuple[int, int]]) -> Floats:
        """Of rows of the last `late`, and their positions -> [rows, vocabulary]."""
        x = self._last[[row for row, _ in rows]]
        texts = [(position, 1, (), 0) for _, position in rows]
        return _array(self._by_blocks(x, texts, lambda x: self._model.lm_head(self._model.model.norm(x))))

    @torch.inference_mode()
    def draw(
        self, draws: Sequence[tuple[Where, Floats, int, Floats, Sequence[int]]], cancelled: Cancelled
    ) -> list[Floats] | None:
        """Of each text: rows [rows, hidden] that have not passed the head's own layers; how many rows before the last
        of them the newest verified one is, and its last hidden state; ids of the text that may be drafted too.
        -> logits [draft vocabulary] after the last row, then those of the text's ids. None: cancelled on the way."""
        head = self._head
        assert head is not None
        states = []
        for _, exits, distance, heard, _ in draws:
            x = self._tensor(exits)
            if isinstance(head, ExitHead) and head.feedback is not None and 1 <= distance <= DISTANCES:
                last, *tapped = self._tensor(heard)[0].split(self.hidden_size)
                beside = head.tap.feedback(head.tap.norm(tapped[0])) if head.tap is not None else 0
                x = torch.cat([x[:-1], head.feedback(x[-1:], last, distance, beside)])
            states.append(x)
        self.drawn = [_array(x[-1]) for x in states] if self._tap else []
        texts = [text for text, *_ in draws]
        try:
            ran = torch.cat(states) if self._eagle else self._own.run(torch.cat(states), texts, cancelled)
        except Void:
            return None
        lasts = np.cumsum([len(rows) for rows in states]) - 1
        x = torch.cat([head.norm(ran[last : last + 1]) for last in lasts])
        ends = [(start + count - 1, 1, (), 0) for start, count, *_ in texts]
        listed = self._by_blocks(x, ends, head.lm_head)
        own = (F.linear(row, self._model.lm_head.weight[list(ids)]) for row, (*_, ids) in zip(x, draws, strict=True))
        return [_array(torch.cat(logits)) for logits in zip(listed, own, strict=True)]

    @torch.inference_mode()
    def catch_up(self, text: Where, x: Floats) -> None:
        """Exit hidden states of a text's rows through the head's own layers."""
        self._own.run(self._tensor(x), [text])

    @torch.inference_mode()
    def hear(self, texts: Sequence[Where], x: Floats, tapped: Floats) -> None:
        """Verified rows, as `drawn` or as they left the early layers, and what they are at the tap: keys and values."""
        self._own.run(torch.cat((self._tensor(x), self._tensor(tapped)), dim=-1), texts)

    @torch.inference_mode()
    def eagle(self, texts: Sequence[Where], ids: Sequence[int], x: Floats, verified: bool) -> Floats:
        """Rows of an EAGLE-3 head, with the tokens after theirs. x: what they are at the taps, or, where they are not
        verified, what the head's rows before them came to."""
        assert self._eagle is not None
        return _array(eagle_rows(self._eagle, self._own, self._like, texts, ids, self._tensor(x), verified))

    @torch.inference_mode()
    def scores(self, ids: Sequence[int]) -> Callable[[int, int], Floats]:
        """Of a text of its own: logits(start, end), after the ids at these positions [end - start, vocabulary]."""
        self.reserve(len(ids), len(ids))
        text = (0, len(ids), range(-(-len(ids) // PAGE)), 0)
        x = self._model.model.embed_tokens(torch.tensor(ids, device=self._like.device))
        self._last = self._late.run(self._early.run(x, [text]), [text])
        return lambda start, end: self.logits([(position, position) for position in range(start, end)])

    def _by_blocks(self, x: Tensor, texts: Sequence[Where], compute: Callable[[Tensor], Tensor]) -> Tensor:
        return by_blocks(self._late.size, x, texts, lambda block, _: compute(block))

    def _tensor(self, x: Floats) -> Tensor:
        return torch.from_numpy(x).to(self._like.device, self._like.dtype)


def _array(x: Tensor) -> Floats:
    return x.float().cpu().numpy()


def _weights(modules: Sequence[nn.Module]) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())


def eagle_rows(
    head: Eagle3Head,
    own: Stack,
    embedding: Tensor,
    texts: Sequence[Where],
    ids: Sequence[int],
    x: Tensor,
    verified: bool,
) -> Tensor:
    """As TorchPasses.eagle. own: the head's layers; embedding: its model's [vocabulary, hidden]."""
    compute = head.feature if verified else head.next_feature
    features = by_blocks(own.size, x, texts, lambda block, _: compute(block))
    tokens = torch.tensor(ids, device=x.device)
    embeddings = embedding[tokens] if head.embed_tokens is None else head.embed_tokens(tokens)
    return own.run(torch.cat((embeddings, features), dim=-1), texts)


def same_rows(rows: Tensor, model: Tensor) -> bool:
    """[n, hidden] each: but for rounding?"""
    return bool(((rows - model).float().norm(dim=1) <= 0.01 * model.float().norm(dim=1)).all())
