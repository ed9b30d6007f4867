"""Which rank this process is, by the environment that torchrun gives it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import UsageError

MOST_RANKS = 10_000  # more is a slip of the hand


@dataclass(frozen=True)
class World:
    """rank of `size` ranks; local: the same among the ranks of this host. Rank 0 drafts and has the scheduler.

    The ranks meet at host:port. hosted: torchrun's agent listens there; else rank 0 does. listening: by this socket.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str = "127.0.0.1"
    port: int = 29500
    hosted: bool = False
    listening: int | None = None

    @property
    def drafts(self) -> bool:
        return self.rank == 0

    @property
    def last(self) -> int:
        return self.size - 1


def find_world(environment: Mapping[str, str] = os.environ) -> World | None:
    """This process's world; None: it was started by itself. Raises UsageError where the environment makes no sense."""
    size = _number(environment, "WORLD_SIZE", 1, MOST_RANKS, "1")
    if size == 1:
        return None
    rank = _number(environment, "RANK", 0, size - 1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, size, "1")
    local_rank = _number(environment, "LOCAL_RANK", 0, local_size - 1, "0")
    host = environment.get("MASTER_ADDR", "")
    if not re.fullmatch(r"[\w.:%-]{1,253}", host):
        raise UsageError(
            f"MASTER_ADDR is {_shown(environment, 'MASTER_ADDR')}; it is the name or address of rank 0's host: {_MEND}"
        )
    port = _number(environment, "MASTER_PORT", 1, 65535)
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return World(rank, size, local_rank, local_size, host, port, hosted)


_MEND = "start ranks with torchrun, or unset WORLD_SIZE for one process"


def _number(environment: Mapping[str, str], name: str, least: int, most: int, default: str = "") -> int:
    text = environment.get(name, default)
    if not re.fullmatch(r"[0-9]{1,6}", text) or not least <= int(text) <= most:
        raise UsageError(f"{name} is {_shown(environment, name)}; it is a number from {least} to {most}: {_MEND}")
    return int(text)


def _shown(environment: Mapping[str, str], name: str) -> str:
    return ascii(environment[name][:40]) if name in environment else "not set"
