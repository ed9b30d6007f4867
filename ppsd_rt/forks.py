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


def hears_of_forks(backend: Forks) -> None:
    _living.add(backend)


def _forked() -> None:
    for backend in _living:
        backend.forked()


os.register_at_fork(after_in_child=_forked)
