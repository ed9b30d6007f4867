"""From the environment of one rank to its part of a running pipeline."""

import hashlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__, _native
from ..cpu.formats import format_for
from ..errors import PpsdError
from ..extras import need
from ..find_head import find_head
from ..models.checkpoint import Checkpoint
from ..models.eagle3 import Eagle3File
from ..models.head_file import HeadFile
from ..models.resolve import resolve_model
from .connect import connect
from .control import GRACE, Control
from .grammars import grammars_of
from .handshake import exchange
from .links import CONTROL
from .meeting import Meeting, first_line, open_store
from .options import RankOptions
from .slices import CpuSlices, cores_of, layers_of
from .split import check_sizes, pack_sizes, solve, unpack_sizes
from .stage import serve
from .threads import CLOCK, Clock
from .world import World

if TYPE_CHECKING:
    from ..engine import Engine


def join(world: World, options: RankOptions, clock: Clock = CLOCK) -> "Engine | None":
    """Take part as `world` says. Rank 0: the engine, to be closed with `leave`. The others serve until rank 0 ends, and
    then return None. Raises PpsdError, with the same line on every rank, when that cannot be or ends otherwise."""
    need("torch", "torch", "a pipeline over processes")
    # Of torch's C++: what it says about connections comes as an error too, or is nothing to worry about.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    sys.setswitchinterval(0.0005)  # of the interpreter lock: threads here have microseconds of work for it
    store = open_store(world, clock)
    meeting = Meeting(store.clone(), world, clock)  # gloo waits in its own
    try:
        checkpoint, head, slices, threads = _open(world, options)
    except PpsdError as error:
        meeting.fail(f"rank {world.rank}: {error}")
    exchange(meeting, _facts(world, checkpoint, head, slices, options))
    if world.drafts:
        sizes = options.sizes or ()
        if not sizes:
            try:
                sizes = solve(checkpoint, head, world.size, slices)
            except PpsdError as error:
                meeting.fail(f"rank 0: {error}")
        meeting.put("sizes", pack_sizes(sizes))
    else:
        sizes = unpack_sizes(meeting.read("sizes"))
    groups = connect(store, meeting)
    station: list[_native.Station] = []
    control = Control(
        groups[CONTROL],
        world,
        options.silence,
        options.link_delay,
        lambda: station[0].busy_seconds() if station else 0.0,
    )
    control.start()
    meeting.close()
    try:
        return _play(control, groups, checkpoint, head, slices, sizes, threads, options, station)
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
    checkpoint: Checkpoint,
    head: HeadFile | None,
    slices: CpuSlices,
    sizes: tuple[int, ...],
    threads: int,
    options: RankOptions,
    station: list[_native.Station],
) -> "Engine | None":
    """Load the slice; then serve, or give the engine."""
    first, last = layers_of(sizes, control.world.rank)
    vocabulary, taps = checkpoint.config.vocab_size, head.taps if head else ()
    words = _native.pass_words(checkpoint.config.hidden_size, len(taps))
    if not control.world.drafts:
        station.append(slices.station(checkpoint, first, last, options.link_delay, taps))
        serve(groups, control, station[0], words, slices.bytes, partial(grammars_of, checkpoint), slices.blocks)
        return None

    from ..engine import Engine
    from ..models.tokenizer import load_tokenizer
    from .backend import RanksBackend

    tokenizer = load_tokenizer(checkpoint.folder, vocabulary)
    drafter = slices.drafter(checkpoint, head, last)
    info = head.info if head else None
    backend = RanksBackend(groups, control, drafter, slices, info, sizes, vocabulary, words, threads)
    backend.open()
    return Engine(checkpoint, tokenizer, backend, options.model)


def leave(engine: "Engine | None", status: int) -> NoReturn:
    """The end of a rank's process. Threads that wait for messages would hold up Python's own way out."""
    if engine is not None and engine.learner:
        engine.learner.close()
    close = getattr(engine.backend, "close", None) if engine is not None else None
    if close:
        close()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            try:
                stream.flush()
            except OSError:  # nobody reads any more
                status = status or 1
    os._exit(status)


def _open(world: World, options: RankOptions) -> tuple[Checkpoint, HeadFile | None, CpuSlices, int]:
    """What this rank is about to run. Raises PpsdError where it cannot."""
    threads, cores = cores_of(world.local_rank, world.local_size, options.threads)
    checkpoint = Checkpoint(Path(resolve_model(options.model)))
    scaling = checkpoint.config.rope_scaling
    if scaling is not None and scaling.by_length:
        raise PpsdError(f"ranks cannot run this model: its rotation depends on the length of the text ({scaling.kind})")
    formats = format_for(checkpoint, options.dtype), options.kv_dtype
    slices = CpuSlices(formats, threads, cores, world.local_size, options.kv_memory)
    found = find_head(options.exit_head, checkpoint)
    head = found if found is not None and found.drafts else None
    if options.sizes:
        check_sizes(options.sizes, world.size, checkpoint.config.num_hidden_layers, head)
    return checkpoint, head, slices, threads


def _facts(
    world: World, checkpoint: Checkpoint, head: HeadFile | None, slices: CpuSlices, options: RankOptions
) -> dict[str, str]:
    """What all ranks must agree on."""
    return {
        "version": __version__,
        "wire": str(_native.WIRE_VERSION),
        "WORLD_SIZE": str(world.size),
        "model": checkpoint.hash,
        "exit head": head_hash(head) if head else "",
        "format": slices.dtype,
        "KV cache": options.kv_dtype,
        "schedule": options.schedule,
        "stages": ",".join(map(str, options.sizes)) if options.sizes else "auto",
        "link delay": f"{options.link_delay:g} s",
        "kind of device": "any" if options.sizes else _native.isa(),
    }


def head_hash(head: HeadFile) -> str:
    digest = hashlib.sha256(f"{head.info.kind} {head.info.exit_layer}".encode())
    if isinstance(head, Eagle3File):  # whose settings are beside its tensors
        digest.update(repr(head.eagle).encode())
    for name, tensor in sorted(head.tensors.items()):
        digest.update(name.encode() + tensor.tobytes())
    if head.draft_ids is not None:
        digest.update(head.draft_ids.tobytes())
    return f"{head.info.kind} after layer {head.info.exit_layer}, {digest.hexdigest()[:16]}"
