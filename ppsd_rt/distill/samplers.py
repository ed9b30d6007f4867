"""Who samples texts, many side by side: the C++ loop on a CPU, torch on a GPU and where C++ cannot."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _native
from ..cpu.backend import CpuBackend
from ..models.config import LayerAttention
from ..models.llama import Attend, LlamaForCausalLM, causal_attention
from ..models.rope import Rope
from ..pipeline.rounds import Limits, Round
from ..pipeline.schedule import PLAIN
from ..sampling.params import SamplingParams

States = npt.NDArray[np.uint16]
AREA = 16384  # tokens, padding included, of beginnings that pass through the model together
MOST_SLOTS = 4096  # more make a GPU no faster
ROWS = 1024  # whose logits are held at a time: [ROWS, vocabulary] in float32


def in_areas(lengths: Mapping[int, int], area: int) -> Iterator[list[int]]:
    """Texts that pass through a model together, by their numbers, from the shortest to the longest, so that little is
    padding: at most `area` tokens, padding included."""
    group: list[int] = []
    for number in sorted(lengths, key=lambda number: lengths[number]):
        if group and (len(group) + 1) * lengths[number] > area:
            yield group
            group = []
        group.append(number)
    if group:
        yield group


class NativeText:
    """A text in the making. over: nothing is added to what is `written`. begun: it has been read."""

    def __init__(self, answer: _native.LoopAnswer, shape: tuple[int, int, int]) -> None:
        self.answer, self.shape = answer, shape
        self.written: list[int] = []
        self.over = False

    def take(self) -> None:
        events, self.over = self.answer.take()
        self.written += [id for event in events if isinstance(event, Round) for id in event.committed]

    @property
    def begun(self) -> bool:
        return bool(self.written)

    def states(self) -> States | None:
        """Of a text that is over: the states of its rows, [rows, kinds, hidden] bfloat16 bits; None: not kept."""
        return self.answer.kept().reshape(self.shape) if self.shape[1] else None


class NativeSampler:
    """Writes `slots` texts of at most `capacity` tokens side by side, each up to one of the ids `ends`: a loop of its
    own, stepped by hand. keep: the layers whose output is handed out."""

    stride = 1  # passes of a step

    def __init__(
        self, backend: CpuBackend, slots: int, capacity: int, keep: Sequence[int], ends: Collection[int]
    ) -> None:
        self.slots, self.capacity, self.ends = slots, capacity, frozenset(ends)
        self._loop = backend.sampling_loop(slots, capacity, keep)
        self._shape = -1, len(keep), backend.hidden_size
        self._texts: list[NativeText] = []

    def write(self, ids: Sequence[int], temperature: float, seed: int, most: int) -> NativeText:
        """Go on with this text, in a slot whose text is over, by `most` ids or up to one that ends it.

        What is written follows from the text and its seed alone.
        """
        limits, params = Limits(len(ids) + most, self.ends), SamplingParams(temperature=temperature, seed=seed)
        self._texts.append(NativeText(self._loop.add(ids, params, PLAIN, limits), self._shape))
        return self._texts[-1]

    def step(self) -> None:
        """`stride` passes for all texts."""
        self._loop.step()
        for text in self._texts:
            text.take()
        self._texts = [text for text in self._texts if not text.over]

    def stop(self) -> None:
        """All texts are over."""
        for text in self._texts:
            text.answer.cancel()
        self.step()


@dataclass
class TorchText:
    """As NativeText. slot: where it is written. written: up to the last step, once it is over."""

    ids: Sequence[int]
    inverse_temperature: float  # 0: greedy
    most: int
    slot: int
    over: bool = False
    begun: bool = False
    written: list[int] = field(default_factory=list)

    def states(self) -> None:
        """A GPU computes them again faster than a disk reads them."""


def slots_within(memory: float, model: LlamaForCausalLM, capacity: int) -> int:
    """How many slots of a TorchSampler so many bytes have room for, beside what its passes hold at a time."""
    config, width = model.config, model.model.norm.weight.element_size()
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    row = (4 * config.hidden_size + 3 * config.intermediate_size + 2 * heads * config.head_dim) * 4
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * capacity * config.head_dim * width
    passing = 5 * 4 * ROWS * config.vocab_size + AREA * row
    return int((memory - passing) / (cache + 8 * capacity + row))


class TorchSampler:
    """Slots that write one token a pass, thousands of them on a GPU, where one captured pass serves all. All noise
    follows from the sampler's seed; else as NativeSampler.

    What a text begins with passes through the model whole, many texts together, and leaves its keys and values in the
    slot. From there on nothing moves: a slot's rows stay where they are written, and the host looks every `stride`
    passes who is over.
    """

    stride = 8

    def __init__(self, model: LlamaForCausalLM, slots: int, capacity: int, seed: int, ends: Collection[int]) -> None:
        self.model, self.slots, self.capacity = model, slots, capacity
        config, like = model.config, model.model.embed_tokens.weight
        self.device = like.device
        on_gpu = self.device.type == "cuda"
        self.generator = torch.cuda.default_generators[self.device.index or 0] if on_gpu else torch.Generator()
        self.generator.manual_seed(seed)
        self.fused = on_gpu
        self.rope = Rope(config, capacity, self.device)
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, capacity, config.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self.ids = torch.zeros(slots, capacity + 1, dtype=torch.int64, device=self.device)
        self.lengths = torch.ones(slots, dtype=torch.int64, device=self.device)
        self.most = torch.ones_like(self.lengths)  # ids of the text when it is whole
        self.live = torch.zeros(slots, dtype=torch.bool, device=self.device)
        self.inverse_temperatures = torch.zeros(slots, 1, device=self.device)
        self.ends = torch.zeros(config.vocab_size, dtype=torch.bool, device=self.device)
        self.ends[torch.tensor(sorted(ends), dtype=torch.int64)] = True
        self.every = torch.arange(slots, device=self.device)
        self._free = [*reversed(range(slots))]
        self._new: list[TorchText] = []
        self._texts: list[TorchText] = []
        self._pass = self._captured() if on_gpu else self._one

    def write(self, ids: Sequence[int], temperature: float, seed: int, most: int) -> TorchText:
        self._new.append(TorchText(ids, 1 / temperature if temperature else 0.0, most, self._free.pop()))
        return self._new[-1]

    @torch.no_grad()
    def step(self) -> None:
        self._begin()
        for _ in range(self.stride):
            self._pass()
        self._take(self.live.tolist())

    def stop(self) -> None:
        self._take([False] * self.slots)

    def _take(self, live: Sequence[bool]) -> None:
        """The texts that are over have what was written."""
        over = [text for text in self._texts if not live[text.slot]]
        slots = torch.tensor([text.slot for text in over], dtype=torch.int64, device=self.device)
        self.live[slots] = False
        for text, ids, length in zip(over, self.ids[slots].tolist(), self.lengths[slots].tolist(), strict=True):
            text.written, text.over = ids[len(text.ids) : length], True
            self._free.append(text.slot)
        self._texts = [text for text in self._texts if not text.over]

    def _begin(self) -> None:
        for group in in_areas({place: len(text.ids) for place, text in enumerate(self._new)}, AREA):
            texts = [self._new[place] for place in group]
            slots = torch.tensor([text.slot for text in texts], device=self.device)
            lengths = torch.tensor([len(text.ids) for text in texts])
            longest = int(lengths[-1])
            padded = torch.tensor([[*text.ids, *[0] * (longest - len(text.ids))] for text in texts])
            ids = padded.to(self.device)
            self.ids[slots, :longest] = ids
            self.lengths[slots] = lengths.to(self.device)
            self.most[slots] = (lengths + torch.tensor([text.most for text in texts])).to(self.device)
            warmth = torch.tensor([[text.inverse_temperature] for text in texts])
            self.inverse_temperatures[slots] = warmth.to(self.device)
            self.live[slots] = True
            for text in texts:
                text.begun = True
            self._read(ids, slots)
        self._texts += self._new
        self._new = []

    def _read(self, ids: Tensor, slots: Tensor) -> None:
        """ids [texts, longest] through the model, whose keys and values stay in these slots [texts]."""
        x, longest = self.model.model.embed_tokens(ids), ids.shape[1]
        for number, layer in enumerate(self.model.model.layers):

            def keep(k: Tensor, v: Tensor, number: int = number) -> None:
                self.keys[number, slots, :, :longest], self.values[number, slots, :, :longest] = k, v

            x = layer(x, causal_attention(self.rope.of_text(longest), keep))

    def _one(self) -> None:
        """A pass: the last id of every text, and the next one. Texts that are over stay as they are."""
        places = self.lengths - 1
        x = self.model.model.embed_tokens(self.ids[self.every, places])
        for layer, keys, values in zip(self.model.model.layers, self.keys, self.values, strict=True):
            x = layer(x, self._attend(keys, values, places))
        rows = self.model.model.norm(x).split(ROWS)
        chosen = torch.cat([*map(self._sample, rows, self.inverse_temperatures.split(ROWS))])
        self.ids[self.every, self.lengths] = torch.where(self.live, chosen, self.ids[self.every, self.lengths])
        self.lengths += self.live
        self.live &= ~self.ends[chosen] & (self.lengths < self.most)

    def _captured(self) -> Callable[[], None]:
        """The pass as a CUDA graph. No text has begun, so that it may run as often as it likes."""
        graph, beside = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.no_grad():
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                self._one()
            torch.cuda.current_stream().wait_stream(beside)
            with torch.cuda.graph(graph):
                self._one()
        return graph.replay

    def _attend(self, keys: Tensor, values: Tensor, places: Tensor) -> Attend:
        """keys, values [slots, kv heads, capacity, head_dim]; each row stands at its text's place [slots]."""

        def attend(q: Tensor, k: Tensor, v: Tensor, how: LayerAttention) -> Tensor:
            if self.fused:
                return self._kernel(
                    q, k, v, keys, values, places, self.rope.cos, self.rope.sin, rotary=how.rotary, window=how.window
                )
            if how.rotary:
                q, k = self.rope.rotate(q, places), self.rope.rotate(k, places)
            keys[self.every, :, places], values[self.every, :, places] = k, v
            longest = int(places.max()) + 1
            behind = places[:, None] - torch.arange(longest)
            seen = behind >= 0 if how.window is None else (behind >= 0) & (behind < how.window)
            return F.scaled_dot_product_attention(
                q[:, :, None],
                keys[:, :, :longest],
                values[:, :, :longest],
                attn_mask=seen[:, None, None],
                enable_gqa=True,
            )[:, :, 0]

        return attend

    @cached_property
    def _kernel(self) -> Callable[..., Tensor]:
        from ..triton_kernels.slots import attend_slots  # Triton is there where GPUs are

        return attend_slots

    def _sample(self, hidden: Tensor, inverse_temperatures: Tensor) -> Tensor:
        """hidden [rows, hidden], [rows, 1] -> an id of each row, [rows]."""
        weight = self.model.lm_head.weight
        if hidden.is_cuda and hidden.dtype != torch.float32:  # not rounded to them first
            logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        else:
            logits = (hidden @ weight.t()).float()
        best = logits.argmax(-1)
        # Inverse transform sampling: one uniform number per row costs far less than one per row and id.
        cumulative = logits.mul_(inverse_temperatures).softmax(-1).cumsum(-1)
        drawn = torch.rand(len(hidden), 1, generator=self.generator, device=self.device) * cumulative[:, -1:]
        warm = torch.searchsorted(cumulative, drawn)[:, 0].clamp_max(logits.shape[1] - 1)
        return torch.where(inverse_temperatures[:, 0] > 0, warm, best)


Writing = NativeText | TorchText
Sampler = NativeSampler | TorchSampler
