"""Two streams on a virtual GPU: what one kernel acquires, the next one of its stream sees too. Prints what was wrong.

The writer releases and does not end before the reader has read. LIBRARY, and "relaxed" for an acquire that is none.
"""

import sys
import threading
from pathlib import Path

import ppsd_rt.errors  # noqa: F401  before the folder tests/ppsd_rt can be taken for it

sys.path.append(str(Path(__file__).parents[1]))
from virtual_gpu.device import install

gpu = install(Path(sys.argv[1]), 90)

import torch  # noqa: E402  after the GPU, as what follows
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit
def writer(data, flag, end):
    tl.store(data, 7)
    tl.debug_barrier()
    tl.atomic_xchg(flag, 1, sem="release")
    while tl.atomic_cas(end, 1, 1, sem="relaxed") == 0:
        pass


@triton.jit
def acquirer(flag, SEM: tl.constexpr):
    while tl.atomic_cas(flag, 1, 1, sem=SEM) == 0:
        pass


@triton.jit
def reader(data, out, end):
    tl.store(out, tl.load(data))
    tl.debug_barrier()
    tl.atomic_xchg(end, 1, sem="relaxed")


SEM = "relaxed" if sys.argv[2:] else "acquire"


def pair(seed: int) -> int:
    data, flag, end, out = (torch.zeros(1, dtype=torch.int32) for _ in range(4))
    gpu.set(seed)
    other = threading.Thread(target=lambda: writer[(1,)](data, flag, end, num_warps=1))
    other.start()
    acquirer[(1,)](flag, SEM=SEM, num_warps=1)
    reader[(1,)](data, out, end, num_warps=1)
    other.join()
    return int(out)


words = [torch.zeros(1, dtype=torch.int32) for _ in range(4)]
for kernel, arguments, named in (
    (writer, words[:3], {}),
    (acquirer, words[:1], {"SEM": SEM}),
    (reader, words[:3], {}),
):
    kernel.warmup(*arguments, **named, grid=(1,), num_warps=1)  # compiled by one thread
for seed in range(8):
    found = pair(seed)
    if gpu.first_race or gpu.fault or found != 7:
        print(gpu.fault or gpu.first_race or f"read {found}")
        break
