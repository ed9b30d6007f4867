"""What every rank is told when it is started, in the same words."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RankOptions:
    """kv_memory: of each rank, for the KV caches of many answers; None: half of what its host can spare, shared among
    its ranks. sizes: layers of each rank; None: as is best. link_delay: seconds that every message is held back on its
    arrival, for experiments on one host. silence: seconds without a sign of life after which a rank counts as lost."""

    model: str = "smollm2-135m"
    exit_head: str = "auto"
    backend: str = "cpu"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    kv_memory: int | str | None = None
    threads: int | None = None
    sizes: tuple[int, ...] | None = None
    schedule: str = "auto"
    link_delay: float = 0.0
    silence: float = 20.0
