"""What every rank is told when it is started, in the same words."""

from dataclasses import dataclass

from ..errors import UsageError
from ..printable import quoted


@dataclass(frozen=True)
class RankOptions:
    """kv_memory: of each rank, for the KV caches of many answers; None: half of what its host can spare, shared among
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
