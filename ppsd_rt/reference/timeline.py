"""What the stages of the reference backend did when: the same spans that the C++ pipelines record."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from ..pipeline.rounds import Drafted, Round

DRAFT, VERIFY = 0, 1  # tracks


class Timeline:
    """Records spans (name, track, rows, begin, end), in microseconds since it was made."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int, float, float]] = []
        self._origin = perf_counter()

    @contextmanager
    def span(self, name: str, track: int, rows: int) -> Iterator[None]:
        begin = self._now()
        try:
            yield
        finally:
            self.spans.append((name, track, rows, begin, self._now()))

    def mark(self, event: Round | Drafted) -> None:
        """The moment of an event: a span without length, see `ppsd_rt.trace.MARKS`."""
        now = self._now()
        if isinstance(event, Round):
            name = "roll back" if event.corrected else "commit"
            self.spans.append((name, VERIFY, len(event.committed), now, now))
        else:
            self.spans.append(("drafted", DRAFT, 1, now, now))

    def _now(self) -> float:
        return (perf_counter() - self._origin) * 1e6
