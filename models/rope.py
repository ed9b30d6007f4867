"""Rotary position embedding in torch."""

import torch
from torch import Tensor

from .config import LlamaConfig
from .rotary import attention_factor, inverse_frequencies


def rotated_as(config: LlamaConfig, length: int) -> int:
    """The length of a text where its rows are rotated by it, else 0. Of two texts whose numbers differ, no row can take
    the place of the other's."""
    scaling = config.rope_scaling
    matters = scaling is not None and scaling.by_length and length > scaling.original_max_position_embeddings
    return length if matters else 0


class Rope:
    """Cosines and sines of every position up to `capacity`: two tables [capacity, head_dim / 2], float32."""

    def __init__(
        self, config: LlamaConfig, capacity: int, device: torch.device | str = "cpu", *, text: int = 0
    ) -> None:
        """text: rows that are rotated as one text of that length, where lengths matter. Each later row is rotated as
        the last one of a text of its own, as it is when it is decoded."""
        self.config, self.device, self.text = config, device, rotated_as(config, text)
        # On the CPU whatever the device, so that all devices rotate by the same numbers.
        angles = torch.outer(torch.arange(capacity, dtype=torch.float32), self._frequencies(self.text))
        for position in range(capacity):
            if position >= self.text and rotated_as(config, position + 1):
                angles[position] = position * self._frequencies(position + 1)
        factor = attention_factor(config)
        self.cos, self.sin = ((part * factor).to(device) for part in (angles.cos(), angles.sin()))

    def _frequencies(self, length: int) -> Tensor:
        return torch.from_numpy(inverse_frequencies(self.config, length))

    def of_text(self, length: int) -> "Rope":
        """The same for a whole text of that length."""
        same = rotated_as(self.config, length) == self.text
        return self if same else Rope(self.config, len(self.cos), self.device, text=length)

    def rotate(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        """Rotate x [..., rows, heads, head_dim], whose rows stand at `positions`; the arithmetic is in float32.

        positions: of the rows, the same for all leading dimensions (slice), or each its own ([..., rows] int64).
        """
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)  # [..., rows, 1, head_dim / 2]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
