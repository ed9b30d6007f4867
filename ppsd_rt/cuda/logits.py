"""The model's logits, as the passes of plain decoding compute them before they choose a token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sampling.params import SamplingParams
from ..triton_kernels.state import MAX_ROWS
from .stages import DeviceStages


def logits_of(stages: DeviceStages, ids: Sequence[int], last: int) -> Tensor:
    """float32 [last, vocabulary], after each of the `last` ids. Overwrites the rows of the answer before."""
    first = len(ids) - last
    stages.begin(ids[: first + 1], SamplingParams(), end=len(ids) + 1)
    stages.buffers.text[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    starts = range(first, len(ids), MAX_ROWS)
    return torch.cat([stages.logits(start, min(MAX_ROWS, len(ids) - start)) for start in starts])
