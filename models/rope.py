"""Rotary position embedding (Su et al., arXiv 2104.09864) with linear and Llama-3 frequency scaling."""

import math

import torch
from torch import Tensor

from .config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """-> [head_dim / 2] float32: angle per position of each pair of channels."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1 reference code)."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    stretched = frequencies / scaling.factor
    scaled = torch.where(wavelengths > context / scaling.low_freq_factor, stretched, frequencies)
    between = (wavelengths <= context / scaling.low_freq_factor) & (wavelengths >= context / scaling.high_freq_factor)
    return torch.where(between, (1 - blend) * stretched + blend * frequencies, scaled)


class Rope:
    """Cosines and sines of every position up to `capacity`: two tables [capacity, head_dim / 2], float32."""

    def __init__(self, config: LlamaConfig, capacity: int, device: torch.device | str = "cpu") -> None:
        # On the CPU whatever the device, so that all devices rotate by the same numbers.
        angles = torch.outer(torch.arange(capacity, dtype=torch.float32), inverse_frequencies(config))
        self.cos = angles.cos().to(device)
        self.sin = angles.sin().to(device)

    def rotate(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        """Rotate x [..., rows, heads, head_dim], whose rows stand at `positions`; the arithmetic is in float32.

        positions: of the rows, the same for all leading dimensions (slice), or each its own ([..., rows] int64).
        """
        cos, sin = self.cos[positions].unsqueeze(-2), self.sin[positions].unsqueeze(-2)  # [..., rows, 1, head_dim / 2]
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
