"""What a machine must have for the CUDA backend, and the one line that says what is missing."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from .. import _native
from ..errors import PpsdError, UsageError
from ..extras import need
from ..models.config import LlamaConfig, model_shapes

LEAST_SM = (8, 0)  # bfloat16 matrix instructions and asynchronous copies
FP8_SM = (8, 9)
# A weight, and its share of a block's scale.
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + 2 / 32, "int4": 0.5 + 4 / 32, "fp8": 1.0}


def interpreted() -> bool:
    """Does Triton interpret kernels on the CPU? It reads this as it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def check_triton() -> None:
    need("triton", "cuda", "the cuda backend")


def pick_device(name: str) -> torch.device:
    """The device that the kernels are to run on; PpsdError where they cannot."""
    check_triton()
    if name == "cpu" or (name == "auto" and interpreted()):
        if not interpreted():
            raise UsageError("the cuda backend runs on a GPU, not on the CPU; use --backend cpu")
        return torch.device("cpu")  # Triton's interpreter: for tests
    device = torch.device("cuda" if name == "auto" else name)
    ordinal = device.index or 0
    try:
        gpu = _native.cuda_device(ordinal)
    except _native.CudaError as error:
        raise PpsdError(f"{error}; use --backend cpu") from None
    if (gpu.major, gpu.minor) < LEAST_SM:
        raise PpsdError(
            f"{gpu.name} (sm_{gpu.major}{gpu.minor}) is too old for the cuda backend, which needs sm_80 or newer; "
            "use --backend torch"
        )
    if not torch.backends.cuda.is_built():
        raise PpsdError("this torch was built without CUDA: install one that has it, or use --backend cpu")
    if not torch.cuda.is_available():
        raise PpsdError(
            "torch cannot use the GPU that the driver sees; `python -c 'import torch; torch.cuda.init()'` says why"
        )
    return torch.device("cuda", ordinal)


def check_format(dtype: str, devices: Sequence[torch.device]) -> None:
    """Raises PpsdError where a GPU has no float8."""
    for device in devices if dtype == "fp8" else ():
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_SM:
            sm = "{}{}".format(*torch.cuda.get_device_capability(device))
            name = torch.cuda.get_device_name(device)
            raise PpsdError(f"{name} (sm_{sm}) is too old for fp8, which needs sm_89 or newer; use --dtype int8")


def pick_devices(names: str) -> list[torch.device]:
    """Of `cuda:0,cuda:1`: each as it is named, the one that drafts first."""
    if "," not in names:
        return [pick_device(names)]
    if interpreted() and all(name.startswith("cpu") for name in names.split(",")):
        return [torch.device(name) for name in names.split(",")]  # for tests
    return [pick_device(name) for name in names.split(",")]


def launches_dependently(devices: Sequence[torch.device]) -> bool:
    """Programmatic dependent launches, from Hopper on."""
    capable = all(d.type == "cuda" and torch.cuda.get_device_capability(d) >= (9, 0) for d in devices)
    return capable and not switch("PPSD_NO_PDL")


def switch(name: str) -> bool:
    """Of the environment."""
    return os.environ.get(name, "0") not in ("", "0")


def unusable(name: str) -> str | None:
    """Why `pick_device` would refuse, or None: for `--backend auto`."""
    try:
        pick_device(name)
    except PpsdError as error:
        return str(error)
    return None


def weight_bytes(config: LlamaConfig, dtype: str, layers: int, *, first: bool = True, last: bool = True) -> int:
    """About what so many of a model's layers take, with the embedding on the first of several devices and the LM head
    on the last one."""
    shapes = model_shapes(replace(config, num_hidden_layers=layers))
    shapes["lm_head.weight"] = table = shapes.pop("model.embed_tokens.weight")
    embedding = table[0] * table[1] * (4 if dtype == "float32" else 2)  # read row by row, and never packed
    if not last or (first and config.tie_word_embeddings and dtype in ("float32", "bfloat16")):
        del shapes["lm_head.weight"]
    matrices = ((name, shape) for name, shape in shapes.items() if len(shape) == 2)
    return int(first * embedding + sum(_matrix_bytes(name, shape, dtype) for name, shape in matrices))


def _matrix_bytes(name: str, shape: tuple[int, ...], dtype: str) -> float:
    if dtype == "int4" and any(part in name for part in ("k_proj", "v_proj", "lm_head")):
        dtype = "int8"
    groups = 128 if dtype == "int4" else 1  # of inputs, which end with zeros
    scale = 4 if dtype == "fp8" else 0  # of an output
    return shape[0] * (-(-shape[1] // groups) * groups * _BYTES[dtype] + scale)


def check_same_kind(devices: Sequence[torch.device], sizes: Sequence[int]) -> None:
    """What GPUs of different kinds round differently would make the text depend on measurements: the user decides."""
    kinds = {torch.cuda.get_device_name(device) for device in devices if device.type == "cuda"}
    if len(kinds) > 1:
        raise UsageError(
            f"GPUs of different kinds ({', '.join(sorted(kinds))}) may round differently, and the answer's bits would "
            f"depend on the split: give it, as measured now --stages {','.join(map(str, sizes))}"
        )


def check_memory(
    config: LlamaConfig, dtype: str, devices: Sequence[torch.device], sizes: Sequence[int]
) -> dict[torch.device, int]:
    """Before minutes of loading: do the weights fit, so many layers on each? -> How many bytes each device needs."""
    needed = dict.fromkeys(devices, 0)
    for part, (device, layers) in enumerate(zip(devices, sizes, strict=True)):
        needed[device] += weight_bytes(config, dtype, layers, first=part == 0, last=part == len(sizes) - 1)
    for device, bytes in needed.items() if devices[0].type == "cuda" else ():
        free, total = torch.cuda.mem_get_info(device)
        if bytes > free:
            layers = sum(size for other, size in zip(devices, sizes, strict=True) if other == device)
            what, remedy = f"{layers} layers as {dtype} on {device}", f"change --stages, or {smaller(dtype)}"
            if len(sizes) == 1:
                what, remedy = f"the weights as {dtype}", smaller(dtype)
            raise PpsdError(no_memory(what, bytes, free, total, remedy))
    return needed


def no_memory(what: str, needed: int, free: int, total: int, remedy: str) -> str:
    return (
        f"{what}: {needed / 2**30:.1f} GiB are needed, but of the GPU's {total / 2**30:.1f} GiB only "
        f"{free / 2**30:.1f} are free; {remedy}"
    )


@contextmanager
def out_of_memory(what: str, needed: dict[torch.device, int], dtype: str) -> Iterator[None]:
    """Turns torch's error into a line that says how much was needed: bytes, on each device."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        memory = {device: torch.cuda.mem_get_info(device) for device in needed}
        device = max(memory, key=lambda device: needed[device] - memory[device][0])
        what = f"{what} on {device}" if len(memory) > 1 else what
        raise PpsdError(no_memory(what, needed[device], *memory[device], smaller(dtype))) from None


def smaller(dtype: str) -> str:
    less = {"int8": "--dtype int4 or ", "fp8": "--dtype int4 or ", "int4": ""}.get(dtype, "--dtype int8 or ")
    return f"use {less}--backend cpu"
