"""Everything that passes and answers write: made once for a capacity, at addresses that captured launches keep."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.rope import Rope
from ..triton_kernels.attention import SPLIT, Partials
from ..triton_kernels.heads import SAMPLING_WORDS, Scratch
from ..triton_kernels.linear import Weight, tiling
from ..triton_kernels.state import DRAFT_WORDS, MAIL_SLOTS, MAX_ROWS, RING_WORDS, WORDS
from .weights import DeviceWeights, Layer

SLOTS = 64  # records in a ring: more than the passes that a carrier has in flight
NEVER = 2**31 - 1


class Work:
    """What the kernels of one stage hand to each other. Stages that may run at the same time have one each."""

    def __init__(self, weights: DeviceWeights, capacity: int, layers: Sequence[Layer], lm_head: Weight | None) -> None:
        config, device = weights.config, weights.device
        heads, head_dim = config.num_attention_heads, config.head_dim
        self.x = torch.zeros(MAX_ROWS, config.hidden_size, device=device)
        self.queries = torch.zeros(MAX_ROWS, heads, head_dim, device=device)
        self.mixed = torch.zeros(MAX_ROWS, heads * head_dim, dtype=weights.dtype, device=device)
        self.inner = torch.zeros(MAX_ROWS, config.intermediate_size, dtype=weights.dtype, device=device)
        self.partials = Partials(capacity, heads, head_dim, device)
        matrices = [m for layer in layers for m in (layer.out, layer.down) if m is not None]
        sums = max((tiling(m).splits * m.outputs for m in matrices if tiling(m).splits > 1), default=0)
        self.sums = torch.empty(sums * MAX_ROWS, device=device)  # float32 [splits, 16, outputs] of matrices cut along K
        self.scratch = Scratch(lm_head) if lm_head is not None else None
        self.choices = torch.zeros(MAX_ROWS, dtype=torch.int32, device=device)
        self.chances = torch.zeros(MAX_ROWS, device=device)


class Buffers:
    """Of one model for one answer at a time.

    text [capacity] int32, confidences [capacity] (of draft tokens, by position), truth [capacity] int32 (the oracle's),
    first_seen [vocabulary] int32, exit_hidden [capacity, hidden] float32; the same are last_hidden, behind the last
    layer (no rows, but for a head that hears of it), and handed, at each border between verification stages. keys and
    values: per layer, those of the exit head last, [kv_heads, capacity, head_dim].
    """

    def __init__(self, weights: DeviceWeights, capacity: int, stages: int) -> None:
        config, device = weights.config, weights.device
        self.capacity = capacity = -(-(capacity + 1) // SPLIT) * SPLIT

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rope = Rope(config, capacity, device)
        self.cosines, self.sines = rope.cos, rope.sin
        self.state, self.early, self.head = words(WORDS), words(WORDS), words(WORDS)
        self.late, self.mail = words(stages, WORDS), words(stages, MAIL_SLOTS, WORDS)
        self.text, self.truth = words(capacity), words(capacity)
        self.confidences = torch.zeros(capacity, device=device)
        self.first_seen = torch.full((config.vocab_size,), NEVER, dtype=torch.int32, device=device)
        self.sampling = words(SAMPLING_WORDS)
        self.exit_hidden = torch.zeros(capacity, config.hidden_size, device=device)
        heard = weights.head is not None and weights.head.feedback is not None
        self.last_hidden = torch.zeros(capacity if heard else 0, config.hidden_size, device=device)
        self.handed = [torch.zeros(capacity, config.hidden_size, device=device) for _ in range(stages - 1)]
        layers = len(weights.layers) + (len(weights.head.layers) if weights.head else 0)
        shape = (config.num_key_value_heads, capacity, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=weights.dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=weights.dtype, device=device) for _ in range(layers)]
        self.ring, self.drafts = host_words(SLOTS, RING_WORDS, device), host_words(SLOTS, DRAFT_WORDS, device)


def host_words(slots: int, width: int, device: torch.device) -> Tensor:
    """int32 [slots, width] that the device writes and the host reads: pinned, and so mapped, memory on a GPU."""
    return torch.zeros(slots, width, dtype=torch.int32, pin_memory=device.type == "cuda")


def needed_bytes(weights: DeviceWeights, capacity: int, stages: int = 1) -> int:
    """What `Buffers` and the stages' `Work` take, but for what does not grow with the capacity or the model."""
    config = weights.config
    layers = len(weights.layers) + (len(weights.head.layers) if weights.head else 0)
    capacity = -(-(capacity + 1) // SPLIT) * SPLIT
    cache = 2 * layers * config.num_key_value_heads * config.head_dim * weights.dtype.itemsize
    hidden = 4 * config.hidden_size * stages + 4 * config.head_dim
    partials = 4 * MAX_ROWS * config.num_attention_heads * (config.head_dim + 2) * (stages + 1) // SPLIT
    return capacity * (cache + hidden + partials + 12)
