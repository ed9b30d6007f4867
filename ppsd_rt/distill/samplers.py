"""Who samples texts, many side by side: the C++ engine on a CPU, torch on a GPU and where C++ cannot."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .. import _native
from ..cpu.backend import CpuBackend
from ..models.config import LayerAttention
from ..models.llama import Attend, LlamaForCausalLM
from ..models.rope import Rope

Ints = npt.NDArray[np.int32]
States = npt.NDArray[np.uint16]


class Sampler(Protocol):
    """`slots` texts of at most `capacity` tokens.

    step: ids, positions [slots] int32, inverse temperatures [slots] float32 (0: greedy), seeds [slots] uint64 -> the
    next ids [slots] int32, and the hidden states of the rows that were asked for, [slots, kinds, hidden] bfloat16 bits,
    or None. What a text becomes follows from it and its seed alone, or (torch) from the sampler's seed.
    """

    slots: int
    capacity: int

    def step(
        self,
        ids: Ints,
        positions: Ints,
        inverse_temperatures: npt.NDArray[np.float32],
        seeds: npt.NDArray[np.uint64],
    ) -> tuple[Ints, States | None]: ...


class NativeSampler:
    """All slots share one pass over the packed weights. keep: the layers whose output is handed out."""

    def __init__(self, backend: CpuBackend, slots: int, capacity: int, keep: Sequence[int]) -> None:
        self.slots, self.capacity = slots, capacity
        self._batch: _native.Batch = backend.batch(slots, capacity, keep)

    def step(
        self,
        ids: Ints,
        positions: Ints,
        inverse_temperatures: npt.NDArray[np.float32],
        seeds: npt.NDArray[np.uint64],
    ) -> tuple[Ints, States | None]:
        return self._batch.step(ids, positions, inverse_temperatures, seeds)


class TorchSampler:
    """Keeps no hidden states: where torch samples, a GPU computes them again faster than a disk reads them."""

    def __init__(self, model: LlamaForCausalLM, slots: int, capacity: int, seed: int) -> None:
        self.model, self.slots, self.capacity = model, slots, capacity
        config, like = model.config, model.model.embed_tokens.weight
        self.device = like.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.rope = Rope(config, capacity, self.device)
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, capacity, config.head_dim)
        self.keys, self.values = like.new_zeros(shape), like.new_zeros(shape)

    @torch.no_grad()
    def step(
        self,
        ids: Ints,
        positions: Ints,
        inverse_temperatures: npt.NDArray[np.float32],
        seeds: npt.NDArray[np.uint64],
    ) -> tuple[Ints, States | None]:
        rows = self._rows(self._tensor(ids).long()[:, None], self._tensor(positions).long())
        logits = self.model.lm_head(self.model.model.norm(rows))[:, 0].float()
        return self._sample(logits, self._tensor(inverse_temperatures)).to("cpu", torch.int32).numpy(), None

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self.device)

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
