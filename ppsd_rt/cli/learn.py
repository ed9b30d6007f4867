"""`ppsd-run learn`: what was kept with --learn, a better head from it, and the way back."""

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from ..errors import PpsdError, UsageError
from ..extras import need
from ..learning.heads import LearnedHeads
from ..learning.kept import MOST_BYTES, Lock, bytes_of, forget, read_days, read_model, read_records
from ..models.checkpoint import Checkpoint
from ..models.resolve import resolve_model
from ..models.tokenizer import load_tokenizer
from ..printable import printable
from .common import may_delete
from .notes import note, quiet

DAYS = 14  # that are shown


def run(args: argparse.Namespace) -> int:
    folder = Path(args.folder)
    if args.yes and not args.forget:
        raise UsageError("--yes goes with --forget")
    if args.forget:
        what = (
            f"what is kept of {Path(read_model(folder)['name']).name} in {folder}, with the heads that learned from it"
        )
        if not may_delete(what, args.yes):
            return 1
        print(printable(f"deleted {forget(folder) / 1e6:.1f} MB from {folder}"))
        return 0
    if args.status:
        for line in _status(folder):
            print(printable(line))
        return 0
    told, checkpoint, heads = _open(folder)
    if args.back:
        print(printable(f"the head in use is now {heads.back()}"))
        return 0
    heads.enough()  # before torch is loaded, which takes seconds
    if args.background is not None:
        _recede(args.background)
    need("torch", "torch", "learning")
    with closing(Lock(folder, ".training.lock", "learns from")):
        _train(args, folder, told, checkpoint, heads)
    return 0


def _status(folder: Path) -> Iterator[str]:
    """What is kept and what it has brought."""
    _, checkpoint, heads = _open(folder)
    records = [record for record, _ in read_records(folder, checkpoint.config.vocab_size)]
    since = f", the oldest of {time.strftime('%Y-%m-%d', time.gmtime(86400 * records[0].day))}" if records else ""
    size = f"{bytes_of(folder) / 1e6:.1f} of at most {MOST_BYTES / 1e6:.0f} MB"
    answers = f"{len(records):,} answers of {sum(record.tokens for record in records):,} tokens"
    yield f"kept       {answers} in {folder}: {size}{since}"
    state = heads.state
    yield f"head       {state.names[-1] if state.names else 'the one that learning begins with'}"
    for outcome in state.outcomes:
        yield f"learned    {time.strftime('%Y-%m-%d %H:%M', time.localtime(outcome.time))} from {outcome}"
    for day, (judged, right) in [*read_days(folder).items()][-DAYS:]:
        yield f"acceptance {day} {right / judged:.3f}"


def _open(folder: Path) -> tuple[dict[str, str], Checkpoint, LearnedHeads]:
    told = read_model(folder)
    checkpoint = Checkpoint(resolve_model(told["name"]))
    if checkpoint.hash != told["hash"]:
        raise PpsdError(f"{told['name']} has other weights than those whose answers {folder} keeps")
    return told, checkpoint, LearnedHeads(folder, told["head"], checkpoint)


def _recede(parent: int) -> None:
    """Take what nobody else wants of the processor, and end with the process that asked for this."""
    quiet()
    os.nice(19)
    with suppress(AttributeError, OSError):  # Linux alone has these
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, this goes first
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it reaches one that is stopped
    if os.getppid() != parent:
        raise PpsdError("the process that learned in the background has ended")


def _train(
    args: argparse.Namespace, folder: Path, told: dict[str, str], checkpoint: Checkpoint, heads: LearnedHeads
) -> None:
    from ..distill.run import Progress
    from ..learning.train import Learning
    from ..reference.backend import TorchBackend
    from .distill import duration, show

    threads = args.threads or os.cpu_count() or 1
    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.config.vocab_size, checkpoint.gguf)
    model = TorchBackend(checkpoint, "auto", "cpu", threads).model
    learning = Learning(folder, heads, checkpoint, tokenizer, model, told["dtype"], threads)
    if args.background is not None:
        for _ in learning.run():
            pass
        return
    note(f"learning from {folder} takes about {duration(learning.forecast())} on this machine")
    show((Progress(*step) for step in learning.run()), ())
    print(printable(f"learned from {learning.outcome}"))
