"""A rank starts: it meets the others, opens its model, loads its slice, and serves or drafts.

Before ranks work they compare what they are. Rank 0 then says who has which layers.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__, _native
from ..cpu.formats import format_for
from ..cpu.machine import default_threads
from ..errors import PpsdError, UsageError
from ..extras import need
from ..find_head import find_head
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from ..models.head_file import HeadFile
from ..models.resolve import resolve_model
from ..printable import quoted
from .connect import connect, first_line
from .control import GRACE, Control, Kind
from .links import CONTROL
from .slices import CpuSlices, check_sizes, solve
from .stage import grammars_of, serve
from .threads import CLOCK, Clock
from .world import Child, World

if TYPE_CHECKING:
    from ..engine import Engine


@dataclass(frozen=True)
class RankOptions:
    """What every rank is told when it is started, in the same words.

    kv_memory: of each rank, for the KV caches of many answers; None: half of what its host can spare, shared among
    its ranks. sizes: layers of each rank; None: as is best. link_delay: seconds that every message is held back on its
    arrival, for experiments on one host. silence: seconds without a sign of life after which a rank counts as lost."""

    model: str = "smollm2-135m"
    exit_head: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kv_memory: int | str | None = None
    threads: int | None = None
    sizes: tuple[int, ...] | None = None
    schedule: str = "auto"
    link_delay: float = 0.0
    silence: float = 20.0


def check_backend(backend: str, device: str) -> None:
    if backend not in ("auto", "cpu") or device not in ("auto", "cpu"):
        raise UsageError(
            f"ranks run on CPUs, not with --backend {quoted(backend)} --device {quoted(device)}; GPUs of one machine "
            "take some layers each in one process: --device cuda:0,cuda:1"
        )


def join(world: World, options: RankOptions, clock: Clock = CLOCK) -> "Engine | None":
    """Take part as `world` says. Rank 0: the engine, to be closed with `leave`. The others serve until rank 0 ends, and
    then return None. Raises PpsdError, with the same line on every rank, when that cannot be or ends otherwise."""
    need("torch", "torch", "a pipeline over processes")
    # Of torch's C++: what it says about connections comes as an error too, or is nothing to worry about.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    sys.setswitchinterval(0.0005)  # of the interpreter lock: threads here have microseconds of work for it
    groups = connect(world)
    control = Control(groups[CONTROL], world, options.silence, clock)
    control.start()
    try:
        head, slices = _open(world, options)
        facts = _facts(head, slices, options)
        sizes = exchange(control, facts, lambda: options.sizes or solve(head, world.size, slices))
        return _play(control, groups, head, slices, sizes, options)
    except PpsdError as error:
        control.fail(f"rank {world.rank}: {error}")
        raise PpsdError(control.failure or str(error)) from None
    except RuntimeError as error:  # of a link, which control has heard of, or will soon
        control.failed.wait(2 * GRACE)
        control.check()
        raise PpsdError(f"rank {world.rank}: {first_line(error)}") from None


def _play(
    control: Control,
    groups: dict[int, Any],
    head: HeadFile | None,
    slices: CpuSlices,
    sizes: tuple[int, ...],
    options: RankOptions,
) -> "Engine | None":
    """Load the slice; then serve, or give the engine."""
    checkpoint, rank, taps = slices.checkpoint, control.world.rank, head.taps if head else ()
    words = _native.pass_words(checkpoint.config.hidden_size, len(taps))
    if not control.world.drafts:
        station = slices.station(sum(sizes[:rank]), sum(sizes[: rank + 1]), taps)
        serve(groups, control, station, words, partial(grammars_of, checkpoint), options.link_delay)
        return None

    from ..engine import Engine
    from ..models.tokenizer import load_tokenizer
    from .backend import RanksBackend

    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.config.vocab_size)
    slices.pack_drafting(head, sizes[0])
    backend = RanksBackend(groups, control, slices, head.info if head else None, sizes, words, options.link_delay)
    backend.open()
    return Engine(checkpoint, tokenizer, backend, options.model)


def leave(engine: "Engine | None", status: int, children: Sequence[Child] = ()) -> NoReturn:
    """The end of a rank's process. Threads that wait for messages would hold up Python's own way out.

    children: the other ranks, where this one has started them.
    """
    if engine is not None and engine.learner:
        engine.learner.close()
    close = getattr(engine.backend, "close", None) if engine is not None else None
    if close:
        close()
    for child in children:
        child.end(told=status > 0)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:  # nobody reads any more
                status = status or 1
    os._exit(status)


def _open(world: World, options: RankOptions) -> tuple[HeadFile | None, CpuSlices]:
    """What this rank is about to run. Raises PpsdError where it cannot."""
    threads, cores = cores_of(world.local_rank, world.local_size, options.threads)
    checkpoint = Checkpoint(Path(resolve_model(options.model)))
    scaling = checkpoint.config.rope_scaling
    if scaling is not None and scaling.by_length:
        raise PpsdError(f"ranks cannot run this model: its rotation depends on the length of the text ({scaling.kind})")
    dtype = format_for(checkpoint, options.dtype)
    slices = CpuSlices(checkpoint, dtype, options.kv_dtype, threads, cores, world.local_size, options.kv_memory)
    found = find_head(options.exit_head, checkpoint)
    head = found if found is not None and found.drafts else None
    if options.sizes:
        check_sizes(options.sizes, world.size, checkpoint.config.num_hidden_layers, head)
    return head, slices


def cores_of(local_rank: int, local_size: int, threads: int | None) -> tuple[int, list[int]]:
    """(threads, cores) of a rank: its host's cores are dealt out; none: too few, the system chooses."""
    cores = _native.usable_cores()
    count = threads or default_threads(local_size)
    if len(cores) < local_size * count:
        # Each rank may have been given cores of its own (taskset, a container): then it has all it sees.
        return count, cores[:count] if local_size == 1 and len(cores) >= count else []
    return count, cores[local_rank * count : (local_rank + 1) * count]


def _facts(head: HeadFile | None, slices: CpuSlices, options: RankOptions) -> dict[str, str]:
    """What all ranks must agree on."""
    return {
        "version": __version__,
        "wire": str(_native.WIRE_VERSION),
        "model": slices.checkpoint.hash,
        "exit head": head_hash(head) if head else "",
        "format": slices.dtype,
        "KV cache": options.kv_dtype,
        "schedule": options.schedule,
        "stages": ",".join(map(str, options.sizes)) if options.sizes else "auto",
        "link delay": f"{options.link_delay:g} s",
        "kind of device": "any" if options.sizes else _native.isa(),
    }


# -- one exchange of facts ---------------------------------------------------------------------------------------------

_AS_ONE = "start all ranks with the same options, files and version"
_MENDS = {
    "kind of device": "they round differently, and the text would depend on what the split is measured to be; give it "
    "with --stages"
}


def exchange(control: Control, facts: Mapping[str, str], split: Callable[[], Sequence[int]]) -> tuple[int, ...]:
    """Layers of each rank, as rank 0's `split` gives them. PpsdError where a rank differs, the same line on all.

    However long the others take to open their models: who hangs or ends meanwhile is missed by `control`.
    """
    if not control.world.drafts:
        return tuple(control.ask(0, Kind.FACTS, facts))
    others = range(1, control.world.size)
    if line := difference([facts, *(control.next(rank, Kind.FACTS) for rank in others)]):
        control.fail(line)
    control.check()
    sizes = tuple(split())
    for rank in others:
        control.tell(rank, Kind.FACTS, sizes)
    return sizes


def difference(facts: Sequence[Mapping[str, str]]) -> str | None:
    """One line about the first rank that is not like rank 0; None: all is well."""
    for rank, its in enumerate(facts):
        for field, wanted in facts[0].items():
            if (found := its.get(field)) != wanted:
                has, mend = str(found or "none")[:200], _MENDS.get(field, _AS_ONE)
                return f"rank {rank} has {field} {has}, rank 0 has {wanted or 'none'}: {mend}"
    return None


def head_hash(head: HeadFile) -> str:
    digest = hashlib.sha256(f"{head.info.kind} {head.info.exit_layer}".encode())
    if isinstance(head, Eagle3File):  # whose settings are beside its tensors
        digest.update(repr(head.eagle).encode())
    for name, tensor in sorted(head.tensors.items()):
        digest.update(name.encode() + tensor.tobytes())
    if head.draft_ids is not None:
        digest.update(head.draft_ids.tobytes())
    return f"{head.info.kind} after layer {head.info.exit_layer}, {digest.hexdigest()[:16]}"
