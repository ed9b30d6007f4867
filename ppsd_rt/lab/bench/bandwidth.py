"""The memory bandwidth of this machine, measured beside what it limits."""

from collections.abc import Sequence

from ... import _native
from .spread import Spread

MEGABYTES = 256  # more than any cache that a laptop or a share of a server has


class Bandwidth:
    """GB/s of reading memory with each number of threads; measured once per repeat, like every other case."""

    def __init__(self, threads: Sequence[int]) -> None:
        """One thread is always measured too: it says what a second one brings."""
        self.threads = sorted({1, *threads})
        self._samples: dict[int, list[float]] = {count: [] for count in self.threads}

    def measure(self, threads: int) -> None:
        """The best of the passes over the memory that the extension makes."""
        self._samples[threads].append(_native.read_bandwidth(threads, MEGABYTES))

    def __getitem__(self, threads: int) -> Spread | None:
        """None where an interrupted run has not come to it."""
        samples = self._samples[threads]
        return Spread(tuple(samples)) if samples else None

    def as_dict(self) -> dict[str, object]:
        measured = {threads: self[threads] for threads in self.threads}
        return {str(threads): spread.as_dict() for threads, spread in measured.items() if spread}
