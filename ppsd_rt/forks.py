"""What a fork does to a backend: threads stay behind, and a GPU's context cannot be used."""

import os
from typing import Protocol
from weakref import WeakSet

NO_GPU_AFTER_FORK = "a GPU cannot be used after a fork: load the model in the new process, and start that by spawn"


class Forks(Protocol):
    def forked(self) -> None:
        """Called in the new process after a fork, before anything else there: no thread but this one came along, and
        what others were changing, or had locked, stays as it was.
        """


_living: WeakSet[Forks] = WeakSet()
_count = 0


def forks() -> int:
    """How many have led to this process: another number says that what remembers it is another process's."""
    return _count


def hears_of_forks(backend: Forks) -> None:
    _living.add(backend)


def _forked() -> None:
    global _count
    _count += 1
    for backend in _living:
        backend.forked()


os.register_at_fork(after_in_child=_forked)
