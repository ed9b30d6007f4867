"""The model's logits, as the passes of plain decoding compute them before they choose a token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..sampling import SamplingParams
from ..triton_kernels.state import MAX_ROWS, ROWS, START, WORDS
from .stages import DeviceStages


def logits_of(stages: DeviceStages, ids: Sequence[int], last: int) -> Tensor:
    """float32 [last, vocabulary], behind each of the `last` ids. Overwrites the rows of the answer before."""
    first, config = len(ids) - last, stages.weights.config
    stages.begin(ids[: first + 1], SamplingParams(), end=len(ids) + 1)
    buffers = stages.buffers
    buffers.text[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
    out = torch.empty(last, config.vocab_size, device=stages.state.device)
    some = torch.zeros(MAX_ROWS, config.vocab_size, device=stages.state.device)
    for start in range(first, len(ids), MAX_ROWS):
        rows = min(MAX_ROWS, len(ids) - start)
        words = torch.zeros(WORDS, dtype=torch.int32)
        words[ROWS], words[START] = rows, start
        for passes in (buffers.early, buffers.late):
            passes.copy_(words.expand_as(passes))
        stages._early_layers()
        for stage in range(len(stages.slices)):
            stages._late_layers(stage, buffers.late[stage])
        stages._lm_head(buffers.late[-1], some)
        out[start - first : start - first + rows] = some[:rows]
    return out
