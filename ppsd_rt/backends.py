"""Which backends there are, and which one a model gets on this machine."""

import logging
import os
import re
from collections.abc import Sequence

from .arguments import whole_number
from .backend import Backend
from .cpu.formats import refuses
from .errors import UsageError
from .extras import is_there, need
from .models.checkpoint import Checkpoint
from .printable import quoted

NAMES = ("auto", "cpu", "cuda", "torch")
_LOG = logging.getLogger(__name__)


def make_backend(
    name: str,
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    threads: int | None,
    stages: int | Sequence[int] = 1,
    kv_dtype: str = "auto",
    kv_memory: int | str | None = None,
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
    if kv_dtype != "auto" and name != "cpu":
        raise UsageError(f"the {name} backend has the KV cache in the model's dtype; kv_dtype needs --backend cpu")
    if name == "cuda":
        from .cuda.errors import check_triton

        check_triton()  # before the modules that cannot be imported without it
        from .cuda.backend import CudaBackend

        return CudaBackend(checkpoint, dtype, device, threads, stages, kv_memory)
    if name == "torch":
        from .reference.backend import TorchBackend

        if stages != 1:
            raise UsageError("the torch backend verifies in one stage; --stages needs --backend cpu or cuda")
        return TorchBackend(checkpoint, dtype, device, threads, kv_memory)
    from .cpu.backend import CpuBackend

    return CpuBackend(checkpoint, dtype, device, threads, stages, kv_dtype, kv_memory)


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
    if device.startswith("cuda") or _sees_a_gpu(device):
        if dtype in ("auto", "bfloat16", "int8", "int4", "fp8") and refuses(checkpoint.config) is None:
            from .cuda.errors import unusable

            if not unusable(device):
                return "cuda"
        if dtype == "fp8":
            return "cuda"  # it says what is missing
        if dtype != "int4" or device != "auto":
            return "torch"
    if (reason := refuses(checkpoint.config)) is not None:
        need("torch", "torch", f"the cpu backend cannot run this model ({reason}), and the torch backend")
        return "torch"
    return "torch" if dtype == "float16" else "cpu"


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
    if not is_there("torch"):
        _LOG.info('a GPU is there, but its backend needs torch: pip install "ppsd-rt[cuda]"; the cpu backend runs')
        return False
    import torch

    return torch.cuda.is_available()
