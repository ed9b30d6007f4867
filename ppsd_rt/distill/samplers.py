"""Who samples texts, many side by side: the C++ loop on a CPU, torch on a GPU and where C++ cannot."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import _native
from ..backend import common_prefix
from ..cpu.backend import CpuBackend
from ..models.config import LayerAttention
from ..models.llama import Attend, LlamaForCausalLM
from ..models.rope import Rope
from ..pipeline.rounds import Limits, Round
from ..pipeline.schedule import PLAIN
from ..sampling.params import SamplingParams

States = npt.NDArray[np.uint16]


class Writing(Protocol):
    """A text in the making. over: nothing is added to what is `written`."""

    over: bool

    @property
    def written(self) -> list[int]: ...

    def states(self) -> States | None:
        """Of a text that is over: the states of its rows, [rows, kinds, hidden] bfloat16 bits; None: not kept."""


class Sampler(Protocol):
    """Writes `slots` texts of at most `capacity` tokens side by side."""

    slots: int
    capacity: int

    def write(self, ids: Sequence[int], temperature: float, seed: int, most: int, ends: Collection[int]) -> Writing:
        """Go on with this text, in a slot whose text is over, by `most` ids or up to one of `ends`.

        What is written follows from the text and its seed alone, or (torch) from the sampler's seed.
        """

    def step(self) -> None:
        """One pass for all texts."""

    def stop(self) -> None:
        """All texts are over."""


class NativeText:
    def __init__(self, answer: _native.LoopAnswer, shape: tuple[int, int, int]) -> None:
        self.answer, self.shape = answer, shape
        self.written: list[int] = []
        self.over = False

    def take(self) -> None:
        events, self.over = self.answer.take()
        self.written += [id for event in events if isinstance(event, Round) for id in event.committed]

    def states(self) -> States | None:
        return self.answer.kept().reshape(self.shape) if self.shape[1] else None


class NativeSampler:
    """A loop of its own, stepped by hand. keep: the layers whose output is handed out."""

    def __init__(self, backend: CpuBackend, slots: int, capacity: int, keep: Sequence[int]) -> None:
        self.slots, self.capacity = slots, capacity
        self._loop = backend.sampling_loop(slots, capacity, keep)
        self._shape = -1, len(keep), backend.hidden_size
        self._texts: list[NativeText] = []

    def write(self, ids: Sequence[int], temperature: float, seed: int, most: int, ends: Collection[int]) -> NativeText:
        limits, params = Limits(len(ids) + most, frozenset(ends)), SamplingParams(temperature=temperature, seed=seed)
        self._texts.append(NativeText(self._loop.add(ids, params, PLAIN, limits), self._shape))
        return self._texts[-1]

    def step(self) -> None:
        self._loop.step()
        for text in self._texts:
            text.take()
        self._texts = [text for text in self._texts if not text.over]

    def stop(self) -> None:
        for text in self._texts:
            text.answer.cancel()
        self.step()


@dataclass
class TorchText:
    """Of its ids, `fed` have passed through the model."""

    ids: list[int] = field(default_factory=lambda: [0])
    begin: int = 1
    inverse_temperature: float = 0.0
    end: int = 1
    ends: Collection[int] = ()
    fed: int = 0
    over: bool = True

    @property
    def written(self) -> list[int]:
        return self.ids[self.begin :]

    def states(self) -> None:
        """A GPU computes them again faster than a disk reads them."""


class TorchSampler:
    def __init__(self, model: LlamaForCausalLM, slots: int, capacity: int, seed: int) -> None:
        self.model, self.slots, self.capacity = model, slots, capacity
        config, like = model.config, model.model.embed_tokens.weight
        self.device = like.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.rope = Rope(config, capacity, self.device)
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, capacity, config.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)
        self._texts = [TorchText() for _ in range(slots)]

    def write(self, ids: Sequence[int], temperature: float, seed: int, most: int, ends: Collection[int]) -> TorchText:
        slot = [text.over for text in self._texts].index(True)
        before = self._texts[slot]
        fed = common_prefix(before.ids[: before.fed], ids[:-1])
        inverse = 1 / temperature if temperature else 0.0
        self._texts[slot] = TorchText(list(ids), len(ids), inverse, len(ids) + most, ends, fed, False)
        return self._texts[slot]

    @torch.no_grad()
    def step(self) -> None:
        texts = self._texts
        ids = torch.tensor([[text.ids[text.fed]] for text in texts], device=self.device)
        rows = self._rows(ids, torch.tensor([text.fed for text in texts], device=self.device))
        logits = self.model.lm_head(self.model.model.norm(rows))[:, 0].float()
        temperatures = torch.tensor([text.inverse_temperature for text in texts], device=self.device)
        for text, id in zip(texts, self._sample(logits, temperatures).tolist(), strict=True):
            if text.over:
                continue
            text.fed += 1
            if text.fed == len(text.ids):
                text.ids.append(id)
                text.over = id in text.ends or len(text.ids) == text.end

    def stop(self) -> None:
        for text in self._texts:
            text.over = True

    def _rows(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids [slots, 1] at positions [slots] through all layers -> [slots, 1, hidden]."""
        behind = positions[:, None, None, None] - torch.arange(self.keys.shape[3], device=self.device)
        x = self.model.model.embed_tokens(ids)
        for number, layer in enumerate(self.model.model.layers):
            x = layer(x, self._attend(number, positions, behind))
        return x

    def _attend(self, number: int, positions: Tensor, behind: Tensor) -> Attend:
        """after [slots, 1, 1, capacity]: how far after its row a position is, or negative."""
        keys, values = self.keys[number], self.values[number]  # [slots, kv heads, capacity, head_dim]
        every = torch.arange(len(positions), device=self.device)

        def attend(q: Tensor, k: Tensor, v: Tensor, how: LayerAttention) -> Tensor:
            if how.rotary:
                q, k = self.rope.rotate(q, positions[:, None]), self.rope.rotate(k, positions[:, None])
            hidden = behind < 0 if how.window is None else (behind < 0) | (behind >= how.window)
            keys[every, :, positions] = k[:, 0]
            values[every, :, positions] = v[:, 0]
            # [slots, 1, heads, head_dim] -> [slots, kv heads, heads of a group, head_dim]
            queries = q[:, 0].unflatten(1, (keys.shape[1], -1))
            scores = queries @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
            # Over the whole cache: a slice of it would be copied before it is multiplied.
            mixed = scores.masked_fill(hidden, -1e9).softmax(-1) @ values
            return mixed.flatten(1, 2)[:, None]

        return attend

    def _sample(self, logits: Tensor, inverse_temperatures: Tensor) -> Tensor:
        """One id per slot, [slots]."""
        chosen = logits.argmax(-1)
        warm = inverse_temperatures.nonzero()[:, 0]
        scaled = logits[warm] * inverse_temperatures[warm, None]
        # Inverse transform sampling: one uniform number per row costs far less than one per row and id.
        cumulative = scaled.softmax(-1).cumsum(-1)
        drawn = torch.rand(len(warm), 1, generator=self.generator, device=self.device) * cumulative[:, -1:]
        chosen[warm] = torch.searchsorted(cumulative, drawn)[:, 0].clamp_max(logits.shape[1] - 1)
        return chosen
