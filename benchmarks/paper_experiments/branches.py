"""Would second choices of the head pay in a pipeline? A tree of drafts in flight, in ticks of equal stages.

A tick is what a stage takes for one row. Each tick the draft stage sends one pass of a few rows on its way; a row's
verdict comes when it leaves the last stage. Drafts are a tree: below each row may stand the head's first and second
choice. The verdict keeps what is below the right choice and drops the rest; where the right token is not under way, it
enters the empty pipeline. The text says of each position whether the head's first choice is right and how sure it is.

What it leaves out: links, and that a pass over a tree needs attention along its branches, in every stage.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .experiment import Claim, Experiment, Found, Parts, markdown
from .lengths_replay import Text, made_up

STAGES = (2, 4, 8)
ACCEPTANCE = (0.6, 0.66, 0.7)
SECOND = 0.41  # P(the second choice is right | the first is not): the shipped head's 0.80 after 0.66
ROW_SHARES = (0.02, 0.1)  # what each further row adds to a pass, of the first one's time
LOOKAHEAD = 15  # drafts beyond the newest committed token
TEXTS = {"all alike": 0.0, "varied": 2.5}  # the spread of the drafts' log-odds


@dataclass(frozen=True)
class Policy:
    """rows: of a pass. seconds: are second choices taken. expanded: may drafts follow one before its verdict."""

    rows: int
    seconds: bool = True
    expanded: bool = True


POLICIES = {
    "first choices: `ppsd`": Policy(1, seconds=False),
    "a second in place of a late first": Policy(1),
    "siblings: two rows, no drafts after a second": Policy(2, expanded=False),
    "two rows, a branch in flight": Policy(2),
    "four rows, branches in flight": Policy(4),
}


@dataclass(eq=False)
class Row:
    """A token on trial. place: in the text. right: is it the text's, and all before it. chance: that it is, by the
    head, since the newest verdict. entered: the tick; children: by choice, 0 and 1."""

    place: int
    right: bool
    chance: float
    entered: int
    children: "dict[int, Row]" = field(default_factory=dict)


@dataclass(frozen=True)
class Choices:
    """Of each place: which of the head's choices is right (0, 1, or 2: neither), and what it thinks of both."""

    right: tuple[int, ...]
    chances: tuple[tuple[float, float], ...]


def choices_of(text: Text, second: float = SECOND, seed: int = 0) -> Choices:
    draws = random.Random(seed)
    right = tuple(0 if first else (1 if draws.random() < second else 2) for first in text.right)
    return Choices(right, tuple((first, second * (1 - first)) for first in text.confidence))


def candidates(root: Row, choices: Choices, policy: Policy) -> Iterator[tuple[float, Row, int]]:
    """(chance, the row it follows, choice) of all that may enter now."""
    waiting = [(root, True)]
    while waiting:
        row, first = waiting.pop()
        place = row.place + 1
        if place >= len(choices.right) or place - root.place > LOOKAHEAD:
            continue
        for choice in (0, 1) if policy.seconds else (0,):
            if choice in row.children:
                waiting.append((row.children[choice], choice == 0))
            elif first or policy.expanded:
                yield row.chance * choices.chances[place][choice], row, choice


def speed_up(choices: Choices, stages: int, policy: Policy, row_share: float) -> float:
    """Times plain decoding, in which a token takes a tick in each stage."""
    root = Row(0, True, 1.0, 0)  # the newest committed token
    passes = [0] * stages  # rows under way in each stage, the draft stage first; passes that end are shifted out
    tick, seconds, last = 0, 0.0, len(choices.right) - 1
    passes[0] = 1
    while True:
        # The rows that entered (stages - 1) ticks ago leave the last stage now: is the root's verdict among them?
        seconds += 1 + row_share * (max(passes) - 1)
        if root.entered == tick - stages + 1:
            if root.place == last:
                return (last + 1) * stages / seconds
            root = following(root, choices, tick + 1)
        tick += 1
        entering = 1 if root.entered == tick else 0
        if not entering:
            best = sorted(candidates(root, choices, policy), key=lambda each: -each[0])
            for chance, row, choice in best[: policy.rows]:
                place = row.place + 1
                row.children[choice] = Row(place, row.right and choices.right[place] == choice, chance, tick)
                entering += 1
        passes = under_way(root, tick, stages)


def following(root: Row, choices: Choices, tick: int) -> Row:
    """The next token: what is under way for it, or a row that enters now."""
    row = root.children.get(choices.right[root.place + 1])
    if row is None:
        return Row(root.place + 1, True, 1.0, tick)
    _believed(row, row.chance)
    return row


def _believed(row: Row, by: float) -> None:
    row.chance /= by
    for child in row.children.values():
        _believed(child, by)


def under_way(root: Row, tick: int, stages: int) -> list[int]:
    """Rows in each stage."""
    counts, waiting = [0] * stages, [root]
    while waiting:
        row = waiting.pop()
        if tick - row.entered < stages:
            counts[tick - row.entered] += 1
        waiting += row.children.values()
    return counts


# -- the experiment ----------------------------------------------------------------------------------------------------


def parts(quick: bool) -> Parts:
    length = 5_000 if quick else 50_000
    return {str(stages): partial(measured, stages, length) for stages in STAGES}


def measured(stages: int, length: int) -> list[dict[str, Any]]:
    rows = []
    for acceptance in ACCEPTANCE:
        for name, spread in TEXTS.items():
            text = made_up(length, acceptance, spread, seed=1)
            choices = choices_of(text)
            for share in ROW_SHARES:
                speeds = {policy: speed_up(choices, stages, how, share) for policy, how in POLICIES.items()}
                rows.append({"text": name, "acceptance": text.acceptance, "row_share": share, "speeds": speeds})
    return rows


def table(found: Found) -> str:
    """x plain of `ppsd`; the others by that. All acceptances are in the file, here those of 4 stages."""
    first, *others = POLICIES
    rows = [
        (
            stages,
            case["text"],
            f"{case['acceptance']:.2f}",
            f"{case['row_share']:g}",
            f"{case['speeds'][first]:.2f}",
            *(f"{case['speeds'][name] / case['speeds'][first]:.2f}" for name in others),
        )
        for stages, cases in found.items()
        for case in cases
        if stages == "4" or 0.65 < case["acceptance"] < 0.67
    ]
    return markdown(("stages", "text", "acceptance", "cost of a row", f"{first}, x plain", *others), rows, left=2)


BRANCHES = Experiment(
    "branches",
    (
        Claim("SpecPipe", "abstract", "a tree of drafts fills a pipeline: 4.19x to 5.53x over plain pipelines"),
        Claim("SPD", "tables", "PPSD comes to 1.53x at 4 stages with acceptance near 0.65"),
    ),
    parts,
    table,
)
