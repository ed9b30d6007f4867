"""What the tests of the Triton kernels share. They run on a GPU where there is one, else in Triton's interpreter."""

import numpy as np
import torch
from support import tiny_config
from torch import Tensor
from triton.runtime import interpreter

from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.rope import Rope
from ppsd_rt.triton_kernels.state import KNOWN, ROWS, START, WORDS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROW_COUNTS = (1, 2, 7, 16)


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def state_of(rows: int, start: int = 0, known: int = 0) -> Tensor:
    state = torch.zeros(WORDS, dtype=torch.int32, device=DEVICE)
    state[ROWS], state[START], state[KNOWN] = rows, start, known
    return state


def table(capacity: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [capacity, head_dim / 2]."""
    config = LlamaConfig.from_dict(tiny_config(head_dim=head_dim))
    rope = Rope(config, capacity, DEVICE)
    return rope.cos, rope.sin


def close(ours: Tensor, theirs: Tensor) -> None:
    """To float32 rounding."""
    assert ours.shape == theirs.shape
    assert (ours.float() - theirs).abs().max() <= 2e-5 * theirs.abs().max().clamp(min=1)


def dot_by_sixteen_columns(self, a, b, d, input_precision, max_num_imprecise_acc):
    """A product as matrix instructions compute it: every column alike.

    The interpreter asks the BLAS, which adds in another order in the last columns where there are more than sixteen.
    """
    parts = [a.data @ b.data[..., i : i + 16] for i in range(0, b.data.shape[-1], 16)]
    return interpreter.TensorHandle(np.concatenate(parts, axis=-1) + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = dot_by_sixteen_columns
