"""Timelines in the trace-event format that Perfetto (ui.perfetto.dev) and chrome://tracing show.

One process per answer, one thread per stage. Work that a verdict made void is named `dropped ...`. Moments (a draft
token is there, a verdict lands) are spans without length.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from .files import OutputFile

Span = tuple[str, int, int, float, float]  # name, track, rows, begin, end (microseconds), as Backend.spans gives them

# Moments, one for each event that a pipeline reports, in their order; a draft rejected: "roll back".
MARKS = ("drafted", "commit", "roll back")


@dataclass(frozen=True)
class Occupancy:
    """How well stages overlapped, in seconds.

    wall: from the first piece of work to the end of the last; worked: the sum of all pieces; idle: no piece ran.
    """

    wall: float
    worked: float
    idle: float

    @property
    def overlap_efficiency(self) -> float:
        """1: the stages took turns without a gap between them; more: they overlapped."""
        return self.worked / self.wall if self.wall else 0.0

    def __str__(self) -> str:
        return (
            f"overlap efficiency {self.overlap_efficiency:.3f} (stages' work {1000 * self.worked:.2f} ms in "
            f"{1000 * self.wall:.2f} ms); nothing ran for {100 * self.idle / self.wall if self.wall else 0:.1f} %"
        )


def occupancy(spans: Iterable[Span]) -> Occupancy:
    """Of decoding: the pass over the prompt and what is only waiting do not count."""
    work = sorted((begin, end) for name, _, _, begin, end in spans if name not in ("wait", "prompt") and end > begin)
    busy, until = 0.0, float("-inf")
    for begin, end in work:
        busy += max(0.0, end - max(begin, until))
        until = max(until, end)
    wall = until - work[0][0] if work else 0.0
    return Occupancy(1e-6 * wall, 1e-6 * sum(end - begin for begin, end in work), 1e-6 * (wall - busy))


def trace_events(spans: Iterable[Span], process: int = 0, title: str = "", offset: float = 0.0) -> list[dict[str, Any]]:
    """The events of one answer; `offset` is where on the time axis (microseconds) it begins."""
    spans = sorted(spans, key=lambda span: (span[1], span[3]))
    events: list[dict[str, Any]] = [_metadata("process_name", process, 0, name=title or f"answer {process + 1}")]
    for track in sorted({span[1] for span in spans}):
        events.append(_metadata("thread_name", process, track, name=f"verify {track}" if track else "draft"))
        events.append(_metadata("thread_sort_index", process, track, sort_index=track))
    for name, track, rows, begin, end in spans:
        event = {"name": name, "cat": "stage", "pid": process, "tid": track, "ts": offset + begin}
        if name in MARKS:
            event |= {"ph": "i", "s": "t", "args": {"tokens": rows}}
        else:
            event |= {"ph": "X", "dur": max(end - begin, 0.0), "args": {"rows": rows}}
        events.append(event)
    return events


def _metadata(what: str, process: int, track: int, **args: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": track, "args": args}


class TraceFile:
    """A file of several answers, one after the other in time; tried at once, so that a bad path is told early.

    Leaving the `with` block writes it; an exception leaves a file that was there as it was.
    """

    def __init__(self, path: str | Path, inputs: Iterable[str | Path | None] = ()) -> None:
        """inputs: files that the command reads, which it must not overwrite."""
        self._file = OutputFile(path, "trace", inputs)
        self._events: list[dict[str, Any]] = []
        self._answers, self._end = 0, 0.0

    def add(self, spans: Iterable[Span], title: str = "") -> None:
        spans = list(spans)
        self._events += trace_events(spans, self._answers, title, self._end)
        self._answers += 1
        self._end += max((span[4] for span in spans), default=0.0)

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            trace = {"traceEvents": self._events, "displayTimeUnit": "ms"}
            self._file.finish(json.dumps(trace) + "\n")
