"""Timelines in the trace-event format that Perfetto (ui.perfetto.dev) and chrome://tracing show.

One process per answer, one thread per stage. Work that a verdict made void is named `dropped ...`.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import UsageError

Span = tuple[str, int, int, float, float]  # name, track, rows, begin, end (microseconds), as Backend.spans gives them

_COLOURS = {  # names of Chrome's palette; Perfetto goes by the span's name
    "prompt": "thread_state_iowait",
    "draft": "thread_state_runnable",
    "verify": "thread_state_running",
    "wait": "grey",
    "dropped draft": "bad",
    "dropped verify": "terrible",
}


def track_name(track: int) -> str:
    return "draft" if track == 0 else f"verify {track}"


def trace_events(spans: Iterable[Span], process: int = 0, title: str = "", offset: float = 0.0) -> list[dict[str, Any]]:
    """The events of one answer; `offset` is where on the time axis (microseconds) it begins."""
    spans = sorted(spans, key=lambda span: (span[1], span[3]))
    events: list[dict[str, Any]] = [_metadata("process_name", process, 0, name=title or f"answer {process + 1}")]
    for track in sorted({span[1] for span in spans}):
        events.append(_metadata("thread_name", process, track, name=track_name(track)))
        events.append(_metadata("thread_sort_index", process, track, sort_index=track))
    for name, track, rows, begin, end in spans:
        event = {"name": name, "cat": "stage", "ph": "X", "pid": process, "tid": track}
        event |= {"ts": offset + begin, "dur": max(end - begin, 0.0), "args": {"rows": rows}}
        if name in _COLOURS:
            event["cname"] = _COLOURS[name]
        events.append(event)
    return events


def _metadata(what: str, process: int, track: int, **args: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": track, "args": args}


class TraceFile:
    """A file of several answers, one behind the other in time; opened at once, so that a bad path is told early."""

    def __init__(self, path: str | Path) -> None:
        try:
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed in __exit__)
        except OSError as error:
            raise UsageError(f"cannot write the trace to {path}: {error.strerror}") from None
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
        with self._file as file:
            json.dump({"traceEvents": self._events, "displayTimeUnit": "ms"}, file)
            file.write("\n")
