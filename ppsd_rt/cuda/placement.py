"""Which layers are on which of several devices: as given, or as is best by costs that were measured on them.

The first device drafts. It has the embedding, the exit head and at least the layers in front of that; what it has
beyond them is the first verification stage. The last one has the final norm and the LM head. A device may be named
twice: it has as many stages then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from statistics import median

import torch

from ..errors import UsageError
from ..models.config import LlamaConfig
from ..models.head_file import LAYERS, HeadInfo
from ..pipeline.split import best_split, is_split
from ..sampling.params import SamplingParams
from .devices import synchronise, synonyms
from .errors import weight_bytes
from .graphs import StageGraphs
from .stages import DeviceStages
from .weights import DeviceWeights

_MORE_THAN_CACHES = 256e6  # bytes of the layers that are measured: decoding reads them from memory
_REPEATS = 7


@dataclass(frozen=True)
class Placement:
    """devices: one for each part; sizes: layers in each."""

    devices: tuple[torch.device, ...]
    sizes: tuple[int, ...]

    @property
    def places(self) -> tuple[torch.device, ...]:
        """The device of each layer; none, if there is but one."""
        parts = zip(self.devices, self.sizes, strict=True)
        return () if synonyms(self.devices) else tuple(device for device, size in parts for _ in range(size))

    def cuts(self, exit_layer: int) -> list[int]:
        """Where verification, which begins there, is cut into stages."""
        ends = list(accumulate(self.sizes))[:-1]
        if ends[0] < exit_layer:
            raise UsageError(
                f"the exit head is after layer {exit_layer}: {self.devices[0]}, which drafts, needs as many layers, "
                f"not {ends[0]}; change --stages"
            )
        return [end for end in ends if end > exit_layer]

    def __str__(self) -> str:
        return ", ".join(f"{size} on {device}" for device, size in zip(self.devices, self.sizes, strict=True))


def given_sizes(layers: int, devices: int, stages: int | Sequence[int]) -> tuple[int, ...] | None:
    """What --stages says to several devices; None: that the best split is to be found."""
    if devices > layers:
        raise UsageError(f"{layers} layers cannot be placed on {devices} devices: name fewer")
    if isinstance(stages, int):
        if stages not in (1, devices):
            raise UsageError(
                f"{devices} devices have {devices} stages, not {stages}: --stages A,B,... says how many layers each has"
            )
        return None
    if not is_split(stages, devices, layers):
        shown = ",".join(map(str, stages))
        raise UsageError(
            f"--stages {shown} does not fit: it takes {devices} numbers from 1, one for each device, that add up to "
            f"the model's {layers} layers"
        )
    return tuple(stages)


@dataclass(frozen=True)
class Measured:
    """Seconds on one device, for one row."""

    layer: float
    lm_head: float


def best_sizes(layers: int, costs: Sequence[Measured], head: HeadInfo | None, draft_share: float) -> tuple[int, ...]:
    """Layers of each device, by what they cost there: the slowest of them sets the pace, see ppsd_rt/pipeline/split.py.

    draft_share: of the vocabulary, what the exit head draws from.
    """
    first, exit_layer = costs[0], max(1, head.exit_layer) if head else 1
    if layers - exit_layer + 1 < len(costs):
        raise UsageError(
            f"after the exit head come {layers - exit_layer} layers, too few for {len(costs)} devices: name fewer"
        )
    of_head = LAYERS[head.kind] * first.layer + draft_share * first.lm_head if head else 0.0
    return best_split(
        layers,
        len(costs),
        layer=first.layer,
        head=of_head,
        lm_head=first.lm_head,
        first=exit_layer,
        slowness=[cost.layer / first.layer for cost in costs],
    )


def measure(config: LlamaConfig, format: str, device: torch.device, *, pdl: bool) -> Measured:
    """Of random layers of this model's shape. Raises CaptureFailed."""
    one = weight_bytes(config, format, 1, first=False, last=False)
    count = max(2, min(config.num_hidden_layers, ceil(_MORE_THAN_CACHES / one) if device.type == "cuda" else 2))
    few = replace(config, num_hidden_layers=count, max_position_embeddings=max(64, config.max_position_embeddings))
    stages = DeviceStages(DeviceWeights.random(few, format, device), 63, (count - 1,), pdl=pdl)
    graphs = StageGraphs(stages)
    stages.begin([1, 1], SamplingParams())
    synchronise([device])
    seconds = [graphs.lanes.run(0, [graphs.row, *graphs.verify]) for _ in range(_REPEATS)]
    graphs.close()
    before, last = (median(repeat[leg] for repeat in seconds) for leg in (1, 2))
    layer = before / (count - 1)
    return Measured(layer, max(last - layer, 0.0))
