"""Shapes: what a JSON schema says of a value, without references and alternatives, and how shapes go together."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from . import ecma_regex as ecma
from .json_numbers import Numbers, exact

TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
_MOST = 256  # shapes of one value
MOST_RULES = 20_000


@dataclass(frozen=True)
class At:
    """A schema and the JSON pointer to it, by which it is known."""

    schema: Any = field(compare=False)
    place: str

    def down(self, *steps: object) -> "At":
        schema = self.schema
        for step in steps:
            schema = schema[step]
        return At(schema, self.place + "".join("/" + _escaped(step) for step in steps))


def _escaped(step: object) -> str:
    return str(step).replace("~", "~0").replace("/", "~1")


Lives = Callable[[str], bool]  # is there any text that this expression of a terminal allows?
All = tuple[At, ...]  # schemas that hold together; none: any value


@dataclass(frozen=True)
class Shape:
    """values: these alone; barred: but these. Lengths, items and members are from `least` to `most`.

    others, items: None where nothing was said, which `unevaluated...` may say. matching: patterns of names.
    hits: schemas that so many items are to fit.
    """

    types: frozenset[str] = TYPES
    values: tuple[Any, ...] | None = None
    barred: tuple[Any, ...] = ()
    numbers: Numbers = field(default_factory=Numbers)
    length: tuple[int, int | None] = (0, None)
    patterns: tuple[tuple[Any, bool], ...] = ()  # parsed; are they not to be found?
    first: tuple[All, ...] = ()
    items: All | None = None
    count: tuple[int, int | None] = (0, None)
    unique: str = ""  # the place that says so
    hits: tuple[tuple[All, int, str], ...] = ()
    named: tuple[tuple[str, All], ...] = ()
    required: tuple[str, ...] = ()
    others: All | None = None
    matching: tuple[tuple[str, All], ...] = ()
    names: All = ()
    members: tuple[int, int | None] = (0, None)
    place: str = field(default="", compare=False)

    @cached_property
    def by_name(self) -> dict[str, All]:
        return dict(self.named)


ANY = Shape()


class Shapes(ABC):
    """Of one schema; `shapes`, which reads it, is the subclass's."""

    def __init__(self, lives: Lives) -> None:
        self._lives = lives
        self._unheld: dict[str, str] = {}
        self._possible: dict[All, bool] = {}
        self._parsed: dict[tuple[str, bool], Any] = {}  # patterns, or why they are not held
        self._living: dict[str, bool] = {}
        self.dead = ""  # a place whose strings cannot be

    @abstractmethod
    def shapes(self, schemas: All) -> list[Shape]:
        """All ways to fit these schemas."""

    def parsed(self, pattern: str, wide: bool) -> Any:
        """As `ecma_regex.parse`; it can be written as a terminal. Unheld."""
        if (pattern, wide) not in self._parsed:
            try:
                found = ecma.parse(pattern, wide)
                ecma.terminal(found)
            except ecma.Unheld as error:
                found = error
            self._parsed[pattern, wide] = found
        found = self._parsed[pattern, wide]
        if isinstance(found, ecma.Unheld):
            raise found
        return found

    def unheld(self, place: str, why: str) -> None:
        self._unheld.setdefault(place, why)

    def _meet(self, some: list[Shape], others: list[Shape], place: str) -> list[Shape]:
        if len(some) * len(others) > _MOST * 16:
            raise ValueError(f"{place or 'the root'} has too many combinations")
        if others == [ANY]:
            return some
        if some == [ANY]:
            return others
        found = [made for a in some for b in others if (made := self._both(a, b)) is not None]
        if all(shape.values is None and not shape.barred for shape in found):
            found = list(dict.fromkeys(found))
        if len(found) > _MOST:
            raise ValueError(f"{place or 'the root'} has too many combinations")
        return found

    def _both(self, a: Shape, b: Shape) -> Shape | None:
        types = a.types & b.types
        if ("integer" in a.types and "number" in b.types) or ("integer" in b.types and "number" in a.types):
            types |= {"integer"}
        values = a.values if b.values is None else b.values
        if a.values is not None and b.values is not None:
            values = tuple(one for one in a.values if any(same(one, other) for other in b.values))
        if not types or values == ():
            return None
        first = tuple(
            joined(*((s.first[n] if n < len(s.first) else s.items or ()) for s in (a, b)))
            for n in range(max(len(a.first), len(b.first)))
        )
        names = [name for name, _ in a.named] + [name for name, _ in b.named if name not in a.by_name]
        return Shape(
            types=types,
            values=values,
            barred=a.barred + b.barred,
            numbers=a.numbers.both(b.numbers),
            length=narrower(a.length, b.length),
            patterns=tuple(dict.fromkeys(a.patterns + b.patterns)),
            first=first,
            items=said(a.items, b.items),
            count=narrower(a.count, b.count),
            unique=a.unique or b.unique,
            hits=a.hits + tuple(one for one in b.hits if one not in a.hits),
            named=tuple((name, joined(self._member(a, name), self._member(b, name))) for name in names),
            required=tuple(dict.fromkeys(a.required + b.required)),
            others=said(a.others, b.others),
            matching=self._matching(a, b),
            names=joined(a.names, b.names),
            members=narrower(a.members, b.members),
            place=a.place or b.place,
        )

    def _matching(self, a: Shape, b: Shape) -> tuple[tuple[str, All], ...]:
        """What one shape says of the names that the other's patterns match."""
        made: dict[str, All] = {}
        for one, other in ((a, b), (b, a)):
            theirs = dict(other.matching)
            for pattern, schemas in one.matching:
                more = theirs.get(pattern)
                if more is None:
                    more = other.others or ()
                    if theirs and more:
                        self.unheld(schemas[0].place, "other patterns, and additionalProperties, hold beside it")
                made[pattern] = joined(made.get(pattern, ()), schemas, more)
        return tuple(made.items())

    def _member(self, shape: Shape, name: str) -> All:
        """What the value under a name is to fit."""
        matched = [s for pattern, s in shape.matching if ecma.matcher(self.parsed(pattern, True)).search(name)]
        if name not in shape.by_name and not matched:
            return shape.others or ()
        return joined(shape.by_name.get(name, ()), *matched)

    def _apart(self, a: Shape, b: Shape, depth: int) -> bool:
        """Is there certainly no value that fits both?"""
        both = self._both(a, b)
        return both is None or not any(self._open(both, kind, depth) for kind in both.types)

    def _open(self, shape: Shape, kind: str, depth: int) -> bool:
        """May there be a value of this type?"""
        if shape.values is not None:
            return any(self._fits(one, shape) for one in shape.values)
        if kind in ("integer", "number"):
            return replace(shape.numbers, integer=shape.numbers.integer or kind == "integer").any()
        if kind == "string":
            alive = some(shape.length) and (not shape.patterns or self._alive(self._string(shape)))
            self.dead = self.dead if alive else shape.place or "/"
            return alive
        if kind == "array":
            return some(shape.count)
        if kind != "object" or not some(shape.members):
            return kind != "object"
        return not depth or all(
            any(
                self._open(one, inner, depth - 1)
                for one in self.shapes(self._member(shape, name))
                for inner in one.types
            )
            for name in shape.required
        )

    def _alive(self, terminal: str) -> bool:
        if terminal not in self._living:
            self._living[terminal] = self._lives(terminal)
        return self._living[terminal]

    def _fits(self, value: Any, shape: Shape) -> bool:
        kind = type_of(value)
        whole = kind == "number" and "integer" in shape.types and exact(value).denominator == 1
        if not (kind in shape.types or whole) or any(same(value, one) for one in shape.barred):
            return False
        if shape.values is not None and not any(same(value, one) for one in shape.values):
            return False
        rest = shape.items or ()
        if kind == "array":
            return (
                within(len(value), shape.count)
                and all(self._is(one, shape.first[n] if n < len(shape.first) else rest) for n, one in enumerate(value))
                and all(sum(self._is(one, wanted) for one in value) >= least for wanted, least, _ in shape.hits)
                and not (shape.unique and any(same(a, b) for n, a in enumerate(value) for b in value[:n]))
            )
        if kind == "object":
            return (
                within(len(value), shape.members)
                and all(name in value for name in shape.required)
                and all(self._is(name, shape.names) for name in value)
                and all(self._is(one, self._member(shape, name)) for name, one in value.items())
            )
        if kind == "string":
            found = all((ecma.matcher(parsed).search(value) is None) == wrong for parsed, wrong in shape.patterns)
            return found and within(len(value), shape.length)
        return kind != "number" or shape.numbers.fits(value)

    def _is(self, value: Any, schemas: All) -> bool:
        return any(self._fits(value, shape) for shape in self.shapes(schemas))

    # --- which values there are at all ---

    def possible(self, schemas: All) -> bool:
        """Does any value, which ends, fit? Of a schema that contains itself: the least answer that is right."""
        if schemas not in self._possible:
            reached: dict[All, list[Shape]] = {}
            waiting = [schemas]
            while waiting:
                one = waiting.pop()
                if one not in reached and one not in self._possible:
                    if len(reached) > MOST_RULES:
                        raise ValueError("it is too large")
                    reached[one] = self.shapes(one)
                    waiting += [inner for shape in reached[one] for inner in self._inner(shape)]
            known = {one for one, answer in self._possible.items() if answer}
            grown = -1
            while grown != len(known):
                grown = len(known)
                known |= {one for one, shapes in reached.items() if any(self._exists(s, known) for s in shapes)}
            self._possible |= {one: one in known for one in reached}
        return self._possible[schemas]

    def _inner(self, shape: Shape) -> Iterator[All]:
        if shape.values is not None:
            return
        if "array" in shape.types:
            yield from shape.first
            yield shape.items or ()
            yield from (joined(shape.items or (), wanted) for wanted, _, _ in shape.hits)
        if "object" in shape.types:
            yield from (self._member(shape, name) for name in dict.fromkeys([*shape.by_name, *shape.required]))
            yield from (wanted for _, wanted in shape.matching)
            yield shape.others or ()

    def _exists(self, shape: Shape, known: set[All]) -> bool:
        return any(self._open(shape, kind, 0) and self._filled(shape, kind, known) for kind in shape.types)

    def _filled(self, shape: Shape, kind: str, known: set[All]) -> bool:
        """Is there all that a value of this type needs inside? known: what there is."""
        if shape.values is not None:
            return True
        if kind == "array":
            rest, least = shape.items or (), shape.count[0]
            wanted = [*shape.first[:least], *([rest] if least > len(shape.first) else [])]
            wanted += [joined(rest, one) for one, _, _ in shape.hits]
            few = self._few(rest) if shape.unique and least > len(shape.first) else None
            return all(one in known for one in wanted) and (few is None or least <= len(few) + len(shape.first))
        if kind == "object":
            least, most = shape.members
            good = {
                name
                for name in (*shape.by_name, *shape.required)
                if self._member(shape, name) in known and self._is(name, shape.names)
            }
            more = any(one in known for one in (shape.others or (), *(one for _, one in shape.matching)))
            return (
                all(name in good for name in shape.required)
                and (more or least <= len(good))
                and (most is None or len(shape.required) <= most)
            )
        return True

    def _string(self, shape: Shape) -> str:
        """An expression of a terminal."""
        least, most = shape.length
        times = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        parts = [f'/"{ecma.CHARACTER}{times}"/']
        if shape.patterns and not least and most is None and not all(wrong for _, wrong in shape.patterns):
            parts = []
        parts += [("~" if wrong else "") + f"({ecma.terminal(parsed)})" for parsed, wrong in shape.patterns]
        if barred := [ecma.quote(ecma.quote(one)) for one in shape.barred if isinstance(one, str)]:
            parts.append(f"~({' | '.join(barred)})")
        return " & ".join(parts)

    def _few(self, schemas: All) -> list[Any] | None:
        """All values of a schema, where it lists them."""
        found: list[Any] = []
        for shape in self.shapes(schemas):
            values = shape.values
            if values is None and shape.types <= {"null", "boolean"}:
                values = (None, False, True)
            if values is None:
                return None
            found += [v for v in values if self._fits(v, shape) and not any(same(v, other) for other in found)]
        return found if len(found) <= 60 else None


def joined(*several: All) -> All:
    return tuple(dict.fromkeys(one for each in several for one in each))


def said(a: All | None, b: All | None) -> All | None:
    return b if a is None else a if b is None else joined(a, b)


def narrower(a: tuple[int, int | None], b: tuple[int, int | None]) -> tuple[int, int | None]:
    most = [one[1] for one in (a, b) if one[1] is not None]
    return max(a[0], b[0]), min(most) if most else None


def some(span: tuple[int, int | None]) -> bool:
    return span[1] is None or span[0] <= span[1]


def within(count: int, span: tuple[int, int | None]) -> bool:
    return span[0] <= count and (span[1] is None or count <= span[1])


def type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def same(a: Any, b: Any) -> bool:
    """As JSON Schema compares: 1 is 1.0, and no boolean."""
    if type_of(a) != type_of(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(one, b[name]) for name, one in a.items())
    return bool(a == b)
