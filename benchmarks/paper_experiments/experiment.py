"""What papers.py wants to know of an experiment."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ppsd_rt.lab.bench.plot import Chart

Parts = Mapping[str, Callable[[], Any]]  # what each part measures, as JSON has it
Found = Mapping[str, Any]  # what the parts came to


@dataclass(frozen=True)
class Claim:
    """paper and where in it (section, table); what it says."""

    paper: str
    where: str
    says: str


@dataclass(frozen=True)
class Experiment:
    """parts(quick): measured one by one, and kept one by one, so that a run that is ended goes on where it was.

    table: Markdown. charts: by the names of their files.
    """

    name: str
    claims: Sequence[Claim]
    parts: Callable[[bool], Parts]
    table: Callable[[Found], str]
    charts: Callable[[Found], Mapping[str, Chart]] = lambda found: {}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table. left: so many columns are text, and the others numbers."""
    marks = ["---" if place < left else "---:" for place in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, marks, *rows))
