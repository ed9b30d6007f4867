"""A timeline as text: one line for each stage, one column for each slice of time.

    draft    |1==1==1==1xx
    verify 1 |   1==2=====

A digit begins a piece of work and says how many rows it takes (a letter from 10 on), `=` goes on with it, `x` says that
a verdict made it void before its end, a blank is a stage that waits. The line `tokens` says how many tokens a verdict
committed, at the moment of its arrival; `!` after it: it rejected a draft.
"""

from collections.abc import Iterable, Sequence

from ...trace import Span, track_name

LEGEND = (
    "a digit begins a piece of work and counts its rows, = goes on, x: dropped, blank: waits; "
    "tokens: committed by a verdict, !: which rejected a draft"
)
_COUNTS = "0123456789abcdefghijklmnopqrstuvwxyz"
_LEAST = 3  # columns of the shortest piece of work


def column_seconds(spans: Iterable[Span]) -> float:
    """Seconds of a column, such that the shortest piece of work that was not cut short has room."""
    lengths = [end - begin for name, _, _, begin, end in spans if not name.startswith("dropped")]
    return min((length for length in lengths if length > 0), default=1e6) / _LEAST / 1e6


def draw(
    spans: Sequence[Span], verdicts: Iterable[tuple[float, int, bool]], column: float, columns: int, stages: int
) -> list[str]:
    """The lines of the first `columns` columns of `column` seconds each.

    verdicts: (seconds, tokens committed, did it reject a draft).
    """
    lines = [[" "] * columns for _ in range(stages)]
    for name, track, rows, begin, end in spans:
        first, last = (min(round(at / 1e6 / column), columns + 1) for at in (begin, end))  # +1: still open at the edge
        dropped, count = name.startswith("dropped"), _COUNTS[min(rows, len(_COUNTS) - 1)]
        text = count + ("x" if dropped else "=") * (last - first - 1)
        _put(lines[track], first, "x" * (last - first) if dropped and last - first < 2 else text[: last - first])
    landed = [" "] * columns
    for seconds, tokens, rejected in verdicts:
        _put(landed, round(seconds / column), _COUNTS[min(tokens, len(_COUNTS) - 1)] + "!" * rejected)
    names = [track_name(track) for track in range(stages)] + ["tokens"]
    width = max(map(len, names))
    return [f"{name:<{width}} |{''.join(line).rstrip()}" for name, line in zip(names, [*lines, landed], strict=True)]


def _put(line: list[str], at: int, text: str) -> None:
    for place, character in enumerate(text, at):
        if place < len(line):
            line[place] = character
