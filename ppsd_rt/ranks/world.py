"""Which rank this process is, by the environment that torchrun gives it; and other ranks as children of rank 0."""

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..errors import UsageError
from ..printable import printable
from ..processes import OWN

MOST_RANKS = 10_000  # more is a slip of the hand
_GRACE = 5.0  # seconds for a child to end in, once all is over


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


class Child:
    def __init__(self, rank: int, argv: Sequence[str], environment: dict[str, str]) -> None:
        self._rank, self._said = rank, tempfile.TemporaryFile()  # noqa: SIM115 (until `end`)
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            [*OWN, *argv], env=environment, stdin=quiet, stdout=quiet, stderr=self._said, start_new_session=True
        )

    def end(self, told: bool) -> None:
        """told: all has failed, so what this rank has said is shown, unless it is the line that all ranks end with."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._process.kill()  # of no effect where it has ended
        self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").splitlines()
        if told and any(not line.startswith("ppsd-run: ") for line in lines):
            print(*(f"[rank {self._rank}] {printable(line)}" for line in lines), sep="\n", file=sys.stderr)


def start_children(count: int, argv: Sequence[str]) -> tuple[World, list[Child]]:
    """All ranks but 0, with this command line -> the world of rank 0, which is this process."""
    listener = socket.create_server(("127.0.0.1", 0))  # at once: nobody else can take the port
    port = listener.getsockname()[1]
    children = []
    for rank in range(1, count):
        world = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{name: str(value) for name, value in (world | place).items()}}
        children.append(Child(rank, argv, environment))
    return World(0, count, 0, count, "127.0.0.1", port, listening=listener.detach()), children
