"""What a front has learned, on an engine that decodes for it: text to copy from, and a head between two answers."""

import hashlib
import logging
from collections.abc import Callable
from threading import Lock
from typing import Any

from ..engine import Engine
from ..errors import PpsdError
from .wire import head_from

_LOG = logging.getLogger(__name__)


class Learned:
    """hash: of the head that a front has told of last, by `hash_of`; empty: the one that the engine began with."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.hash = engine, ""
        self._lock, self._running = Lock(), 0
        self._next: tuple[Any, ...] | None = None  # comes into use when nothing runs

    def recall(self, ids: list[int], owner: int) -> None:
        backend: Any = self._engine.backend
        if hasattr(backend, "recall"):  # torch and cuda have none
            backend.recall(ids, owner)

    def use(self, hash: str, text: Callable[[], str]) -> None:
        """The head of this hash, unless it is in use. text: gives it as `head_text` does."""
        backend: Any = self._engine.backend
        with self._lock:
            if hash == self.hash or not hasattr(backend, "swap_head"):
                return
            self.hash = hash
        try:
            file = head_from(text(), self._engine.checkpoint)
            file.info.check_swap(backend.head)
            packed = file, backend.pack_head(file)
        except PpsdError as error:
            _LOG.warning("the head that the front has learned is not used: %s", error)
            return
        with self._lock:
            if hash == self.hash:  # else a newer one has come meanwhile
                self._next = packed
        self._swap()

    def begins(self) -> None:
        """An answer, before it asks anything of the backend."""
        with self._lock:
            self._running += 1

    def ended(self) -> None:
        with self._lock:
            self._running -= 1
        self._swap()

    def _swap(self) -> None:
        backend: Any = self._engine.backend
        with self._lock:
            if self._next and not self._running:
                backend.swap_head(*self._next)
                self._next = None


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
