"""A schedule is data: how drafting and verification take turns."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ..arguments import whole_number
from ..errors import UsageError
from ..printable import quoted
from .stop_rules import FixedLength, Paying, StopRule, Survival, describe_stop_rule, parse_stop_rule

MAX_ROWS = 16  # the most rows that one verification pass takes: a chunk and the row of the last committed token
MAX_CHUNK = MAX_ROWS - 1
LOOKUP = 3  # tokens that must match for `auto` to copy what followed
MOST_LOOKUP = 8  # longer matches are preferred anyway
MOST_LOOKAHEAD = 1024  # drafts so far ahead are never all right
_MOST_DIGITS = 9
_LENGTHS = ("first_chunk", "max_chunk", "lookahead")
_NUMBERS = (*_LENGTHS, "lookup")


@dataclass(frozen=True)
class Schedule:
    """One point of the schedule space.

    first_chunk: draft tokens to wait for after a restart before verification begins.
    max_chunk:   the most draft tokens that one verification pass takes.
    lookahead:   how many draft tokens there may be beyond the committed text; 0 is plain decoding.
    overlap:     may drafting go on while verification runs?
    stop_rule:   when to stop drafting earlier than that.
    lookup:      where the last so many tokens or more have stood in the text before, the one that followed them is
                 drafted (copied) and the exit head is not asked; 0: never. With lookahead 0 copies are the only drafts,
                 and no exit head is needed.
    recycle:     likewise what followed in other prompts and answers of the engine, and in this text after fewer tokens.

    The row of the last committed token, when it is not verified yet, rides along with the chunk: a pass over k draft
    tokens has k + 1 rows and, if all are accepted, commits k + 1 tokens.
    """

    first_chunk: int
    max_chunk: int
    lookahead: int
    overlap: bool = False
    stop_rule: StopRule = field(default_factory=FixedLength)
    lookup: int = 0
    recycle: bool = False

    def __post_init__(self) -> None:
        for name in _NUMBERS:
            object.__setattr__(self, name, whole_number(name, getattr(self, name)))
        _check_lookup(self.lookup)
        if not 0 <= self.max_chunk <= MAX_CHUNK:
            raise UsageError(f"max_chunk must be from 0 to {MAX_CHUNK}, not {quoted(self.max_chunk)}")
        if not 0 <= self.first_chunk <= self.max_chunk:
            raise UsageError(
                f"first_chunk must be from 0 to max_chunk ({self.max_chunk}), not {quoted(self.first_chunk)}"
            )
        if not 0 <= self.lookahead <= MOST_LOOKAHEAD:
            raise UsageError(f"lookahead must be from 0 to {MOST_LOOKAHEAD}, not {quoted(self.lookahead)}")
        drafts = self.lookahead > 0 or self.copies
        if self.lookahead < self.first_chunk or drafts != (self.max_chunk > 0):
            raise UsageError(
                f"lookahead {self.lookahead} does not fit first_chunk {self.first_chunk} and max_chunk {self.max_chunk}"
                + (f" with lookup {self.lookup}" if self.lookup else "")
            )

    @property
    def drafts(self) -> bool:
        """Is the exit head asked?"""
        return self.lookahead > 0

    @property
    def copies(self) -> bool:
        """Are there drafts that it is not asked for?"""
        return self.lookup > 0 or self.recycle


@dataclass(frozen=True)
class Auto:
    """Not a point of the space: the backend measures what they cost and moves between them while it decodes.

    lookup, recycle: of those schedules, where the backend can copy.
    """

    lookup: int = LOOKUP
    recycle: bool = True
    drafts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookup", whole_number("lookup", self.lookup))
        _check_lookup(self.lookup)

    @property
    def copies(self) -> bool:
        """As of Schedule."""
        return self.lookup > 0 or self.recycle


def _check_lookup(lookup: int) -> None:
    if not 0 <= lookup <= MOST_LOOKUP:
        raise UsageError(f"lookup must be from 0 (no copies) to {MOST_LOOKUP} tokens, not {quoted(lookup)}")


AUTO = Auto()
PLAIN = Schedule(0, 0, 0)

_NAMED = {
    # No draft tokens: one pass a token.
    "plain": PLAIN,
    # EESD: draft, then verify. `eesd:stop_rule=beta` has its Thompson sampling, reconstructed: slower (docs/papers.md).
    "eesd": Schedule(first_chunk=6, max_chunk=6, lookahead=6, overlap=False, stop_rule=Paying()),
    # PPSD: every token goes on to verification by itself while the next is drafted.
    "ppsd": Schedule(first_chunk=0, max_chunk=1, lookahead=MAX_CHUNK, overlap=True),
    # Ours: drafting never waits, and a free verification stage takes all that is pending.
    "elastic": Schedule(first_chunk=2, max_chunk=8, lookahead=MAX_CHUNK, overlap=True),
    # Copies alone (prompt lookup decoding).
    "lookup": Schedule(first_chunk=0, max_chunk=7, lookahead=0, stop_rule=Survival(), lookup=LOOKUP),
    # And what usually follows: what `auto` is without an exit head.
    "recycle": Schedule(first_chunk=0, max_chunk=7, lookahead=0, stop_rule=Survival(), lookup=LOOKUP, recycle=True),
}
NAMES = ("auto", *_NAMED)


def copying(schedule: Auto) -> Schedule:
    """What `auto` is without an exit head: drafts that need none, or plain decoding."""
    if not schedule.copies:
        return PLAIN
    return replace(_NAMED["recycle"], lookup=schedule.lookup, recycle=schedule.recycle)


def named(name: str) -> Schedule:
    """One of the fixed schedules."""
    if name not in _NAMED:
        raise UsageError(f"schedule {quoted(name)} is unknown; schedules are {', '.join(NAMES)}")
    return _NAMED[name]


def parse_schedule(text: str) -> Schedule | Auto:
    """`auto`, `NAME` or `NAME:key=value,...`, as in `eesd:max_chunk=4,first_chunk=4,stop_rule=confidence=0.5`.

    `auto` takes `lookup=N` and `recycle=on|off` alone. `length=K` sets first_chunk, max_chunk and lookahead at once.
    """
    name, _, rest = text.partition(":")
    schedule = AUTO if name == "auto" else named(name)
    changes: dict[str, object] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if schedule is AUTO and key not in ("lookup", "recycle"):
            problem = "auto takes lookup=N, recycle=on|off and nothing else, as in auto:lookup=0"
            raise UsageError(f"schedule {quoted(text)}: {problem}")
        change = _change(key, value)
        if not change:
            raise UsageError(
                f"schedule {quoted(text)}: {quoted(item)} is not understood; write length=, first_chunk=, max_chunk=, "
                "lookahead=, lookup= with a number, overlap=on|off, recycle=on|off, or stop_rule=RULE"
            )
        changes |= change
    return replace(schedule, **changes)  # type: ignore[arg-type]


def _change(key: str, value: str) -> dict[str, object]:
    """The fields that this sets; none where it is not understood."""
    if key == "stop_rule" and value:
        return {key: parse_stop_rule(value)}
    if key in ("overlap", "recycle") and value in ("on", "off"):
        return {key: value == "on"}
    if key in ("length", *_NUMBERS) and (number := _number(value)) is not None:
        return dict.fromkeys(_LENGTHS if key == "length" else (key,), number)
    return {}


def _number(text: str) -> int | None:
    """None where there are other characters than digits."""
    if not (text.isascii() and text.isdecimal()):
        return None
    if len(text) > _MOST_DIGITS:
        raise UsageError(f"schedule: the number {quoted(text)} is too large")
    return int(text)


def describe(schedule: Schedule | Auto) -> str:
    """The text that `parse_schedule` turns back into this schedule; what reports show."""
    if isinstance(schedule, Auto):
        changed = [f"lookup={schedule.lookup}"] if schedule.lookup != AUTO.lookup else []
        changed += [] if schedule.recycle else ["recycle=off"]
        return ":".join(filter(None, ["auto", ",".join(changed)]))
    for name, known in _NAMED.items():
        if schedule == known:
            return name
    base = "elastic" if schedule.overlap else "eesd"
    keys = _NUMBERS if schedule.lookup else _LENGTHS
    numbers = ",".join(f"{key}={getattr(schedule, key)}" for key in keys)
    numbers += ",recycle=on" if schedule.recycle else ""
    return f"{base}:{numbers},stop_rule={describe_stop_rule(schedule.stop_rule)}"
