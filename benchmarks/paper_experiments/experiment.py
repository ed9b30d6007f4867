"""What papers.py wants to know of an experiment, and what experiments share."""

import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Parts = Mapping[str, Callable[[], Any]]  # what each part measures, as JSON has it
Found = Mapping[str, Any]  # what the parts came to
Each = TypeVar("Each")
DRAWS = 2000  # of `interval`


@dataclass(frozen=True)
class Experiment:
    """parts(quick): measured one by one, and kept one by one, so that a run that is ended goes on where it was.

    table: Markdown. docs/papers.md has the claims that it stands beside.
    """

    name: str
    parts: Callable[[bool], Parts]
    table: Callable[[Found], str]


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table. left: so many columns are text, and the others numbers."""
    marks = ["---" if place < left else "---:" for place in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, marks, *rows))


def interval(each: Sequence[Each], figure: Callable[[Sequence[Each]], float]) -> str:
    """The figure of all, and 95 % of the figures of as many drawn with replacement: of other prompts (bootstrap)."""
    draw = random.Random(1)
    drawn = sorted(figure(draw.choices(each, k=len(each))) for _ in range(DRAWS))
    return f"{figure(each):.2f} ({drawn[DRAWS // 40]:.2f} to {drawn[-DRAWS // 40 - 1]:.2f})"


class NotGiven(SystemExit):
    """One line that says what to set."""


def given(variable: str, what: str) -> Path:
    """A file or folder that an experiment needs and nobody may ship with it: its place, by an environment variable."""
    place = os.environ.get(variable, "")
    if not place or not Path(place).exists():
        raise NotGiven(f"papers.py: set {variable} to {what}" + (f": {place} is not there" if place else ""))
    return Path(place)
