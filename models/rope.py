"""Rotary position embedding in torch."""

import torch
from torch import Tensor

from .config import LlamaConfig
from .rotary import inverse_frequencies


class Rope:
    """Cosines and sines of every position up to `capacity`: two tables [capacity, head_dim / 2], float32."""

    def __init__(self, config: LlamaConfig, capacity: int, device: torch.device | str = "cpu") -> None:
        # On the CPU whatever the device, so that all devices rotate by the same numbers.
        frequencies = torch.from_numpy(inverse_frequencies(config))
        angles = torch.outer(torch.arange(capacity, dtype=torch.float32), frequencies)
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def rotate(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        """Rotate x [..., rows, heads, head_dim], whose rows stand at `positions`; the arithmetic is in float32.

        positions: of the rows, the same for all leading dimensions (slice), or each its own ([..., rows] int64).
        """
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)  # [..., rows, 1, head_dim / 2]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
