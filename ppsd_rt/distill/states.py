"""The frozen model's hidden states of the texts that are trained on, kept on disk between epochs.

On a CPU the model's own pass is most of the cost of a training step, and it gives the same states every epoch. The file
is a cache: it is mapped, so the system keeps in memory what fits, and a run that is taken up again fills it anew.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import PpsdError


class States:
    """For each text [length, kinds, hidden]: the exit hidden states of every head, then the last hidden states."""

    def __init__(self, path: Path, lengths: Sequence[int], kinds: int, hidden: int, dtype: torch.dtype) -> None:
        self._starts = [0, *np.cumsum(lengths).tolist()]
        self._known = [False] * len(lengths)
        shape = (self._starts[-1], kinds, hidden)
        self._dtype = dtype
        bits = {torch.float32: np.uint32}.get(dtype, np.uint16)  # numpy has no bfloat16
        try:
            self._rows = np.memmap(path, bits, "w+", shape=shape)
        except OSError as error:
            size = shape[0] * kinds * hidden * np.dtype(bits).itemsize / 1e9
            raise PpsdError(f"cannot keep {size:.1f} GB of hidden states in {path}: {error}") from None

    def knows(self, texts: Sequence[int]) -> bool:
        return all(self._known[text] for text in texts)

    def put(self, text: int, states: Sequence[Tensor]) -> None:
        """states: one [length, hidden] tensor of each kind."""
        rows = self._rows[self._starts[text] : self._starts[text + 1]]
        torch.from_numpy(rows).view(self._dtype).copy_(torch.stack(list(states), dim=1))
        self._known[text] = True

    def get(self, text: int) -> Tensor:  # [length, kinds, hidden]
        return torch.from_numpy(self._rows[self._starts[text] : self._starts[text + 1]]).view(self._dtype)
