"""What an engine asks of a backend, and which backends there are."""

import os
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from .arguments import whole_number
from .errors import PpsdError, UsageError
from .models.checkpoint import Checkpoint
from .models.head_file import HeadFile, HeadInfo
from .printable import quoted
from .protocol import Drafted, Limits, Round
from .sampling import SamplingParams
from .schedule import Auto, Schedule

NAMES = ("auto", "cpu", "cuda", "torch")
NO_GPU_AFTER_FORK = "a GPU cannot be used after a fork: load the model in the new process, and start that by spawn"


@dataclass(frozen=True)
class Oracle:
    """For benchmarks: drafts that are right with probability `acceptance`, whatever the head says.

    truth: the ids of the whole text, prompt included, as plain decoding gives it. The work of drafting is done all the
    same, so schedules can be measured at any acceptance.
    """

    truth: tuple[int, ...]
    acceptance: float
    seed: int = 0


@dataclass(frozen=True)
class RunOptions:
    """What to do besides decoding: report draft tokens as they are drawn, record a timeline, draft by an oracle."""

    report_drafts: bool = False
    trace: bool = False
    oracle: Oracle | None = None


class Cancellation:
    """How an answer in the making is told to end, by any thread."""

    def __init__(self) -> None:
        self.asked = False
        self._tell: Callable[[], None] | None = None

    def ask(self) -> None:
        self.asked = True
        if self._tell is not None:
            self._tell()

    def tells(self, cancel: Callable[[], None]) -> None:
        """Call `cancel` when it is asked for, in the thread that asks; or now, if that has been."""
        self._tell = cancel
        if self.asked:
            cancel()


class Backend(Protocol):
    """One model, one exit head or none, one answer at a time: beginning another one ends the one before."""

    @property
    def name(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def copies(self) -> bool:
        """Can drafts be copied (`lookup` of the schedules)?"""

    @property
    def siblings(self) -> bool:
        """Can drafts have siblings (`siblings` of the schedules)?"""

    @property
    def head(self) -> HeadInfo | None: ...
    def use_head(self, file: HeadFile | None) -> None: ...
    def rounds(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        limits: Limits,
        options: RunOptions,
        cancellation: Cancellation,
    ) -> Generator[Round | Drafted, None, None]:
        """Decode one answer. What takes longer than a round is told of the cancellation; the caller looks at it between
        rounds, and closes the generator.
        """

    def explain(self) -> str:
        """What `auto` expects of every schedule, and what it has measured; empty when it has not been used."""

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        """[last, vocabulary]: the model's logits behind each of the `last` ids, as plain decoding computes them.

        UsageError: an id that the model does not have, or fewer than `last` of them.
        """

    def bytes_per_token(self, context: int) -> int:
        """What a plain step must read with `context` rows in the KV cache: all weights once, and the cache."""

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        """The timeline of the last answer: (name, track, rows, begin, end) in microseconds; empty without `trace`."""

    def facts(self) -> dict[str, Any]:
        """What `ppsd-run info` should say of it."""


def kv_dtype_of(backend: Backend) -> str:
    """What it keeps keys and values as."""
    return str(backend.facts().get("kv_dtype", backend.dtype))


def make_backend(
    name: str,
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    threads: int | None,
    stages: int | Sequence[int] = 1,
    head_dtype: str = "auto",
    kv_dtype: str = "auto",
) -> Backend:
    """`auto`: the C++ backend on a CPU; on a GPU the Triton kernels where they can run, else torch, which also does
    what the others cannot.

    stages: how many verification stages there are, or the layers at which verification is cut into them; with several
    devices, how many layers each of them has (1: as is best).
    """
    if name not in NAMES:
        raise UsageError(f"backend {quoted(name)} is unknown; backends are {', '.join(NAMES)}")
    check_machine(device, threads)
    threads = None if threads is None else whole_number("threads", threads)
    several = "," in device
    if name == "auto":
        name = "cuda" if several else _pick(checkpoint, dtype, device)
    if several and name != "cuda":
        raise UsageError(f"the {name} backend runs on one device; several need --backend cuda")
    if head_dtype != "auto" and name != "cpu":
        raise UsageError(f"the {name} backend has the exit head in the model's dtype; head_dtype needs --backend cpu")
    if kv_dtype != "auto" and name != "cpu":
        raise UsageError(f"the {name} backend has the KV cache in the model's dtype; kv_dtype needs --backend cpu")
    if name == "cuda":
        from .cuda.errors import import_backend

        return import_backend()(checkpoint, dtype, device, threads, stages)
    if name == "torch":
        from .reference.backend import TorchBackend

        if stages != 1:
            raise UsageError("the torch backend verifies in one stage; --stages needs --backend cpu or cuda")
        return TorchBackend(checkpoint, dtype, device, threads)
    from .cpu_backend import CpuBackend

    return CpuBackend(checkpoint, dtype, device, threads, stages, head_dtype, kv_dtype)


def check_machine(device: str, threads: int | None) -> None:
    number = "(0|[1-9][0-9]?)"  # torch takes cuda:128 for cuda:-128, and refuses cuda:00
    gpu, cpu = f"cuda(:{number})?", f"cpu:{number}"
    known = f"auto|cpu|{gpu}(,{gpu})*|{cpu}(,{cpu})+"
    if not isinstance(device, str) or not re.fullmatch(known, device):
        raise UsageError(
            f"device {quoted(device)} is unknown; write auto, cpu, cuda, cuda:N or cuda:N,cuda:M, with N from 0 to 99"
        )
    if threads is not None and not 1 <= whole_number("threads", threads) <= most_threads():
        raise UsageError(f"threads must be from 1 to {most_threads()} on this machine, not {quoted(threads)}")


def most_threads() -> int:
    """Far more than help: several for each core, which is what tests and comparisons may want."""
    return max(64, 2 * (os.cpu_count() or 1))


def _pick(checkpoint: Checkpoint, dtype: str, device: str) -> str:
    from .cpu_backend import refuses

    if dtype == "int4" and not device.startswith("cuda"):
        return "cpu"
    if device.startswith("cuda") or _sees_a_gpu(device):
        if dtype not in ("auto", "bfloat16", "int8") or refuses(checkpoint.config) is not None:
            return "torch"
        from .cuda.errors import unusable

        return "torch" if unusable(device) else "cuda"
    return "torch" if dtype == "float16" or refuses(checkpoint.config) is not None else "cpu"


def _sees_a_gpu(device: str) -> bool:
    """Without importing torch, which takes longer than loading a model, where the driver sees none."""
    if device != "auto":
        return False
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return False
    import torch

    return torch.cuda.is_available()


def check_ids(ids: Sequence[int], last: int, vocab_size: int) -> None:
    """What every backend asks of `logits`."""
    if not 1 <= last <= len(ids):
        raise UsageError(f"of {len(ids)} ids there are logits behind 1 to {len(ids)}, not behind {last}")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise UsageError(f"token ids are 0 to {vocab_size - 1}")


def one_at_a_time(current: bool, cancellation: Cancellation) -> None:
    """What every backend says when an answer goes on that another one has ended."""
    if not current and not cancellation.asked:
        raise PpsdError("this generation was ended: another one has begun on the same engine")


class Forks(Protocol):
    def forked(self) -> None:
        """Called in the new process after a fork, before anything else there: no thread but this one came along, and
        what others were changing, or had locked, stays as it was.
        """


_living: WeakSet[Forks] = WeakSet()


def hears_of_forks(backend: Forks) -> None:
    _living.add(backend)


def _forked() -> None:
    for backend in _living:
        backend.forked()


os.register_at_fork(after_in_child=_forked)
