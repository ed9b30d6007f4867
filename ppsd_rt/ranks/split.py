"""How many layers each rank gets: as the user says, or as pipeline/split.py finds from costs measured here."""

from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from .. import _native
from ..errors import UsageError
from ..models.head_file import HeadFile
from ..pipeline.split import best_split, is_split
from .slices import CpuSlices

_REPEATS = 12
_CONTEXT = 128  # rows before the one that is timed
_CACHE = 64 << 20  # bytes that displace what a cache holds, or most of it


def check_sizes(sizes: Sequence[int], ranks: int, layers: int, head: HeadFile | None) -> None:
    shown = ",".join(map(str, sizes))
    if not is_split(sizes, ranks, layers, first=min(1, head.info.exit_layer) if head else 1):
        raise UsageError(f"--stages {shown} does not give {layers} layers to {ranks} ranks")
    if head is not None and sizes[0] != head.info.exit_layer:
        raise UsageError(
            f"--stages {shown}: rank 0 has the layers before the exit head, which are {head.info.exit_layer}"
        )


def solve(head: HeadFile | None, ranks: int, slices: CpuSlices) -> tuple[int, ...]:
    """The best split for ranks that are all machines like this one."""
    layers = slices.checkpoint.config.num_hidden_layers
    if not 2 <= ranks <= layers:
        raise UsageError(f"{layers} layers go to 2 to {layers} ranks, not {ranks}")
    exit_layer = head.info.exit_layer if head else None
    if exit_layer is not None and ranks == 2:
        return exit_layer, layers - exit_layer
    if exit_layer is not None and layers - exit_layer < ranks - 1:
        raise UsageError(f"{layers - exit_layer} layers after the exit head do not go to {ranks - 1} ranks")
    layer, of_head, lm_head = measure(head, slices)
    first = 1 if exit_layer is None else exit_layer
    return best_split(
        layers, ranks, layer=layer, head=of_head, lm_head=lm_head, first=first, fixed=exit_layer is not None
    )


def measure(head: HeadFile | None, slices: CpuSlices) -> tuple[float, float, float]:
    """Seconds for one row of a layer, the exit head and the LM head. Every layer is taken to cost what the last one
    does, and an exit head what its layers and its share of the LM head would."""
    config = slices.checkpoint.config
    count = config.num_hidden_layers
    middle = slices.station(count - 2, count - 1, 0.0)
    others = np.ones(min(slices.bytes * count, _CACHE) // 8, dtype=np.int64)
    last = slices.station(count - 1, count, 0.0)
    one, two = _time(middle, others.sum), _time(last, others.sum)
    lm_head = max(two - one, 0.0)
    exit_head = 0.0
    if head is not None:
        own = sum(name.endswith("input_layernorm.weight") for name in head.tensors)
        rows = config.vocab_size if head.draft_ids is None else len(head.draft_ids)
        exit_head = own * one + lm_head * rows / config.vocab_size
    return one, exit_head, lm_head


def _time(station: _native.Station, displace: Callable[[], object]) -> float:
    """displace: sends through the cache what all layers would between two passes of this one."""
    times = []
    for _ in range(_REPEATS):
        displace()
        times.append(station.time_pass(1, _CONTEXT))
    return median(times)
