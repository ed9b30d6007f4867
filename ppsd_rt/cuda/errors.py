"""What a machine must have for the CUDA backend, and the one line that says what is missing."""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from .. import _native
from ..errors import PpsdError, UsageError
from ..models.config import LlamaConfig
from ..models.shapes import model_shapes

if TYPE_CHECKING:
    from .backend import CudaBackend

LEAST_SM = (8, 0)  # bfloat16 matrix instructions and asynchronous copies
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0 + 2 / 32}  # a weight, and its share of a block's scale


def interpreted() -> bool:
    """Does Triton interpret kernels on the CPU? It reads this as it is imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def import_backend() -> "type[CudaBackend]":
    """The backend's class, whose modules cannot be imported without Triton."""
    check_triton()
    from .backend import CudaBackend

    return CudaBackend


def check_triton() -> None:
    if find_spec("triton") is None:
        raise PpsdError("the cuda backend needs Triton, which is not installed: pip install triton, or --backend torch")


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
        gpu, major, minor, _ = _native.cuda_device(ordinal)
    except _native.CudaError as error:
        raise PpsdError(f"{error}; use --backend cpu") from None
    if (major, minor) < LEAST_SM:
        raise PpsdError(
            f"{gpu} (sm_{major}{minor}) is too old for the cuda backend, which needs sm_80 or newer; "
            "use --backend torch"
        )
    if not torch.backends.cuda.is_built():
        raise PpsdError("this torch was built without CUDA: install one that has it, or use --backend cpu")
    if not torch.cuda.is_available():
        raise PpsdError(
            "torch cannot use the GPU that the driver sees; `python -c 'import torch; torch.cuda.init()'` says why"
        )
    return torch.device("cuda", ordinal)


def unusable(name: str) -> str | None:
    """Why `pick_device` would refuse, or None: for `--backend auto`."""
    try:
        pick_device(name)
    except PpsdError as error:
        return str(error)
    return None


def weight_bytes(config: LlamaConfig, dtype: str) -> int:
    """About what a model's weights take on the device."""
    shapes = model_shapes(config)
    table = shapes["model.embed_tokens.weight"]
    embedding = table[0] * table[1] * (4 if dtype == "float32" else 2)  # read row by row, and never packed
    tied = config.tie_word_embeddings
    matrices = sum(
        shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2 and name != "model.embed_tokens.weight"
    )
    if tied and dtype == "int8":
        matrices += table[0] * table[1]
    return int(embedding + matrices * _BYTES[dtype])


def check_memory(config: LlamaConfig, dtype: str, device: torch.device) -> None:
    """Before minutes of loading: do the weights fit?"""
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    needed = weight_bytes(config, dtype)
    if needed > free:
        raise PpsdError(no_memory(f"the weights as {dtype}", needed, free, total, smaller(dtype)))


def no_memory(what: str, needed: int, free: int, total: int, remedy: str) -> str:
    return (
        f"{what}: {needed / 2**30:.1f} GiB are needed, but of the GPU's {total / 2**30:.1f} GiB only "
        f"{free / 2**30:.1f} are free; {remedy}"
    )


def smaller(dtype: str) -> str:
    return "use --backend cpu" if dtype == "int8" else "use --dtype int8 or --backend cpu"
