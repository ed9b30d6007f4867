"""JSON schemas as rules of llguidance's Lark. Every keyword is held, or named with its place where it cannot be.

llguidance has a compiler of schemas too. It does not say where a keyword stands that it cannot hold, passes some over
in silence, and its numbers have no end. Here a schema becomes shapes, each of which is one rule for each type. What is
written may be narrower than the schema, never wider.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from . import ecma_regex as ecma
from .json_numbers import NoNumber, Numbers, exact
from .json_reader import OPTIONS, Reader
from .json_shapes import ANY, MOST_RULES, All, At, Lives, Shape, joined, same, some, type_of

__all__ = ["OPTIONS", "Rules", "rules"]

_MOST_UNIQUE = 16  # items of an array that must differ and may not, in a schema that is held in part
_MOST_COUNTS = 4000  # rules that count members of one object


@dataclass(frozen=True)
class Rules:
    """lines: of a Lark grammar. start: the rule of the value. unheld: (place, why) of what is not held."""

    lines: list[str]
    start: str
    unheld: list[tuple[str, str]]


def rules(schema: Any, lives: Lives, prefix: str = "") -> Rules:
    """ValueError for what is no schema, allows nothing or everything. prefix: of the rules' names."""
    return _Writer(schema, lives, prefix).made()


class _Writer(Reader):
    def __init__(self, root: Any, lives: Lives, prefix: str) -> None:
        super().__init__(root, lives)
        self._prefix = prefix
        self._bounded, self._compact = not self.options.get("unbounded"), bool(self.options.get("compact"))
        self._rules: dict[All, str] = {}
        self._names: dict[str, str] = {}  # of rules and terminals, by what they are
        self._lines: list[str] = []

    def made(self) -> Rules:
        root = (At(self._root, ""),)
        if any(replace(shape, place="") == ANY for shape in self.shapes(root)):
            raise ValueError("it allows every value: say at least a type")
        if not self.possible(root):
            dead = f": no text fits {self.dead} as a whole" if self.dead else ""
            raise ValueError(f"it allows no answer at all{dead}")
        start, of = self.rule(root), str(self.options.get("of", ""))
        return Rules(self._lines, start, [(of + place, why) for place, why in self._unheld.items()])

    def rule(self, schemas: All) -> str:
        """The name of the rule for a value; there is one."""
        if schemas not in self._rules:
            if len(self._rules) > MOST_RULES:
                raise ValueError("it is too large")
            self._rules[schemas] = name = f"{self._prefix}v{len(self._rules)}"
            bodies = dict.fromkeys(body for shape in self.shapes(schemas) for body in self._bodies(shape))
            if not bodies:
                raise ValueError(f"{schemas[-1].place or 'the root'} allows nothing")
            self._lines.append(f"{name}: {' | '.join(bodies)}")
        return self._rules[schemas]

    def _bodies(self, shape: Shape) -> Iterator[str]:
        if shape.values is not None:
            yield from (self._literal(one) for one in shape.values if self._fits(one, shape))
            return
        for kind in sorted(shape.types):
            if not self._open(shape, kind, 0) or not self._filled(
                shape, kind, {s for s in self._inner(shape) if self.possible(s)}
            ):
                continue
            if kind == "null" and not any(one is None for one in shape.barred):
                yield '"null"'
            elif kind == "boolean":
                yield from (
                    f'"{json.dumps(one)}"' for one in (False, True) if not any(same(one, b) for b in shape.barred)
                )
            elif kind in ("integer", "number"):
                yield from self._number_bodies(shape, kind)
            elif kind == "string":
                yield self._terminal(self._string(shape))
            elif kind == "array":
                yield from self._array(shape)
            elif kind == "object":
                yield from self._object(shape)

    def _named(self, kind: str, body: str) -> str:
        key = f"{kind} {body}"
        if key not in self._names:
            mark = f"{self._prefix}{kind}{len(self._names)}"
            self._names[key] = mark.upper() if kind == "t" else mark
            self._lines.append(f"{self._names[key]}: {body}")
        return self._names[key]

    def _terminal(self, body: str) -> str:
        return self._named("t", body)

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            return ecma.quote(ecma.quote(value))
        if isinstance(value, list):
            return self._in("[]", f" {self._mark(',')} ".join(map(self._literal, value)))
        if isinstance(value, dict):
            pairs = (f"{self._literal(name)} {self._mark(':')} {self._literal(one)}" for name, one in value.items())
            return self._in("{}", f" {self._mark(',')} ".join(pairs))
        return ecma.quote(json.dumps(value))

    def _mark(self, text: str) -> str:
        """A sign of JSON, with the white space around it that models write: a line and its indent, or two spaces."""
        if self._compact:
            return ecma.quote(text + (" " if text in ",:" else ""))
        space = r"[ ]{0,2}(\r?\n[ \t]{0,24})?" if self._bounded else r"[ \t\r\n]*"
        before, after = "" if text in "{[" else space, "" if text in "]}" else space
        return self._terminal(f"/{before}\\{text}{after}/")

    def _in(self, marks: str, body: str) -> str:
        """marks: {} or []."""
        return f"{self._mark(marks[0])} {body} {self._mark(marks[1])}"

    def _number_bodies(self, shape: Shape, kind: str) -> Iterator[str]:
        """Values that are barred cut the line of numbers."""
        parts = [replace(shape.numbers, integer=shape.numbers.integer or kind == "integer")]
        for value in shape.barred:
            if type_of(value) == "number":
                at = exact(value)
                parts = [
                    part
                    for one in parts
                    for part in (one.both(Numbers(most=at, below=True)), one.both(Numbers(least=at, above=True)))
                    if part.any()
                ]
        for part in parts:
            try:
                written = part.written(self._bounded)
            except NoNumber as error:
                self.unheld(f"{shape.place}/multipleOf" if shape.numbers.step else shape.place, str(error))
                written = replace(part, least=None, most=None, step=Fraction(0)).written(self._bounded)
            yield self._named("j", written) if written.startswith("%json") else self._terminal(written)

    def _array(self, shape: Shape) -> Iterator[str]:
        least, most = shape.count
        rest = shape.items or ()
        first = list(shape.first)
        for number, one in enumerate(first):
            if not self.possible(one):
                most = number if most is None else min(most, number)
                break
        if not self.possible(rest):
            most = len(first) if most is None else min(most, len(first))
        if most is not None and least > most:
            return
        comma = self._mark(",")
        if shape.unique and (most is None or most > 1):
            values = self._few(rest)
            if values is not None and not first and not shape.hits:
                yield from (self._in("[]", body) for body in self._different(values, least, most))
                return
            self.unheld(shape.unique, "a grammar does not know what came before: say enum for the items, or maxItems 1")
            most = max(_MOST_UNIQUE, least) if most is None else most
        if shape.hits:
            if len(shape.hits) > 1 or first or most is not None or least > shape.hits[0][1]:
                self.unheld(shape.hits[0][2], "a grammar does not count items beside it")
            else:
                hit, item = self.rule(joined(rest, shape.hits[0][0])), self.rule(rest)
                more = f"({comma} ({item} {comma})* {hit}){{{shape.hits[0][1] - 1}}}" if shape.hits[0][1] > 1 else ""
                yield self._in("[]", f"({item} {comma})* {hit} {more} ({comma} {item})*")
                return
        first = first[:most]
        body = ""
        if most is None or most > len(first):
            item = self.rule(rest)
            low, high = max(0, least - len(first)), None if most is None else most - len(first)
            if first:
                body = _times(f"({comma} {item})", low, high)
            else:
                many = _times(f"({comma} {item})", max(0, low - 1), None if high is None else high - 1)
                body = f"{item} {many}" if low else f"({item} {many})?"
        for number in range(len(first) - 1, -1, -1):
            body = f"{comma if number else ''} {self.rule(first[number])} {body}"
            body = body if number < least else f"({body})?"
        yield self._in("[]", body)

    def _different(self, values: Sequence[Any], least: int, most: int | None) -> Iterator[str]:
        most = len(values) if most is None else min(most, len(values))
        if least > most:
            return
        each = [(number, self._literal(one)) for number, one in enumerate(values)]
        name = f"{self._prefix}u{len(self._lines)}"
        ways = [f'"" %if bit_count_ge(_, {least})']
        ways += [
            f"{self._mark(',')} {text} {name}::set_bit({n}) %if and(bit_clear({n}), bit_count_lt(_, {most}))"
            for n, text in each
        ]
        self._lines.append(f"{name}::_ : " + " | ".join(ways))
        self._lines.append(f"{name}f::_ : " + " | ".join(f"{text} {name}::set_bit({n})" for n, text in each))
        yield f"{name}f::0x0"
        if not least:
            yield ""

    def _object(self, shape: Shape) -> Iterator[str]:
        colon, comma = self._mark(":"), self._mark(",")
        members: list[tuple[str, bool]] = []
        taken = list(dict.fromkeys([*shape.by_name, *shape.required]))
        for name in taken:
            wanted = self._member(shape, name)
            if self.possible(wanted) and self._is(name, shape.names):
                members.append((f"{self._literal(name)} {colon} {self.rule(wanted)}", name in shape.required))
        extra = self._extra(shape, taken)
        least, most = shape.members
        needed = sum(required for _, required in members)
        least = max(least, needed)
        if not extra:
            most = len(members) if most is None or most >= len(members) else most
        if most is not None and least > most:
            return
        if extra and least > needed + 1:
            self.unheld(f"{shape.place}/minProperties", "a name that comes again is counted once")
        top = least if most is None else most
        if extra is None and least == needed and most == len(members):
            top = 1
        top = max(1, top)
        if len(members) * top > _MOST_COUNTS:
            self.unheld(f"{shape.place}/maxProperties", "there are too many ways to count so many members")
            least, most, top = needed, None, 1
        counted = top > 1 or (most is not None and most < len(members)) or (most is not None and extra is not None)
        low, high = (least, most) if counted or least > needed else (0, None)
        after: list[str | None] = [self._rest(extra, comma, count, low, high) for count in range(top + 1)]
        for text, required in reversed(members):
            before: list[str | None] = []
            for count in range(top + 1):
                ways = []
                inner = after[min(count + 1, top)]
                if inner is not None and (high is None or count < high):
                    ways.append(f"{comma if count else ''} {text} {inner}")
                if not required and (skipped := after[count]) is not None:
                    ways.append(skipped or '""')
                if len(ways) == 1 and required:
                    before.append(ways[0])
                else:
                    before.append(self._named("o", " | ".join(ways)) if ways else None)
            after = before
        if after[0] is not None:
            yield self._in("{}", after[0])

    def _rest(self, extra: str | None, comma: str, count: int, low: int, high: int | None) -> str | None:
        """Other members, after so many. None: there is no way to end."""
        need, room = max(0, low - count), None if high is None else high - count
        if extra is None or room == 0:
            return "" if not need else None
        if room is not None and room < need:
            return None
        if count:
            return _times(f"({comma} {extra})", need, room)
        many = f"{extra} " + _times(f"({comma} {extra})", max(0, need - 1), None if room is None else room - 1)
        return many if need else f"({many})?"

    def _extra(self, shape: Shape, taken: Sequence[str]) -> str | None:
        """A rule of one member whose name is not listed; a name fits one pattern at most."""
        sure = ""
        if shape.names:
            ways = []
            for one in self.shapes(shape.names):
                if one.values is not None:
                    ways += [self._literal(v) for v in one.values if isinstance(v, str) and self._fits(v, one)]
                elif "string" in one.types and some(one.length):
                    ways.append(f"({self._string(one)})")
            if not ways:
                return None
            sure = f" & ({' | '.join(ways)})"
        listed = [self._literal(name) for name in taken]
        narrow, wide = ([ecma.terminal(self.parsed(one, w)) for one, _ in shape.matching] for w in (False, True))
        made = []
        for number, (_, wanted) in enumerate([*shape.matching, ("", shape.others or ())]):
            if not self.possible(wanted):
                continue
            wrong = [*listed, *(one for other, one in enumerate(wide) if other != number)]
            key = narrow[number] if number < len(narrow) else f'/"{ecma.CHARACTER}*"/'
            key += "".join(f" & ~({one})" for one in ([" | ".join(wrong)] if wrong else []))
            if self._alive(key + sure):
                made.append(f"{self._terminal(key + sure)} {self._mark(':')} {self.rule(wanted)}")
        return self._named("x", " | ".join(made)) if made else None


def _times(text: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    return f"{text}*" if not least and most is None else f"{text}{{{least},{'' if most is None else most}}}"
