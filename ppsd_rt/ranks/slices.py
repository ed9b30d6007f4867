"""What each rank holds: its layers and heads on the C++ kernels, and nothing else; and how many layers that are.

The checkpoint's file is mapped by every rank; only the pages of the slice are read, and given back once packed.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np

from .. import _native
from ..cpu.answers import MOST_ANSWERS, PROMPT_ROWS
from ..cpu.formats import FORMATS, kv_format, refuses
from ..cpu.machine import kv_memory_of
from ..cpu.native import one_line
from ..cpu.packing import pack_head, pack_model
from ..errors import PpsdError, UsageError
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from ..models.head_file import HeadFile
from ..pipeline.split import best_split, is_split

_REPEATS = 12
_CONTEXT = 128  # rows before the one that is timed
_CACHE = 64 << 20  # bytes that displace what a cache holds, or most of it


class CpuSlices:
    """Makes a rank's stages. dtype: of the weights. bytes: of those that were packed last. blocks: of KV
    caches, that rank 0 has memory for."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: str,
        kv_dtype: str,
        threads: int,
        cores: list[int],
        local_size: int = 1,
        kv_memory: int | str | None = None,
    ) -> None:
        """local_size: ranks that share this host's memory. kv_memory: see RankOptions."""
        if dtype not in FORMATS:
            raise UsageError(f"dtype {dtype!r} is unknown to ranks; dtypes are auto, {', '.join(FORMATS)}")
        if reason := refuses(checkpoint.config):
            raise PpsdError(f"ranks run the cpu backend, which cannot run this model: {reason}")
        self.checkpoint, self.dtype, self.threads, self._cores = checkpoint, dtype, threads, cores
        self._kv_dtype = kv_format(dtype, checkpoint.config.head_dim, kv_dtype)
        self._kv_bytes = kv_memory_of(kv_memory) // (local_size if kv_memory is None else 1)
        self.blocks = self.bytes = 0

    def pack_drafting(self, head: HeadFile | None, size: int) -> None:
        """Rank 0's: layers [0, size), and what the exit head after them reads of the model."""
        own_layers = isinstance(head, Eagle3File)
        reads_lm_head = head is not None and head.draft_ids is None and not own_layers
        self._size, self._early = size, self._pack(0, 0 if own_layers else size, reads_lm_head)
        self._drafting = self.with_head(head)
        self.bytes = self._drafting.packed_bytes
        self.blocks = min(self._kv_bytes // max(_native.drafting_block_bytes(self._drafting), 1), 1 << 24)

    def with_head(self, head: HeadFile | None) -> _native.Model:
        """Rank 0's layers with this exit head; without one, nothing can be drafted."""
        if head is not None:
            return pack_head(self._early, head, self._kv_dtype, self.threads)
        norm = {"norm.weight": self.checkpoint.tensors["model.norm.weight"]}
        with one_line("pack the exit head", self.threads):
            return self._early.with_exit_head(self._size, norm, [], self.threads)

    def station(self, first: int, last: int, taps: Sequence[int] = ()) -> _native.Station:
        """The stage of layers [first, last), and of the LM head after the model's last one."""
        model = self._pack(first, last, last == self.checkpoint.config.num_hidden_layers)
        self.bytes = model.packed_bytes
        with one_line("make a stage", self.threads):
            return _native.Station(model, first, last, self._cores, self.threads, self._kv_bytes, taps)

    def loop(self, stages: int, blocks: int) -> _native.Loop:
        """Of rank 0, once it has packed what it drafts with, over so many ranks."""
        with one_line(f"hold {blocks} blocks of KV caches", self.threads):
            return _native.Loop.over_ranks(
                self._drafting, self._cores, self.threads, stages, blocks, MOST_ANSWERS, PROMPT_ROWS
            )

    def facts(self) -> dict[str, Any]:
        return {"isa": self._drafting.isa, "kv_dtype": self._kv_dtype}

    def _pack(self, first: int, last: int, lm_head: bool) -> _native.Model:
        with one_line(f"pack layers {first} to {last}", self.threads):
            return pack_model(
                self.checkpoint, self.dtype, self._kv_dtype, self.threads, first=first, last=last, lm_head=lm_head
            )


# -- how many layers each rank gets: as the user says, or as pipeline/split.py finds from costs measured here ----------


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
    middle = slices.station(count - 2, count - 1)
    others = np.ones(min(slices.bytes * count, _CACHE) // 8, dtype=np.int64)
    last = slices.station(count - 1, count)
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
