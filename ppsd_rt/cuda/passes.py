"""Passes on a GPU: what the loop of csrc/loop/loop.cpp asks of a backend, by the fused kernels.

Rows of several texts go through the layers together, up to 64 at a time in tiles of 16 (triton_kernels/texts.py), with
keys and values in the loop's pages. Rows of a prompt go through the kernels of prompts, all other rows through those of
decoding, whatever the company: so a row has the bits that it has alone, and that stages.py gives it.

Each step, a stack of layers or an LM head for so many tiles, is captured when it first runs, where that can be.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..cpu.formats import rotary_of
from ..models.eagle3 import Eagle3File
from ..models.exit_head import Eagle3Head
from ..models.head_file import DISTANCES
from ..reference.passes import Cancelled, Floats, Stack, Void, Where, eagle_rows, same_rows
from ..triton_kernels.cache import PAGE
from ..triton_kernels.heads import Scratch, heads, inverse_of
from ..triton_kernels.linear import Weight, linear, normalise_twin, tiling
from ..triton_kernels.state import MAX_ROWS, ROWS, WORDS
from ..triton_kernels.texts import INVERSE, MOST_ROWS, MOST_TILES, POSITION, SEAT, SEED, TABLE, TEXT_WORDS, Texts
from . import devices
from .buffers import Work, rotations
from .graphs import Graphs
from .launches import decoder_layer
from .prompt import PromptLayers
from .weights import DeviceWeights

TILES = (1, 2, MOST_TILES)  # of a launch: a captured graph each
LEAST_CAPACITY = 1024  # of a text: graphs are captured anew for longer ones


class Row(NamedTuple):
    """Of a launch. number: among the rows that were given. seat: of its key and value. pages: of its text."""

    number: int
    position: int
    seat: int = 0
    pages: Sequence[int] = ()
    seed: int = 0
    temperature: float = 0.0


class LmHead:
    """The model's or an exit head's, for up to 64 rows."""

    def __init__(self, name: str, norm: Tensor, weight: Weight) -> None:
        device, self.name, self.norm, self.weight = norm.device, name, norm, weight
        self.scratch = Scratch(weight, MOST_TILES)
        self.logits = torch.zeros(MOST_ROWS, weight.outputs, device=device)
        self.choices = torch.zeros(MOST_ROWS, dtype=torch.int32, device=device)
        self.chances = torch.zeros(MOST_ROWS, device=device)


class Eagle:
    """An EAGLE-3 head. Torch computes it, by the twin of reference/passes.py: it is one layer beside a model that has
    dozens. Its keys and values lie in the loop's pages, in memory of its own."""

    def __init__(self, file: Eagle3File, weights: DeviceWeights) -> None:
        """weights: of its model, whose type and device it has."""
        like = weights.embedding
        self.head = head = Eagle3Head.from_file(file, like)
        self._embedding, self.taps = like, head.eagle.taps
        self.own = Stack(list(head.layers), file.eagle.layer, like)
        self.bytes = sum(weight.nbytes for weight in head.parameters())
        self.draft_ids = [] if head.draft_ids is None else head.draft_ids.tolist()
        # Ids of the text may be drafted where its LM head holds the model's own rows.
        self.follows = head.draft_ids is not None and same_rows(
            head.lm_head.weight, weights.lm_head.rows(head.draft_ids).wide()
        )

    @torch.inference_mode()
    def rows(self, texts: Sequence[Where], ids: Sequence[int], x: Tensor, verified: bool) -> Tensor:
        """As TorchPasses.eagle: x [rows, taps * hidden], or [rows, hidden] -> [rows, hidden]."""
        x = x.to(self._embedding)
        return eagle_rows(self.head, self.own, self._embedding, texts, ids, x, verified).float()

    @torch.inference_mode()
    def logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What rows [n, hidden] came to -> behind the final norm; logits [n, draft vocabulary]. Each row by itself, for
        drafts of one text must not depend on others."""
        normed = self.head.norm(x.to(self._embedding))
        return normed.float(), torch.cat([self.head.lm_head(row[None]) for row in normed]).float()


class CudaPasses:
    """What csrc/bindings/passes.cpp asks: as TorchPasses (reference/passes.py), all layers being on one device.

    pages: of the KV cache. eagle: an EAGLE-3 head, where the weights have no other. graphs: None launches the
    kernels one by one.
    """

    decoded_rows_differ = chooses = True

    def __init__(
        self,
        weights: DeviceWeights,
        pages: int,
        eagle: Eagle | None = None,
        *,
        pdl: bool = False,
        graphs: Graphs | None = None,
    ) -> None:
        config, head, self.device = weights.config, weights.head, weights.device
        self.weights, self._eagle, self._pdl, self._graphs = weights, eagle, pdl, graphs
        own = head.layers if head else ()
        every = list(enumerate([*weights.layers, *own]))
        bounds = 0, weights.exit_layer, len(weights.layers), len(every)
        self._stacks = dict(
            zip(("early", "late", "own"), (every[low:high] for low, high in pairwise(bounds)), strict=True)
        )
        shape = len(every), pages, 2 * config.num_key_value_heads, PAGE, config.head_dim
        # What has not been written is never read; and memory of a CPU that nobody touches is not taken.
        self._cache = torch.empty(shape, dtype=weights.dtype, device=self.device)
        self.cache = list(self._cache)  # by layer
        self._prompt = PromptLayers(weights, self)
        self._work = Work(weights, [layer for _, layer in every], None, self.device, MOST_TILES)
        self._x = torch.zeros(MOST_ROWS, config.hidden_size, device=self.device)
        self.taps = list(eagle.taps) if eagle else []  # after so many layers
        self._at_taps = {tap: torch.zeros_like(self._x) for tap in self.taps if tap > 0}  # what rows are there
        self._tapped = np.zeros((0, len(self.taps), config.hidden_size), np.float32)  # of the last pass
        self._lm_head = LmHead("LM head", weights.norm, weights.lm_head)
        self._draft_head = LmHead("exit head", head.norm, head.lm_head) if head else None
        self._last = self._x[:0]  # of the last pass, after the late layers
        self.rotations = self._x[:0]
        self.reserve(LEAST_CAPACITY, 0)
        # What the loop must know, see facts_of() there.
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.drafts, self.lags, self.hears = bool(head or eagle), bool(own), weights.hears
        self.draft_ids = eagle.draft_ids if eagle else (head.listed if head else None) or []
        self.follows = eagle.follows if eagle else bool(self.draft_ids)
        self.rotary = rotary_of(config)
        self.draft_share = (eagle.bytes if eagle else weights.draft_bytes) / weights.bytes

    def reserve(self, rows: int, rotated_as: int) -> None:
        """The longest text: tables of rotations, and room for what a launch must know of its rows."""
        if self._eagle is not None:
            self._eagle.own.reserve(rows, rotated_as)
        if rows <= len(self.rotations):
            return
        self.rotations = rotations(self.weights.config, rows, self.device)
        sizes = MOST_TILES * WORDS, MOST_ROWS * TEXT_WORDS, MOST_ROWS * -(-rows // PAGE)
        self._told = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self._known = self._told.to(self.device)
        words, places, self._tables = self._known.split(sizes)
        self._words, self._places = words.view(MOST_TILES, WORDS), places.view(MOST_ROWS, TEXT_WORDS)
        if self._graphs is not None:
            self._graphs.close()

    def change(self, wiped: Sequence[int], copies: Sequence[tuple[int, int]]) -> None:
        """Pages that become others' copies (from, to). Wiped ones stay: no kernel looks behind a text's own rows."""
        for origin, page in copies:
            self._cache[:, page] = self._cache[:, origin]
        if self._eagle is not None:
            self._eagle.own.change(wiped, copies)

    def embed(self, ids: Sequence[int]) -> Floats:
        return _array(self.weights.embedding[torch.tensor(ids, device=self.device)].float())

    def early(self, texts: Sequence[Where], x: Floats, cancelled: Cancelled) -> Floats | None:
        """Layers [0, E). None: cancelled on the way."""
        try:
            return _array(self._through("early", self._sent(x), texts, cancelled))
        except Void:
            return None

    def late(
        self, texts: Sequence[Where], x: Floats, cancelled: Cancelled
    ) -> tuple[Floats | None, Floats | None] | None:
        """Layers [E, L) -> the rows, where the exit head receives them, and what they are at the taps. None: cancelled
        on the way."""
        try:
            self._last = self._through("late", self._sent(x), texts, cancelled)
        except Void:
            return None
        return _array(self._last) if self.hears else None, self._tapped if self.taps else None

    def logits(self, rows: Sequence[tuple[int, int]]) -> Floats:
        """Of rows of the last `late`, and their positions -> [rows, vocabulary]."""
        return self._logits(self._lm_head, self._last, [Row(*row) for row in rows])

    def choose(self, rows: Sequence[tuple[int, int, int, float]]) -> list[int]:
        """Of rows of the last `late`, the position of the token to choose, seed and temperature (0: greedy) -> ids; -1
        where a logit is no number."""
        asked = [Row(row, position, seed=seed, temperature=heat) for row, position, seed, heat in rows]
        batches = self._batches_of(self._lm_head, self._last, asked)
        return [id for some in batches for id in self._lm_head.choices[some].tolist()]

    def draw(
        self, draws: Sequence[tuple[Where, Floats, int, Floats, Sequence[int]]], cancelled: Cancelled
    ) -> list[Floats] | None:
        """As in reference/passes.py: -> logits [draft vocabulary] after each text's last row, then of its own ids."""
        ends = (np.cumsum([len(exits) for _, exits, *_ in draws]) - 1).tolist()
        x = self._sent(np.concatenate([exits for _, exits, *_ in draws]))
        self._hear(x, ends, [(distance, heard) for _, _, distance, heard, _ in draws])
        try:
            x = self._through("own", x, [text for text, *_ in draws], cancelled)[ends]
        except Void:
            return None
        logits, normed = self._drafted(x)
        own = [ids for *_, ids in draws]
        if not any(own):
            return list(logits[:, : len(self.draft_ids) or None])
        whose = np.repeat(np.arange(len(x)), [len(ids) for ids in own])
        rows = self.weights.lm_head.rows(torch.tensor([id for ids in own for id in ids], device=self.device)).wide()
        scores = np.split(_array((rows * normed[whose]).sum(-1)), np.cumsum([len(ids) for ids in own])[:-1])
        return [np.concatenate((row[: len(self.draft_ids)], more)) for row, more in zip(logits, scores, strict=True)]

    def _drafted(self, x: Tensor) -> tuple[Floats, Tensor]:
        """Rows [n, hidden] -> logits [n, outputs], and the rows behind the head's final norm."""
        if self._eagle is not None:
            normed, scores = self._eagle.logits(x)
            return _array(scores), normed
        assert self.weights.head is not None
        assert self._draft_head is not None
        logits = self._logits(self._draft_head, x, [Row(number, 0) for number in range(len(x))])
        return logits, normalise_twin(x, self.weights.head.norm, self.weights.config.rms_norm_eps)

    def eagle(self, texts: Sequence[Where], ids: Sequence[int], x: Floats, verified: bool) -> Floats:
        """As in reference/passes.py."""
        assert self._eagle is not None
        return _array(self._eagle.rows(texts, ids, self._sent(x), verified))

    def catch_up(self, text: Where, x: Floats) -> None:
        """Exit hidden states of a text's rows through the head's own layers."""
        self._through("own", self._sent(x), [text], None)

    # -- rows through layers -------------------------------------------------------------------------------------------

    def _sent(self, x: Floats) -> Tensor:
        return torch.from_numpy(x).to(self.device)

    def _through(self, name: str, x: Tensor, texts: Sequence[Where], cancelled: Cancelled) -> Tensor:
        """The rows x [rows, hidden] of these texts -> what they become. Raises Void between launches."""
        if not self._stacks[name]:
            return x
        out, rows, first = x.clone(), list[Row](), 0
        self._tapped = np.stack([_array(x)] * len(self.taps), axis=1) if self.taps else self._tapped
        for start, count, pages, prompt in texts:
            if prompt:
                here = slice(first, first + prompt)
                with devices.on(self.device):
                    self._prompt_rows(name, out[here], start, pages, self._tapped[here], cancelled)
            positions = range(start + prompt, start + count)
            seats = enumerate(_seats(positions, pages), first + prompt)
            rows += [Row(row, at, seat, pages) for at, (row, seat) in zip(positions, seats, strict=True)]
            first += count
        for some in _batches(rows):
            _go_on(cancelled)
            index = _places(some)
            self._launch(name, partial(self._layers, name), x[index], some)
            out[index] = self._at_taps.get(len(self.weights.layers), self._work.x)[: len(some)]
            for place, tap in enumerate(self.taps):
                if tap > 0:
                    self._tapped[index, place] = _array(self._at_taps[tap][: len(some)])
        return out

    def _prompt_rows(
        self, name: str, x: Tensor, start: int, pages: Sequence[int], tapped: Floats, cancelled: Cancelled
    ) -> None:
        """Many at a time, in place. What they become after the head's own layers is asked of no prompt's row: they
        stay."""
        table = torch.tensor(pages, dtype=torch.int32, device=self.device)
        self._prompt.reserve(len(x))
        if name == "own":
            self._prompt.head(x, start, table)
            return
        for number, layer in self._stacks[name]:
            _go_on(cancelled)
            self._prompt.layer(layer, number, x, start, table)
            for place in (place for place, tap in enumerate(self.taps) if tap == number + 1):
                tapped[:, place] = _array(x)

    def _batches_of(self, head: LmHead, x: Tensor, rows: Sequence[Row]) -> Iterator[slice]:
        """After each: rows whose logits, and what is chosen of them, stand in the head's memory."""
        for some in _batches(rows):
            self._launch(head.name, partial(self._head, head), x[_places(some)], some)
            yield slice(len(some))

    def _logits(self, head: LmHead, x: Tensor, rows: Sequence[Row]) -> Floats:
        return np.concatenate([np.array(_array(head.logits[some])) for some in self._batches_of(head, x, rows)])

    def _hear(self, x: Tensor, ends: Sequence[int], heard: Sequence[tuple[int, Floats]]) -> None:
        """What a feedback head adds to the last row of each text, by the distance of the newest verified one."""
        for distance in range(1, DISTANCES + 1) if self.hears else ():
            whose = [number for number, (away, _) in enumerate(heard) if away == distance]
            if whose:
                rows = [Row(number, 0) for number in range(len(whose))]
                states = self._sent(np.concatenate([heard[number][1] for number in whose]))
                self._launch(f"feedback {distance}", partial(self._feedback, distance), states, rows)
                x[[ends[number] for number in whose]] += self._work.x[: len(whose)]

    # -- what is captured ----------------------------------------------------------------------------------------------

    def _layers(self, name: str, texts: Texts) -> None:
        count, work, rows = MAX_ROWS * texts.tiles, self._work.of(texts), None
        x = self._x[:count]
        for number, layer in self._stacks[name]:
            last = self._at_taps.get(number + 1, work.x)[:count]
            x = decoder_layer(
                self.weights, layer, number, x, work.x, self._words, work, self, last,
                rows=rows, pdl=self._pdl,
            )  # fmt: skip
            rows = work.rounded

    def _head(self, head: LmHead, texts: Texts) -> None:
        heads(
            self._x[: MAX_ROWS * texts.tiles], head.norm, self.weights.config.rms_norm_eps, head.weight, self._words,
            head.scratch, head.choices, head.chances, self._words, logits=head.logits, texts=texts, pdl=self._pdl,
        )  # fmt: skip

    def _feedback(self, distance: int, texts: Texts) -> None:
        head, size, rows = self.weights.head, self.hidden_size, slice(MAX_ROWS * texts.tiles)
        assert head is not None
        assert head.feedback is not None
        matrix = head.feedback.rows(slice((distance - 1) * size, distance * size))
        linear(
            self._x[rows], matrix, self._work.x[rows], self._words, norm=head.feedback_norm,
            eps=self.weights.config.rms_norm_eps, cut=tiling(matrix)._replace(splits=1), texts=texts, pdl=self._pdl,
        )  # fmt: skip

    def _launch(self, name: str, step: Callable[[Texts], None], x: Tensor, rows: Sequence[Row]) -> None:
        """The step for x [rows, hidden], which it finds in self._x."""
        tiles = next(size for size in TILES if len(rows) <= MAX_ROWS * size)
        self._x[: len(x)] = x
        self._place(rows)
        texts = Texts(tiles, self._places[: MAX_ROWS * tiles], self._tables)

        def run() -> None:
            with devices.on(self.device):
                step(texts)

        if self._graphs is None:
            run()
        else:
            self._graphs.launch((name, tiles), run)

    def _place(self, rows: Sequence[Row]) -> None:
        """Tell the device of the rows of a launch."""
        begins, tables, places = dict[int, int](), list[int](), list[list[int]]()
        for row in rows:
            if id(row.pages) not in begins:
                begins[id(row.pages)] = len(tables)
                tables += row.pages
            place = [0] * TEXT_WORDS
            place[POSITION], place[SEAT], place[TABLE] = row.position, row.seat, begins[id(row.pages)]
            place[SEED], place[SEED + 1] = row.seed & 0xFFFFFFFF, row.seed >> 32
            place[INVERSE] = int(np.float32(inverse_of(row.temperature)).view(np.uint32))
            places.append(place)
        words = np.zeros((MOST_TILES, WORDS), np.uint32)
        words[:, ROWS] = np.clip(len(rows) - MAX_ROWS * np.arange(MOST_TILES), 0, MAX_ROWS)
        places += [[0] * TEXT_WORDS] * (MOST_ROWS - len(rows))
        told = np.concatenate((words.ravel(), np.array(places, np.uint32).ravel(), np.array(tables, np.uint32)))
        self._told[: len(told)] = torch.from_numpy(told.view(np.int32))
        self._known[: len(told)] = self._told[: len(told)]


def _batches(rows: Sequence[Row]) -> list[Sequence[Row]]:
    return [rows[first : first + MOST_ROWS] for first in range(0, len(rows), MOST_ROWS)]


def _places(rows: Sequence[Row]) -> slice | list[int]:
    """Where they are among the rows that were given. A slice, where it can be: no list has to go to the device."""
    numbers = [row.number for row in rows]
    follow = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return slice(numbers[0], numbers[0] + len(numbers)) if follow else numbers


def _go_on(cancelled: Cancelled) -> None:
    if cancelled is not None and cancelled():
        raise Void


def _seats(positions: Sequence[int], pages: Sequence[int]) -> list[int]:
    return [pages[position // PAGE] * PAGE + position % PAGE for position in positions]


def _array(x: Tensor) -> Floats:
    return x.cpu().numpy()
