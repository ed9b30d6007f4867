"""A virtual GPU for one process: Triton's own compiler and launcher on a CUDA driver that executes PTX on the CPU.

`install` has to come before anything imports Triton's kernels. Device memory is the host's, so tensors stay CPU
tensors; what decides by a tensor's device is told here that there is a GPU. Several devices, and torch's own kernels on
a GPU, are not part of it.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class VirtualGpu:
    def __init__(self, library: Path, sm: int) -> None:
        self.sm = sm
        self.driver = driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        driver.virtual_gpu_argument.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        driver.virtual_gpu_end_capture.restype = ctypes.c_void_p
        driver.virtual_gpu_set.argtypes = [ctypes.c_uint64, ctypes.c_int, ctypes.c_int]
        for count in (driver.virtual_gpu_instructions, driver.virtual_gpu_races):
            count.restype = ctypes.c_uint64
        for line in (driver.virtual_gpu_fault, driver.virtual_gpu_first_race, driver.fake_cuda_misuse):
            line.restype = ctypes.c_char_p
        self.set()

    def set(self, seed: int = 0, *, audits: bool = True, adversary: bool = True) -> None:
        """The orders of everything from now on. Neither audits nor an adversary: fast, one CTA after the other."""
        self.driver.virtual_gpu_set(seed, audits, adversary)

    def forget(self) -> None:
        """Memory is somebody else's from now on: what kernels have written there no longer counts."""
        self.driver.virtual_gpu_forget()

    @property
    def instructions(self) -> int:
        """Of warps, so far."""
        return int(self.driver.virtual_gpu_instructions())

    @property
    def races(self) -> int:
        """Reads since `set` that might have seen an older value."""
        return int(self.driver.virtual_gpu_races())

    @property
    def first_race(self) -> str:
        return bytes(self.driver.virtual_gpu_first_race()).decode()

    @property
    def fault(self) -> str:
        """What a kernel did wrong first, or nothing."""
        return bytes(self.driver.virtual_gpu_fault() or self.driver.fake_cuda_misuse()).decode()

    def forgive(self) -> None:
        self.driver.virtual_gpu_forgive()
        self.driver.fake_cuda_repair()

    def record(self, step: Callable[[], None]) -> int:
        """What the step launches, as a graph for the carrier."""
        self.driver.virtual_gpu_begin_capture()
        try:
            step()
        finally:
            graph = self.driver.virtual_gpu_end_capture()
        return int(graph)


def install(library: Path, sm: int, mutate: Callable[[str], str] = str) -> VirtualGpu:
    """A GPU of compute capability `sm` / 10. mutate: changes the PTX of every kernel before it is loaded."""
    os.environ["PPSD_CUDA_DRIVER"] = str(library)
    os.environ.pop("TRITON_INTERPRET", None)
    gpu = VirtualGpu(library, sm)

    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    knobs.nvidia.libcuda_path = str(library.parent)

    class Driver(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_device_capability = lambda device=0: divmod(sm, 10)
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        for value in (*args, *named.values()):
            if isinstance(value, torch.Tensor):
                extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
                size = extent * value.itemsize if value.numel() else 0
                gpu.driver.virtual_gpu_argument(value.data_ptr(), size)
        return launched(kernel, *args, grid=grid, warmup=warmup, **named)

    launched = JITFunction.run
    JITFunction.run = run
    # PTX is what the driver loads, as a real one would: ptxas has no part in it. Nor in the cache.
    CUDABackend.make_cubin = lambda self, ptx, *options: ptx.encode() + b"\0"
    CUDABackend.hash = lambda self: f"virtual-gpu {self.target.arch}"
    driver.set_active(Driver())
    load = driver.active.utils.load_binary
    driver.active.utils.load_binary = lambda name, ptx, shared, device: load(
        name, mutate(ptx[:-1].decode()).encode() + b"\0", shared, device
    )
    _backend_believes(gpu)
    return gpu


def _backend_believes(gpu: VirtualGpu) -> None:
    """The cuda backend takes the CPU for a GPU whose launches can be captured."""
    from ppsd_rt.cuda import backend, errors, graphs, weights

    started = backend.CudaBackend.__init__

    def start(self: Any, checkpoint: Any, dtype: str, *args: Any, **options: Any) -> None:
        started(self, checkpoint, "bfloat16" if dtype == "auto" else dtype, *args, **options)
        self._alone.eager = errors.switch("PPSD_CUDA_EAGER")
        gpu.forget()  # its weights may be where an earlier engine's kernels have written

    # A GPU's memory begins at multiples of 16, and kernels are compiled for that; a mapped file's tensors do not.
    mapped = weights._mapped
    weights._mapped = lambda tensors: lambda name: mapped(tensors)(name).clone()
    graphs.Graphs.warm_up = lambda *_: None
    graphs.Graphs.record = lambda graphs, step, *_: gpu.record(step)
    backend.CudaBackend.__init__ = start
    errors.pick_device = lambda name: torch.device("cpu")
    errors.launches_dependently = lambda devices: gpu.sm >= 90 and not errors.switch("PPSD_NO_PDL")
