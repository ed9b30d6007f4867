"""What each rank holds: its layers and heads on the C++ kernels, and nothing else.

The checkpoint's file is mapped by every rank; only the pages of the slice are read, and given back once packed.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from .. import _native
from ..cpu.answers import MOST_ANSWERS, PROMPT_ROWS
from ..cpu.failures import one_line
from ..cpu.formats import FORMATS, kv_format, refuses
from ..cpu.machine import default_threads, kv_memory_of
from ..cpu.packing import pack_eagle3, pack_model
from ..errors import PpsdError, UsageError
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from ..models.head_file import HeadFile

Formats: TypeAlias = tuple[str, str]  # of the weights, and of the KV cache


def layers_of(sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """[first, last) of a rank."""
    ends = list(accumulate(sizes))
    return ends[rank] - sizes[rank], ends[rank]


def pack_slice(
    checkpoint: Checkpoint, first: int, last: int, formats: Formats, threads: int, lm_head: bool
) -> _native.Model:
    """Layers [first, last), and the LM head if wanted. Raises PpsdError where they cannot be packed."""
    dtype, kv_dtype = formats
    config = checkpoint.config
    reason = refuses(config)
    if reason:
        raise PpsdError(f"ranks run the cpu backend, which cannot run this model: {reason}")
    kv = kv_format(dtype, config.head_dim, kv_dtype)
    with one_line(f"pack layers {first} to {last}", threads):
        return pack_model(checkpoint, dtype, kv, threads, first=first, last=last, lm_head=lm_head)


def draft_slice(
    checkpoint: Checkpoint, head: HeadFile | None, size: int, formats: Formats, threads: int
) -> _native.Model:
    """Layers [0, size), and what the exit head after them reads of the model."""
    if isinstance(head, Eagle3File):
        return pack_slice(checkpoint, 0, 0, formats, threads, lm_head=False)
    whole = head is not None and head.draft_ids is None  # it reads the model's LM head
    return pack_slice(checkpoint, 0, size, formats, threads, lm_head=whole)


def with_head(
    model: _native.Model, checkpoint: Checkpoint, head: HeadFile | None, size: int, kv_dtype: str, threads: int
) -> _native.Model:
    """The slice with an exit head; without one, nothing can be drafted."""
    with one_line("pack the exit head", threads):
        if isinstance(head, Eagle3File):
            return pack_eagle3(model, head, kv_dtype, threads)
        tensors = {"norm.weight": checkpoint.tensors["model.norm.weight"]} if head is None else dict(head.whole)
        draft_ids = [] if head is None or head.draft_ids is None else head.draft_ids.tolist()
        return model.with_exit_head(size, tensors, draft_ids, threads)


def verify_slice(checkpoint: Checkpoint, first: int, last: int, formats: Formats, threads: int) -> _native.Model:
    whole = last == checkpoint.config.num_hidden_layers
    return pack_slice(checkpoint, first, last, formats, threads, lm_head=whole)


class CpuSlices:
    """Makes a rank's stages. dtype: of the weights. bytes: of those that `drafter` or `station` loaded last. blocks: of
    KV caches, that there is memory for beside the stage made last."""

    def __init__(
        self,
        formats: Formats,
        threads: int,
        cores: list[int],
        local_size: int = 1,
        kv_memory: int | str | None = None,
    ) -> None:
        """local_size: ranks that share this host's memory. kv_memory: see RankOptions."""
        shared = local_size if kv_memory is None else 1
        self._kv_bytes = kv_memory_of(kv_memory) // shared
        self.blocks = 0
        self._dtype, self._kv_dtype = formats
        if self._dtype not in FORMATS:
            raise UsageError(f"dtype {self._dtype!r} is unknown to ranks; dtypes are auto, {', '.join(FORMATS)}")
        self._threads, self._cores, self.bytes = threads, cores, 0
        self._made_of: dict[str, str] = {}

    @property
    def dtype(self) -> str:
        return self._dtype

    def drafter(self, checkpoint: Checkpoint, head: HeadFile | None, size: int) -> _native.Drafter:
        self._checkpoint, self._size = checkpoint, size
        self._early = draft_slice(checkpoint, head, size, self._formats, self._threads)
        self._drafting = self._made(checkpoint, self.with_head(head))
        with one_line("make a stage", self._threads):
            drafter = _native.Drafter(self._drafting, self._cores, self._threads)
        self.blocks = min(self._kv_bytes // max(drafter.block_bytes, 1), 1 << 24)
        return drafter

    def with_head(self, head: HeadFile | None) -> _native.Model:
        """Rank 0's layers with this exit head."""
        kv = kv_format(self._dtype, self._checkpoint.config.head_dim, self._kv_dtype)
        return with_head(self._early, self._checkpoint, head, self._size, kv, self._threads)

    def station(
        self, checkpoint: Checkpoint, first: int, last: int, delay: float, taps: Sequence[int] = ()
    ) -> _native.Station:
        model = self._made(checkpoint, verify_slice(checkpoint, first, last, self._formats, self._threads))
        with one_line("make a stage", self._threads):
            station = _native.Station(model, first, last, self._cores, self._threads, delay, self._kv_bytes, taps)
        self.blocks = station.blocks
        return station

    def loop(self, stages: int, blocks: int) -> _native.Loop:
        """Of rank 0, once it has its drafter, over so many ranks."""
        with one_line(f"hold {blocks} blocks of KV caches", self._threads):
            return _native.Loop.over_ranks(
                self._drafting, self._cores, self._threads, stages, blocks, MOST_ANSWERS, PROMPT_ROWS
            )

    @property
    def _formats(self) -> Formats:
        return self._dtype, self._kv_dtype

    def facts(self) -> dict[str, Any]:
        return dict(self._made_of)

    def _made(self, checkpoint: Checkpoint, model: _native.Model) -> _native.Model:
        self.bytes = model.packed_bytes
        kv = kv_format(self._dtype, checkpoint.config.head_dim, self._kv_dtype)
        self._made_of = {"isa": model.isa, "kv_dtype": kv}
        return model


def cores_of(local_rank: int, local_size: int, threads: int | None) -> tuple[int, list[int]]:
    """(threads, cores) of a rank: its host's cores are dealt out; none: too few, the system chooses."""
    cores = _native.usable_cores()
    count = threads or default_threads(local_size)
    if len(cores) < local_size * count:
        # Each rank may have been given cores of its own (taskset, a container): then it has all it sees.
        return count, cores[:count] if local_size == 1 and len(cores) >= count else []
    return count, cores[local_rank * count : (local_rank + 1) * count]
