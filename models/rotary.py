"""Rotary frequencies (Su et al., arXiv 2104.09864) with linear and Llama-3 scaling; for every backend."""

import math

import numpy as np
import numpy.typing as npt

from .config import LlamaConfig, RopeScaling

Float32 = npt.NDArray[np.float32]


def inverse_frequencies(config: LlamaConfig) -> Float32:
    """-> [head_dim / 2] float32: angle per position of each pair of channels."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / np.float32(config.rope_theta) ** exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / np.float32(scaling.factor)
    return _llama3(frequencies, scaling)


def _llama3(frequencies: Float32, scaling: RopeScaling) -> Float32:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1 reference code)."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0, 1)  # rounding, where the two factors are close to each other
    stretched = frequencies / scaling.factor
    between = (1 - blend) * stretched + blend * frequencies
    long, short = wavelengths > context / scaling.low_freq_factor, wavelengths < context / scaling.high_freq_factor
    return np.where(long, stretched, np.where(short, frequencies, between)).astype(np.float32)
