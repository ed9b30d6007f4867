"""The other ranks of one host, as children of rank 0."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from ..printable import printable
from ..processes import OWN
from .world import World

_GRACE = 5.0  # seconds to end in, once all is over


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


def start(count: int, argv: Sequence[str]) -> tuple[World, list[Child]]:
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
