"""Which rank this process is, by the environment that torchrun gives it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True)
class World:
    """rank of `size` ranks; local: the same among the ranks of this host. Rank 0 drafts and has the scheduler."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def drafts(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> int:
        return self.size - 1


def find_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """None: this process was started by itself."""
    if int(environment.get("WORLD_SIZE", "1")) < 2:
        return None
    try:
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        local = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
        return World(rank, size, *local)
    except (KeyError, ValueError):
        raise UsageError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but RANK is not a number: start ranks with torchrun"
        ) from None
