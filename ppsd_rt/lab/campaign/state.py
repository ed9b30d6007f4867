"""What a campaign has done so far: a file with a line for the campaign and one for every case."""

import hashlib
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ... import _native
from ...errors import PpsdError, UsageError
from . import draw
from .run import Outcome


def build_id() -> str:
    """Of the C++ extension and of what draws the cases: with others, a case is another one."""
    digest = hashlib.sha256(Path(_native.__file__).read_bytes())
    digest.update(Path(draw.__file__).read_bytes())
    return digest.hexdigest()[:12]


class State:
    """Opened with what the campaign is; UsageError where the file holds another campaign, PpsdError where it cannot be
    read or written. What a killed process has left half written is dropped.
    """

    def __init__(self, path: Path, campaign: dict[str, Any]) -> None:
        self._path = path
        self.outcomes: dict[int, Outcome] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            whole = [line for line in lines if line.endswith("\n")]
            if whole:
                self._read(whole, campaign)
            kept = "".join(whole) or json.dumps(campaign) + "\n"
            if kept != "".join(lines):
                path.write_text(kept, encoding="utf-8")
        except OSError as error:
            raise PpsdError(f"cannot keep the campaign's state in {path}: {error.strerror}") from None

    def _read(self, lines: list[str], campaign: dict[str, Any]) -> None:
        try:
            found, *cases = map(json.loads, lines)
            outcomes = [Outcome(**case) for case in cases]
            other = {key for key in {*campaign, *found} if campaign.get(key) != found.get(key)}
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{self._path} does not hold a campaign's state ({error}); name another --state") from None
        if other:
            key = min(other)
            raise UsageError(
                f"{self._path} holds another campaign ({key} {found.get(key)}, not {campaign.get(key)}); name another "
                "--state or remove it"
            )
        self.outcomes = {outcome.case: outcome for outcome in outcomes}

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.case] = outcome
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
        except OSError as error:
            raise PpsdError(f"cannot keep the campaign's state in {self._path}: {error.strerror}") from None

    @property
    def tokens(self) -> int:
        return sum(outcome.tokens for outcome in self.outcomes.values())

    @property
    def next(self) -> int:
        return max(self.outcomes, default=-1) + 1

    def total(self) -> dict[str, Any]:
        """All cases together, as plain values."""
        outcomes = self.outcomes.values()
        by: dict[str, dict[str, list[int]]] = {}
        passes: Counter[str] = Counter()
        for outcome in outcomes:
            passes.update(outcome.passes)
            for dimension, values in outcome.tally.items():
                for value, counts in values.items():
                    sums = by.setdefault(dimension, {}).setdefault(value, [0, 0, 0])
                    sums[:] = map(sum, zip(sums, counts, strict=True))
        names = "answers", "tokens", "differences"
        return {
            "cases": len(self.outcomes),
            "answers": sum(outcome.answers for outcome in outcomes),
            "tokens": self.tokens,
            "plain_tokens": sum(outcome.plain_tokens for outcome in outcomes),
            "seconds": sum(outcome.seconds for outcome in outcomes),
            "by": {
                dimension: {value: dict(zip(names, by[dimension][value], strict=True)) for value in _ordered(values)}
                for dimension, values in by.items()
            },
            "passes": dict(sorted(passes.items(), key=lambda item: tuple(map(int, item[0].split("/"))))),
            "differences": [difference for outcome in outcomes for difference in outcome.differences],
        }


def _ordered(values: dict[str, list[int]]) -> list[str]:
    """By the number that they begin with, or by the alphabet."""

    def place(value: str) -> tuple[int, str]:
        number = value.split()[0]
        return (int(number), value) if number.isdecimal() else (-1, value)

    return sorted(values, key=place)
