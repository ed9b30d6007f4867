"""Rotary frequencies (Su et al., arXiv 2104.09864) and how they are stretched; for every backend.

The formulas are those of transformers (`modeling_rope_utils.py`), whose logits the tests compare.
"""

import math

import numpy as np
import numpy.typing as npt

from .config import LlamaConfig, RopeScaling

Float32 = npt.NDArray[np.float32]


def inverse_frequencies(config: LlamaConfig, length: int = 0) -> Float32:
    """-> [head_dim / 2] float32: angle per position of each pair of channels.

    length: of the text, its rows included that are asked for now; it matters to the kinds that go `by_length` alone.
    """
    scaling, theta, size = config.rope_scaling, config.rope_theta, config.head_dim
    if scaling is not None and scaling.kind == "dynamic":
        theta = _dynamic_theta(theta, size, scaling, length)
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    frequencies = (1.0 / np.float32(theta) ** exponents).astype(np.float32)
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / np.float32(scaling.factor)
    if scaling.kind == "llama3":
        return llama3_frequencies(frequencies, scaling)
    if scaling.kind == "yarn":
        return _yarn(frequencies, config, scaling)
    long = length > scaling.original_max_position_embeddings
    factors: Float32 = np.array(scaling.long_factor if long else scaling.short_factor, np.float32)
    return frequencies / factors


def attention_factor(config: LlamaConfig) -> float:
    """What cosines and sines are multiplied by."""
    return 1.0 if config.rope_scaling is None else config.rope_scaling.attention_factor


def _dynamic_theta(theta: float, size: int, scaling: RopeScaling, length: int) -> float:
    """NTK-aware: the base grows with the text, once that is longer than the model was trained for."""
    original, factor = scaling.original_max_position_embeddings, scaling.factor
    if size == 2:  # one pair, which turns by one radian whatever the base
        return theta
    return theta * math.pow(factor * max(length, original) / original - (factor - 1), size / (size - 2))


def llama3_frequencies(frequencies: Float32, scaling: RopeScaling) -> Float32:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended (Llama 3.1 reference code)."""
    context = scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0, 1)  # rounding, where the two factors are close to each other
    stretched = frequencies / scaling.factor
    between = (1 - blend) * stretched + blend * frequencies
    long, short = wavelengths > context / scaling.low_freq_factor, wavelengths < context / scaling.high_freq_factor
    return np.where(long, stretched, np.where(short, frequencies, between)).astype(np.float32)


def _yarn(frequencies: Float32, config: LlamaConfig, scaling: RopeScaling) -> Float32:
    """Channels that turn often in the original context keep their frequency, slow ones are stretched, and a ramp leads
    from one to the other (Peng et al., arXiv 2309.00071, section 3.2)."""
    size, original = config.head_dim, scaling.original_max_position_embeddings

    def channel(turns: float) -> float:
        """Which channel turns so often in the original context?"""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    kept = 1 - np.clip((np.arange(size // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (frequencies / np.float32(scaling.factor) * (1 - kept) + frequencies * kept).astype(np.float32)
