"""Everything that passes and answers write: made once for a capacity, at addresses that captured launches keep."""

from collections import Counter
from collections.abc import Collection, Sequence
from copy import copy
from typing import Protocol

import torch
import triton
from torch import Tensor

from ..models.config import LlamaConfig
from ..models.rope import Rope
from ..triton_kernels.attention import Partials
from ..triton_kernels.cache import PAGE
from ..triton_kernels.heads import SAMPLING_WORDS, Scratch
from ..triton_kernels.linear import Weight, tiling
from ..triton_kernels.state import DRAFT_WORDS, MAIL_SLOTS, MAX_ROWS, OFFER_WORDS, RING_WORDS, WORDS
from ..triton_kernels.texts import Texts
from .weights import DeviceWeights, Layer

SLOTS = 64  # records in a ring: more than the passes that a carrier has in flight


class Work:
    """What the kernels of one stage hand to each other. Stages that may run at the same time have one each."""

    def __init__(
        self,
        weights: DeviceWeights,
        layers: Sequence[Layer],
        lm_head: Weight | None,
        device: torch.device,
        tiles: int = 0,
    ) -> None:
        """tiles: at most, of rows of several texts (triton_kernels/texts.py); 0: the rows are one text's."""
        self.texts: Texts | None = None
        config, rows = weights.config, MAX_ROWS * max(tiles, 1)
        heads, head_dim = config.num_attention_heads, config.head_dim
        self.x = torch.zeros(rows, config.hidden_size, device=device)
        dot = torch.float32 if triton.knobs.runtime.interpret else weights.dtype  # the interpreter gets bfloat16 wrong
        self.rounded = torch.zeros(rows, config.hidden_size, dtype=dot, device=device)
        self.queries = torch.zeros(rows, heads, head_dim, device=device)
        self.mixed = torch.zeros(rows, heads * head_dim, dtype=weights.dtype, device=device)
        self.inner = torch.zeros(rows, config.intermediate_size, dtype=weights.dtype, device=device)
        self.partials = Partials(heads, config.num_key_value_heads, head_dim, device, tiles)
        matrices = [m for layer in layers for m in (layer.out, layer.down) if m is not None]
        sums = max((tiling(m).splits * m.outputs for m in matrices if tiling(m).splits > 1), default=0)
        self.sums = torch.empty(sums * rows, device=device)  # float32 [splits, 16, outputs] of matrices cut along K
        self.scratch = Scratch(lm_head, tiles) if lm_head is not None else None
        self.choices = torch.zeros(rows, dtype=torch.int32, device=device)
        self.chances = torch.zeros(rows, device=device)

    def of(self, texts: Texts) -> "Work":
        """The same memory, for rows of these texts."""
        part, rows = copy(self), MAX_ROWS * texts.tiles
        part.texts = texts
        part.x, part.rounded, part.queries = self.x[:rows], self.rounded[:rows], self.queries[:rows]
        part.mixed, part.inner = self.mixed[:rows], self.inner[:rows]
        return part


class Cache(Protocol):
    """What a layer needs of a device: each position's cosines and sines [capacity, head_dim], and the KV cache by layer
    (triton_kernels/cache.py)."""

    device: torch.device
    rotations: Tensor
    cache: list[Tensor]


def rotations_of(layer: Layer, cache: Cache) -> Tensor | None:
    return cache.rotations if layer.attention.rotary else None


def rotations(config: LlamaConfig, capacity: int, device: torch.device) -> Tensor:
    rope = Rope(config, capacity, device)
    return torch.cat((rope.cos, rope.sin), 1)


class Site:
    """What the passes of one device read and write; a model on one device has one.

    state: the answer's words, elsewhere than at home a copy of them, which tells of rejections. late and mail: the
    words of each verification stage's passes (and, where verdicts are apart, of theirs), and those handed to it. text
    [capacity] int32. exit_hidden [capacity, hidden] float32; the same are last_hidden,
    after the last layer (no rows, but for a head that receives it), and handed, at each border between verification
    stages. cache: per layer, those of the exit head last. pages: of the one text, one after the other.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        capacity: int,
        stages: int,
        device: torch.device,
        layers: Collection[int] | None = None,
        borders: Collection[int] | None = None,
    ) -> None:
        """layers: those that are here; borders: those whose rows are (0 is in front of the first verification stage);
        the others are empty. None: all."""
        config, self.device = weights.config, device
        self.capacity = capacity = whole_pages(capacity)
        every = len(weights.layers) + (len(weights.head.layers) if weights.head else 0)
        self.rotations = rotations(config, capacity, device)
        self.pages = torch.arange(capacity // PAGE, dtype=torch.int32, device=device)
        self.state = _words(device, WORDS)
        self.late, self.mail = _words(device, stages + 1, WORDS), _words(device, stages + 1, MAIL_SLOTS, WORDS)
        self.text = _words(device, capacity)
        self.sampling = _words(device, SAMPLING_WORDS)

        def hidden(border: int) -> Tensor:
            rows = capacity if borders is None or border in borders else 0
            return torch.zeros(rows, config.hidden_size, device=device)

        def cache(layer: int) -> Tensor:
            pages = len(self.pages) if layers is None or layer in layers else 0
            shape = (pages, 2 * config.num_key_value_heads, PAGE, config.head_dim)
            return torch.zeros(shape, dtype=weights.dtype, device=device)

        self.exit_hidden = hidden(0)
        self.last_hidden = hidden(stages) if weights.hears else self.exit_hidden[:0]
        self.handed = [hidden(border) for border in range(1, stages)]
        self.cache = [cache(layer) for layer in range(every)]


class Buffers(Site):
    """Of one model for one answer at a time, on the device that drafts.

    early and head: the words of a draft step's layers and of its exit head. confidences [capacity] and copied
    [capacity] int32 (of draft tokens, by position), truth [capacity] int32 (the oracle's). choices [16] int32: of a
    pass whose verdict is apart. In the host's memory, int32: ring [SLOTS, RING_WORDS] and drafts [SLOTS, DRAFT_WORDS],
    record n in slot n % SLOTS; offer [OFFER_WORDS], what the host offers to draft.
    """

    def __init__(
        self, weights: DeviceWeights, capacity: int, stages: int, device: torch.device, *here: Collection[int]
    ) -> None:
        """here: the layers and borders, as of Site."""
        super().__init__(weights, capacity, stages, device, *here)
        self.early, self.head = _words(device, WORDS), _words(device, WORDS)
        self.truth = _words(device, self.capacity)
        self.confidences, self.copied = torch.zeros(self.capacity, device=device), _words(device, self.capacity)
        self.choices = _words(device, MAX_ROWS)
        self.ring, self.drafts = host_words(SLOTS, RING_WORDS, device), host_words(SLOTS, DRAFT_WORDS, device)
        self.offer = host_words(1, OFFER_WORDS, device)[0]


def _words(device: torch.device, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)


def whole_pages(capacity: int) -> int:
    """Positions that there is room for: whole pages, and one more row than asked for."""
    return -(-(capacity + 1) // PAGE) * PAGE


def host_words(slots: int, width: int, device: torch.device) -> Tensor:
    """int32 [slots, width] by which device and host tell each other: pinned, and so mapped, memory on a GPU."""
    return torch.zeros(slots, width, dtype=torch.int32, pin_memory=device.type == "cuda")


def cache_bytes(weights: DeviceWeights, capacity: int) -> dict[torch.device, int]:
    """What the KV caches take on each device: nearly all of its buffers."""
    config, home = weights.config, weights.device
    row = 2 * config.num_key_value_heads * config.head_dim * weights.dtype.itemsize
    places = weights.places or (home,) * len(weights.layers)
    layers = Counter([*places, *[home] * (len(weights.head.layers) if weights.head else 0)])
    return {device: count * row * whole_pages(capacity) for device, count in layers.items()}
