"""A measurement as it is printed: as a table for people, as Markdown or CSV, or as JSON with everything in it.

Tables, Markdown and CSV are rows alone. In JSON the last line is one object: the summary.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..printable import printable
from .spread import Spread

Row = Mapping[str, Any]  # plain values, and `Spread`s


@dataclass(frozen=True)
class Column:
    """What a table shows of a row: `key`, under `title`, with `digits` after the point; `percent`: times 100."""

    key: str
    title: str
    digits: int = 0
    percent: bool = False

    def text(self, row: Row) -> str:
        """`12.3 ±4%` for a spread, where the share is half the range; `-` for what was not measured."""
        value = row.get(self.key)
        if value is None:
            return "-"
        if isinstance(value, Spread):
            return f"{self._number(value.median)} ±{50 * value.range:.0f}%"
        return self._number(value) if isinstance(value, float) else str(value)

    def _number(self, value: float) -> str:
        return f"{100 * value:.{self.digits}f}%" if self.percent else f"{value:.{self.digits}f}"


def columns(**titles: str) -> tuple[Column, ...]:
    """By key: `title`, `title|digits` or `title|digits%`."""
    parts = ((key, *text.partition("|")) for key, text in titles.items())
    return tuple(Column(key, title, int(how.rstrip("%") or 0), "%" in how) for key, title, _, how in parts)


def medians(row: Row, keys: Iterable[str] | None = None) -> dict[str, Any]:
    """A line of the summary: what was measured of these keys, or of all; of spreads the median."""
    plain = {key: value.median if isinstance(value, Spread) else value for key, value in row.items()}
    return {key: plain[key] for key in keys or plain if plain.get(key) is not None}


@dataclass(frozen=True)
class Report:
    """facts: of the run as a whole (machine, versions, command, bandwidth). summary: the few figures that matter."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    facts: Mapping[str, Any]
    summary: Mapping[str, Any] = field(default_factory=dict)

    def lines(self, format: str) -> str:
        """As text; `table` is rich's and is printed by the command."""
        if format in ("csv", "md"):
            return (self._csv() if format == "csv" else self._markdown()).removesuffix("\n")
        if format == "jsonl":
            return "".join(_json(row) + "\n" for row in self.rows) + self.summary_line()
        return _json({**self.facts, **self.summary, "rows": self.rows})

    def summary_line(self) -> str:
        return _json({**self.facts, **self.summary})

    def cells(self) -> list[list[str]]:
        return [[printable(column.text(row)) for column in self.columns] for row in self.rows]

    def _markdown(self) -> str:
        """The first column to the left, the others to the right."""
        head = "| " + " | ".join(column.title for column in self.columns) + " |\n"
        rule = "| --- |" + " ---: |" * (len(self.columns) - 1) + "\n"
        rows = "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n" for cells in self.cells())
        return head + rule + rows

    def _csv(self) -> str:
        """Every figure; a spread has four columns. The samples are in `json` and `jsonl`."""
        flat = [_flat(row) for row in self.rows]
        keys = dict.fromkeys(key for row in flat for key in row)
        text = io.StringIO()
        writer = csv.DictWriter(text, list(keys), lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return text.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Spread):
            flat.update({f"{key}_{part}": getattr(value, part) for part in ("median", "least", "most", "range")})
        else:
            flat[key] = value
    return flat


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=Spread.as_dict)
