"""JSON schemas as rules of llguidance's Lark. Every keyword is held, or named with its place where it cannot be.

llguidance has a compiler of schemas too. It does not say where a keyword stands that it cannot hold, passes some over in
silence, and its numbers have no end. Here a schema becomes shapes: alternatives without `$ref`, `anyOf`, `not` and the
like, each of which is one rule for each type. What is written may be narrower than the schema, never wider.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

try:
    from . import ecma_regex as ecma
    from .json_numbers import NoNumber, Numbers, exact
except ImportError:  # in the process that tries grammars out, which imports no package
    import ecma_regex as ecma  # type: ignore[no-redef,import-not-found]
    from json_numbers import NoNumber, Numbers, exact  # type: ignore[no-redef,import-not-found]

OPTIONS = "x-ppsd"  # key of the root: {"lenient", "unbounded", "compact", "of"}; of: what a place begins with
_TYPES = frozenset(("null", "boolean", "number", "string", "array", "object"))
_MOST_SHAPES = 256  # of one value
_MOST_RULES = 20_000
_MOST_UNIQUE = 16  # items of an array that must differ and may not, in a schema that is held in part
# What says nothing of a value, or only how others read it.
NOTES = frozenset(
    "$anchor $comment $defs $dynamicAnchor $id $recursiveAnchor $schema $vocabulary contentEncoding contentMediaType "
    "contentSchema default definitions deprecated description example examples id nullable readOnly title "
    "writeOnly".split()
)
_IPV4 = r"((25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,2}}"  # of 253 characters at most
_DAY = "[0-9]{3}[1-9]-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_ZONE = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join([
    f"({_HEX}:){{7}}{_HEX}",
    *(f"({_HEX}:){{{n}}}(:{_HEX}){{1,{7 - n}}}" for n in range(1, 7)),
    f":(:{_HEX}){{1,7}}",
    "::",
])  # fmt: skip
_SEGMENT = r"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"
_QUERY = rf"(\?({_SEGMENT}|[/?])*)?(#({_SEGMENT}|[/?])*)?"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]*:(//{_HOST}(:[0-9]{{1,4}})?(/{_SEGMENT}*)*|/?{_SEGMENT}+(/{_SEGMENT}*)*){_QUERY}"
_DATE_PART = "([0-9]{1,6}Y([0-9]{1,6}M([0-9]{1,6}D)?)?|[0-9]{1,6}M([0-9]{1,6}D)?|[0-9]{1,6}D)"
_TIME_PART = "T([0-9]{1,6}H([0-9]{1,6}M([0-9]{1,6}S)?)?|[0-9]{1,6}M([0-9]{1,6}S)?|[0-9]{1,6}S)"
_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-VERSION[0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}"
_EMAIL = rf"[a-zA-Z0-9_+-]{{1,20}}(\.[a-zA-Z0-9_+-]{{1,20}}){{0,2}}@{_LABEL}(\.{_LABEL}){{1,2}}"
# By RFC 3339, 5321, 1123, 4122, 3986, 6901; of the formats for other alphabets, what they have in common with ASCII's.
FORMATS = {
    "date-time": f"{_DAY}T{_CLOCK}{_ZONE}", "date": _DAY, "time": _CLOCK + _ZONE,
    "duration": f"P({_DATE_PART}({_TIME_PART})?|{_TIME_PART}|[0-9]{{1,6}}W)",
    "email": _EMAIL, "idn-email": _EMAIL, "hostname": _HOST, "idn-hostname": _HOST,
    "ipv4": _IPV4, "ipv6": _IPV6, "uuid": _UUID.replace("VERSION", "[1-5]"),
    **{f"uuid{n}": _UUID.replace("VERSION", str(n)) for n in range(1, 9)},
    "uri": _URI, "iri": _URI, "uri-template": _URI,
    "uri-reference": rf"{_URI}|(/{_SEGMENT}*)*{_QUERY}", "iri-reference": rf"{_URI}|(/{_SEGMENT}*)*{_QUERY}",
    "json-pointer": "(/([^/~]|~[01])*)*", "relative-json-pointer": "(0|[1-9][0-9]{0,8})(#|(/([^/~]|~[01])*)*)",
    "byte": "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
}  # fmt: skip
# OpenAPI's and pydantic's names that leave a text as free as it was.
_FREE_FORMATS = {"binary", "password", "float", "double", "path", "file-path", "directory-path"}
_WHOLE_FORMATS = {"int32": 2**31, "int64": 2**63}


class _Again(Exception):
    """A schema refers to itself, without a value between; the text is its place."""


class _Unheld(Exception):
    """A negation that cannot be written; the text says of what."""


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


All = tuple[At, ...]  # schemas that hold together; none: any value
_NEVER: All = (At(False, "/false"),)


@dataclass(frozen=True)
class Shape:
    """values: these alone; barred: but these. Lengths, items and members are from `least` to `most`.

    others, items: None where nothing was said, which `unevaluated...` may say. matching: patterns of names.
    hits: schemas that so many items are to fit.
    """

    types: frozenset[str] = _TYPES
    values: tuple[Any, ...] | None = None
    barred: tuple[Any, ...] = ()
    numbers: Numbers = Numbers()
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


@dataclass(frozen=True)
class Rules:
    """lines: of a Lark grammar. start: the rule of the value. unheld: (place, why) of what is not held."""

    lines: list[str]
    start: str
    unheld: list[tuple[str, str]]


Lives = Callable[[str], bool]  # is there any text that this expression of a terminal allows?


def rules(schema: Any, lives: Lives, prefix: str = "") -> Rules:
    """ValueError for what is no schema, allows nothing or everything. prefix: of the rules' names."""
    return _Compiler(schema, prefix, lives).made()


class _Compiler:
    def __init__(self, root: Any, prefix: str, lives: Lives) -> None:
        given = root if isinstance(root, dict) else {}
        options, dialect = given.get(OPTIONS) or {}, re.search("draft(?:-0|/)([0-9]+)", str(given.get("$schema")))
        self._draft = int(dialect[1]) if dialect else 2020
        self._root, self._prefix, self._lives = root, prefix, lives
        self._bounded, self._compact = not options.get("unbounded"), bool(options.get("compact"))
        self._of = str(options.get("of", ""))
        self._unheld: dict[str, str] = {}
        self._shapes: dict[All, list[Shape]] = {}
        self._possible: dict[All, bool] = {}
        self._rules: dict[All, str] = {}
        self._names: dict[str, str] = {}  # of rules and terminals, by what they are
        self._lines: list[str] = []
        self._anchors: dict[str, At] | None = None
        self._parsed: dict[str, Any] = {}
        self._living: dict[str, bool] = {}

    def made(self) -> Rules:
        root = At(self._root, "")
        if any(replace(shape, place="") == ANY for shape in self.shapes((root,))):
            raise ValueError("it allows every value: say at least a type")
        if not self.possible((root,)):
            raise ValueError("it allows no answer at all")
        start = self.rule((root,))
        return Rules(self._lines, start, list(self._unheld.items()))

    def unheld(self, place: str, why: str) -> None:
        self._unheld.setdefault(self._of + place, why)

    # --- shapes ---

    def shapes(self, schemas: All) -> list[Shape]:
        if schemas not in self._shapes:
            found = [ANY]
            for one in schemas:
                found = self._meet(found, self._expand(one, ()), one.place)
            self._shapes[schemas] = found
        return self._shapes[schemas]

    def _expand(self, at: At, around: tuple[str, ...]) -> list[Shape]:
        """around: places that refer to here without a value between."""
        schema, place = at.schema, at.place
        if isinstance(schema, bool):
            return [ANY] if schema else []
        if not isinstance(schema, dict):
            raise ValueError(f"{place or 'the root'} must be an object, true or false")
        if place in around:
            raise _Again(place)
        if len(around) > 100:
            raise ValueError("it nests too deep")
        around = (*around, place)
        found = [self._plain(at)]

        def meet(others: list[Shape], keyword: str) -> None:
            nonlocal found
            found = self._meet(found, others, f"{place}/{keyword}")

        beside = [
            (self._resolved(at, name), name) for name in ("$ref", "$dynamicRef", "$recursiveRef") if name in schema
        ]
        for one, keyword in (*beside, *((one, "allOf") for one in self._several(at, "allOf"))):
            try:
                meet(self._expand(one, around), keyword)
            except _Again as again:  # that it holds itself says nothing
                if str(again) != place:
                    raise
        if "anyOf" in schema:
            ways = []
            for one in self._several(at, "anyOf"):
                with suppress(_Again):  # it is no other way than those beside it
                    ways += self._expand(one, around)
            meet(ways, "anyOf")
        if "oneOf" in schema:
            meet(self._one_of(at, around), "oneOf")
        if "not" in schema:
            negated = self._not(at.down("not"))
            if negated is None:
                self.unheld(f"{place}/not", self._why)
            else:
                meet(self._expand(negated, around), "not")
        if "if" in schema and ("then" in schema or "else" in schema):
            condition, negated = at.down("if"), self._not(at.down("if"))
            if negated is None:
                self.unheld(f"{place}/if", self._why)
            else:
                found = self._either(found, (condition, "then"), (negated, "else"), at, around)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, wanted in self._map(at, keyword).items():
                step = at.down(keyword, name)
                without = At({"properties": {name: False}}, f"{step.place}/without")
                needs = [name, *wanted] if isinstance(wanted, list) else [name]
                present = self._expand(At({"required": needs}, f"{step.place}/with"), around)
                if not isinstance(wanted, list):
                    present = self._meet(present, self._expand(step, around), step.place)
                meet([*self._expand(without, around), *present], keyword)
        if "unevaluatedProperties" in schema:
            rest = (at.down("unevaluatedProperties"),)
            found = [shape if shape.others is not None else replace(shape, others=rest) for shape in found]
        if "unevaluatedItems" in schema:
            rest = (at.down("unevaluatedItems"),)
            found = [shape if shape.items is not None else replace(shape, items=rest) for shape in found]
        return found

    def _either(
        self, found: list[Shape], yes: tuple[At, str], no: tuple[At, str], at: At, around: tuple[str, ...]
    ) -> list[Shape]:
        made = []
        for condition, keyword in (yes, no):
            one = self._meet(found, self._expand(condition, around), condition.place)
            if keyword in at.schema:
                one = self._meet(one, self._expand(at.down(keyword), around), f"{at.place}/{keyword}")
            made += one
        return made

    def _one_of(self, at: At, around: tuple[str, ...]) -> list[Shape]:
        branches = self._several(at, "oneOf")
        each = [self._expand(one, around) for one in branches]
        each = [self._expand(one, around) for one in branches]
        made = []
        for number, one in enumerate(branches):
            found = each[number]
            for other in range(len(branches)):
                if other == number or all(self._apart(a, b, 4) for a in found for b in each[other]):
                    continue
                negated = self._not(branches[other])
                if negated is None:
                    self.unheld(f"{at.place}/oneOf", f"two of its branches may both fit ({self._why}): write anyOf")
                    return [shape for shapes in each for shape in shapes]
                found = self._meet(found, self._expand(negated, around), one.place)
            made += found
        return made

    def _plain(self, at: At) -> Shape:
        """What the keywords say that are no schemas for the same value."""
        schema, place = at.schema, at.place
        types = schema.get("type", sorted(_TYPES))
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not all(one in _TYPES or one == "integer" for one in types):
            raise ValueError(f"{place}/type must be one or several of {', '.join(sorted(_TYPES))}, integer")
        if schema.get("nullable") is True and "type" in schema:
            types = [*types, "null"]
        kinds = frozenset(types) - ({"integer"} if "number" in types else set())
        values: list[Any] | None = None
        if "enum" in schema:
            values = schema["enum"]
            if not isinstance(values, list):
                raise ValueError(f"{place}/enum must be a list")
        if "const" in schema:
            values = [schema["const"]] if values is None or any(_same(schema["const"], one) for one in values) else []
        numbers, patterns = self._numbers(at), []
        for keyword in ("pattern", "x-not-pattern"):
            if keyword in schema:
                if not isinstance(schema[keyword], str):
                    raise ValueError(f"{place}/{keyword} must be a text")
                if (parsed := self._pattern(schema[keyword], f"{place}/pattern")) is not None:
                    patterns.append((parsed, keyword != "pattern"))
        if "format" in schema:
            wanted = schema["format"]
            if not isinstance(wanted, str):
                raise ValueError(f"{place}/format must be a text")
            if wanted in FORMATS:
                patterns.append((self._pattern(f"^({FORMATS[wanted]})$", f"{place}/format"), False))
            elif wanted in _WHOLE_FORMATS:
                most = Fraction(_WHOLE_FORMATS[wanted])
                numbers = numbers.both(Numbers(least=-most, most=most - 1))
            elif wanted not in _FREE_FORMATS:
                self.unheld(f"{place}/format", f"the format {json.dumps(wanted)[:60]} is not known")
        first, items = self._items(at)
        hits: tuple[tuple[All, int, str], ...] = ()
        if "contains" in schema:
            least = self._number(at, "minContains", 1) if self._draft > 7 else 1
            hits = (((at.down("contains"),), least or 0, f"{place}/contains"),) if least else ()
            if "maxContains" in schema:
                self.unheld(f"{place}/maxContains", "a grammar does not count what fits beside what need not")
        required = schema.get("required", [])
        if required is True or required is False:  # of draft 3, which OpenAPI's users still write
            self.unheld(f"{place}/required", "it must be a list of names")
            required = []
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise ValueError(f"{place}/required must be a list of names")
        matching = []
        for pattern in self._map(at, "patternProperties"):
            where = at.down("patternProperties", pattern)
            if self._pattern(pattern, where.place) is not None:
                matching.append((pattern, (where,)))
        return Shape(
            types=kinds,
            values=None if values is None else tuple(values),
            barred=tuple(schema.get("x-barred", ())),
            numbers=numbers,
            length=self._range(at, "Length"),
            patterns=tuple(patterns),
            first=first,
            items=items,
            count=self._range(at, "Items"),
            unique=f"{place}/uniqueItems" if schema.get("uniqueItems") is True else "",
            hits=hits,
            named=tuple((name, (at.down("properties", name),)) for name in self._map(at, "properties")),
            required=tuple(dict.fromkeys(required)),
            others=(at.down("additionalProperties"),) if "additionalProperties" in schema else None,
            matching=tuple(matching),
            names=(at.down("propertyNames"),) if "propertyNames" in schema else (),
            members=self._range(at, "Properties"),
            place=place,
        )

    def _numbers(self, at: At) -> Numbers:
        schema, found = at.schema, Numbers()

        def value(keyword: str) -> Fraction:
            given = schema[keyword]
            if isinstance(given, bool) or not isinstance(given, int | float) or abs(given) == float("inf"):
                raise ValueError(f"{at.place}/{keyword} must be a number")
            return exact(given)

        def side(keyword: str, strict: bool) -> Numbers:
            low = keyword.endswith("inimum")
            return Numbers(least=value(keyword), above=strict) if low else Numbers(most=value(keyword), below=strict)

        for plain, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if plain in schema:
                found = found.both(side(plain, schema.get(strict) is True))  # true: of draft 4
            if strict in schema and not isinstance(schema[strict], bool):
                found = found.both(side(strict, True))
        if "multipleOf" in schema:
            step = value("multipleOf")
            if step <= 0:
                raise ValueError(f"{at.place}/multipleOf must be above 0")
            found = replace(found, step=step)
        return found

    def _items(self, at: At) -> tuple[tuple[All, ...], All | None]:
        schema, first, rest = at.schema, "prefixItems", "items"
        if isinstance(schema.get("items"), list) or self._draft < 2020:
            first, rest = ("items", "additionalItems") if isinstance(schema.get("items"), list) else ("", "items")
        given = schema.get(first, [])
        if not isinstance(given, list):
            raise ValueError(f"{at.place}/{first} must be a list")
        return (
            tuple((at.down(first, number),) for number in range(len(given))),
            (at.down(rest),) if rest in schema else None,
        )

    def _range(self, at: At, of: str) -> tuple[int, int | None]:
        return self._number(at, f"min{of}", 0) or 0, self._number(at, f"max{of}", None)

    def _number(self, at: At, keyword: str, default: int | None) -> int | None:
        given = at.schema.get(keyword, default)
        if given is not None and (
            isinstance(given, bool) or not isinstance(given, int | float) or given < 0 or given % 1
        ):
            raise ValueError(f"{at.place}/{keyword} must be a whole number from 0 on")
        return None if given is None else int(given)

    def _map(self, at: At, keyword: str) -> dict[str, Any]:
        given = at.schema.get(keyword, {})
        if not isinstance(given, dict):
            raise ValueError(f"{at.place}/{keyword} must be an object")
        return given

    def _several(self, at: At, keyword: str) -> list[At]:
        given = at.schema.get(keyword, [])
        if not isinstance(given, list):
            raise ValueError(f"{at.place}/{keyword} must be a list")
        return [at.down(keyword, number) for number in range(len(given))]

    def _pattern(self, pattern: str, place: str) -> Any:
        """None: it cannot be held, and nothing says it any more."""
        if pattern not in self._parsed:
            try:
                parsed = ecma.parse(pattern)
                ecma.terminal(parsed)
                self._parsed[pattern] = parsed
            except ecma.Unheld as error:
                self._parsed[pattern] = error
        parsed = self._parsed[pattern]
        if isinstance(parsed, ecma.Unheld):
            self.unheld(place, str(parsed))
            return None
        return parsed

    def _resolved(self, at: At, keyword: str) -> At:
        reference = at.schema[keyword]
        if not isinstance(reference, str):
            raise ValueError(f"{at.place}/{keyword} must be a text")
        base, _, name = reference.partition("#")
        if self._anchors is None:
            self._anchors = dict(self._anchored(At(self._root, "")))
        if name and not name.startswith("/"):
            found = self._anchors.get(f"{base}#{name}" if base else f"#{name}")
        else:
            found = self._anchors.get(base) if base else At(self._root, "")
            try:
                for step in _unquoted(name).split("/")[1:]:
                    assert found is not None
                    step = step.replace("~1", "/").replace("~0", "~")
                    found = found.down(int(step) if isinstance(found.schema, list) else step)
            except (KeyError, IndexError, TypeError, ValueError, AssertionError):
                found = None
        if found is None:
            raise ValueError(
                f"{at.place}/{keyword} refers to {json.dumps(reference)[:100]}, which is not in the schema"
            )
        return found

    def _anchored(self, at: At) -> Iterator[tuple[str, At]]:
        """What has a name: all of `$anchor` and `$id`."""
        schema = at.schema
        if isinstance(schema, dict):
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(keyword), str):
                    yield f"#{schema[keyword]}", at
            for keyword in ("$id", "id"):
                if isinstance(schema.get(keyword), str):
                    yield schema[keyword], at
        if isinstance(schema, dict | list):
            for step in schema if isinstance(schema, dict) else range(len(schema)):
                if step not in ("enum", "const", "default", "examples"):
                    yield from self._anchored(at.down(step))

    # --- negation ---

    def _not(self, at: At) -> At | None:
        """A schema of the values that `at` does not allow, or of some of them. None: `_why` says what is in the way."""
        try:
            return At(self._negated(at, 0), f"{at.place}/negated")
        except _Unheld as error:
            self._why = str(error)
            return None

    def _negated(self, at: At, depth: int) -> Any:
        schema = at.schema
        if isinstance(schema, bool):
            return not schema
        if depth > 20 or not isinstance(schema, dict):
            raise _Unheld("a negation of what nests too deep")
        made: list[Any] = []
        for keyword, value in schema.items():
            if keyword in _NEGATED:
                made += _NEGATED[keyword](value)
            elif keyword == "pattern":
                if not isinstance(value, str) or self._pattern(value, f"{at.place}/pattern") is None:
                    raise _Unheld("a negation of a pattern that is not held")
                made.append({"type": "string", "x-not-pattern": value})
            elif keyword in ("allOf", "anyOf"):
                each = [self._negated(one, depth + 1) for one in self._several(at, keyword)]
                made += each if keyword == "allOf" else [{"allOf": each}]
            elif keyword == "not":
                made.append(value)
            elif keyword == "$ref":
                made.append(self._negated(self._resolved(at, keyword), depth + 1))
            elif keyword == "properties":
                for name in self._map(at, keyword):
                    wrong = self._negated(at.down(keyword, name), depth + 1)
                    made.append({"type": "object", "required": [name], "properties": {name: wrong}})
            elif keyword in _KEYWORDS:
                raise _Unheld(f"a negation of {keyword}")
        return {"anyOf": made}

    # --- shapes beside each other ---

    def _meet(self, some: list[Shape], others: list[Shape], place: str) -> list[Shape]:
        if len(some) * len(others) > _MOST_SHAPES * 16:
            raise ValueError(f"{place or 'the root'} has too many combinations")
        if others == [ANY]:
            return some
        if some == [ANY]:
            return others
        found = [made for a in some for b in others if (made := self._both(a, b)) is not None]
        found = (
            list(dict.fromkeys(found)) if all(shape.values is None and not shape.barred for shape in found) else found
        )
        if len(found) > _MOST_SHAPES:
            raise ValueError(f"{place or 'the root'} has too many combinations")
        return found

    def _both(self, a: Shape, b: Shape) -> Shape | None:
        types = a.types & b.types
        if ("integer" in a.types and "number" in b.types) or ("integer" in b.types and "number" in a.types):
            types |= {"integer"}
        values = a.values if b.values is None else b.values
        if a.values is not None and b.values is not None:
            values = tuple(one for one in a.values if any(_same(one, other) for other in b.values))
        if not types or values == ():
            return None
        first = tuple(
            _joined(*((s.first[n] if n < len(s.first) else s.items or ()) for s in (a, b)))
            for n in range(max(len(a.first), len(b.first)))
        )
        names = [name for name, _ in a.named] + [name for name, _ in b.named if name not in a.by_name]
        return Shape(
            types=types,
            values=values,
            barred=a.barred + b.barred,
            numbers=a.numbers.both(b.numbers),
            length=_narrower(a.length, b.length),
            patterns=tuple(dict.fromkeys(a.patterns + b.patterns)),
            first=first,
            items=_said(a.items, b.items),
            count=_narrower(a.count, b.count),
            unique=a.unique or b.unique,
            hits=a.hits + tuple(one for one in b.hits if one not in a.hits),
            named=tuple((name, _joined(self._member(a, name), self._member(b, name))) for name in names),
            required=tuple(dict.fromkeys(a.required + b.required)),
            others=_said(a.others, b.others),
            matching=self._matching(a, b),
            names=_joined(a.names, b.names),
            members=_narrower(a.members, b.members),
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
                made[pattern] = _joined(made.get(pattern, ()), schemas, more)
        return tuple(made.items())

    def _member(self, shape: Shape, name: str) -> All:
        """What the value under a name is to fit."""
        matched = [s for pattern, s in shape.matching if ecma.matcher(self._parsed[pattern]).search(name)]
        if name not in shape.by_name and not matched:
            return shape.others or ()
        return _joined(shape.by_name.get(name, ()), *matched)

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
            return _some(shape.length) and (not shape.patterns or self._alive(self._string(shape)))
        if kind == "array":
            return _some(shape.count)
        if kind != "object" or not _some(shape.members):
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
        kind = _type_of(value)
        if kind not in shape.types and not (
            kind == "number" and "integer" in shape.types and exact(value).denominator == 1
        ):
            return False
        if any(_same(value, one) for one in shape.barred):
            return False
        if shape.values is not None and not any(_same(value, one) for one in shape.values):
            return False
        if kind == "number":
            return shape.numbers.fits(value)
        if kind == "string":
            found = all((ecma.matcher(parsed).search(value) is None) == wrong for parsed, wrong in shape.patterns)
            return found and _within(len(value), shape.length)
        if kind == "array":
            rest = shape.items or ()
            return (
                _within(len(value), shape.count)
                and all(self._is(one, shape.first[n] if n < len(shape.first) else rest) for n, one in enumerate(value))
                and all(sum(self._is(one, wanted) for one in value) >= least for wanted, least, _ in shape.hits)
                and not (shape.unique and any(_same(a, b) for n, a in enumerate(value) for b in value[:n]))
            )
        if kind == "object":
            return (
                _within(len(value), shape.members)
                and all(name in value for name in shape.required)
                and all(self._is(name, shape.names) for name in value)
                and all(self._is(one, self._member(shape, name)) for name, one in value.items())
            )
        return True

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
                    if len(reached) > _MOST_RULES:
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
            yield from (_joined(shape.items or (), wanted) for wanted, _, _ in shape.hits)
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
            wanted += [_joined(rest, one) for one, _, _ in shape.hits]
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

    # --- rules ---

    def rule(self, schemas: All) -> str:
        """The name of the rule for a value; there is one."""
        if schemas not in self._rules:
            if len(self._rules) > _MOST_RULES:
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
                    f'"{json.dumps(one)}"' for one in (False, True) if not any(_same(one, b) for b in shape.barred)
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
            return " ".join([self._open_list, self._comma.join(map(self._literal, value)), self._close_list])
        if isinstance(value, dict):
            pairs = (f"{self._literal(name)} {self._colon} {self._literal(one)}" for name, one in value.items())
            return " ".join([self._open_object, self._comma.join(pairs), self._close_object])
        return ecma.quote(json.dumps(value))

    def _mark(self, text: str, before: bool, after: bool) -> str:
        """A sign of JSON, with the white space around it that models write: a line and its indent, or two spaces."""
        if self._compact:
            return ecma.quote(text + (" " if text in ",:" else ""))
        space = r"[ ]{0,2}(\r?\n[ \t]{0,24})?" if self._bounded else r"[ \t\r\n]*"
        return self._terminal(
            f"/{space if before else ''}[{text if text != '[' and text != ']' else chr(92) + text}]{space if after else ''}/"
        )

    @property
    def _open_object(self) -> str:
        return self._mark("{", False, True)

    @property
    def _close_object(self) -> str:
        return self._mark("}", True, False)

    @property
    def _open_list(self) -> str:
        return self._mark("[", False, True)

    @property
    def _close_list(self) -> str:
        return self._mark("]", True, False)

    @property
    def _comma(self) -> str:
        return f" {self._mark(',', True, True)} "

    @property
    def _colon(self) -> str:
        return self._mark(":", True, True)

    def _number_bodies(self, shape: Shape, kind: str) -> Iterator[str]:
        """Values that are barred cut the line of numbers."""
        parts = [replace(shape.numbers, integer=shape.numbers.integer or kind == "integer")]
        for value in shape.barred:
            if _type_of(value) == "number":
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
        begin, comma, end = self._open_list, self._comma, self._close_list
        if shape.unique and (most is None or most > 1):
            values = self._few(rest)
            if values is not None and not first and not shape.hits:
                yield from (f"{begin} {body} {end}" for body in self._different(values, least, most))
                return
            self.unheld(shape.unique, "a grammar does not know what came before: say enum for the items, or maxItems 1")
            most = max(_MOST_UNIQUE, least) if most is None else most
        if shape.hits:
            if len(shape.hits) > 1 or first or most is not None or least > shape.hits[0][1]:
                self.unheld(shape.hits[0][2], "a grammar does not count items beside it")
            else:
                hit, item = self.rule(_joined(rest, shape.hits[0][0])), self.rule(rest)
                more = f"({comma} ({item} {comma})* {hit}){{{shape.hits[0][1] - 1}}}" if shape.hits[0][1] > 1 else ""
                yield f"{begin} ({item} {comma})* {hit} {more} ({comma} {item})* {end}"
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
        yield f"{begin} {body} {end}"

    def _few(self, schemas: All) -> list[Any] | None:
        """All values of a schema, where it lists them."""
        found: list[Any] = []
        for shape in self.shapes(schemas):
            values = shape.values
            if values is None and shape.types <= {"null", "boolean"}:
                values = tuple(one for one in (None, False, True))
            if values is None:
                return None
            found += [v for v in values if self._fits(v, shape) and not any(_same(v, other) for other in found)]
        return found if len(found) <= 60 else None

    def _different(self, values: Sequence[Any], least: int, most: int | None) -> Iterator[str]:
        most = len(values) if most is None else min(most, len(values))
        if least > most:
            return
        each = [(number, self._literal(one)) for number, one in enumerate(values)]
        name = f"{self._prefix}u{len(self._lines)}"
        ways = [f'"" %if bit_count_ge(_, {least})']
        ways += [
            f"{self._comma} {text} {name}::set_bit({n}) %if and(bit_clear({n}), bit_count_lt(_, {most}))"
            for n, text in each
        ]
        self._lines.append(f"{name}::_ : " + " | ".join(ways))
        self._lines.append(f"{name}f::_ : " + " | ".join(f"{text} {name}::set_bit({n})" for n, text in each))
        yield f"{name}f::0x0"
        if not least:
            yield ""

    def _object(self, shape: Shape) -> Iterator[str]:
        colon, comma = self._colon, self._comma
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
        if len(members) * top > 4000:
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
            yield f"{self._open_object} {after[0]} {self._close_object}"

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
                elif "string" in one.types and _some(one.length):
                    ways.append(f"({self._string(one)})")
            if not ways:
                return None
            sure = f" & ({' | '.join(ways)})"
        listed = [self._literal(name) for name in taken]
        patterns = [ecma.terminal(self._parsed[pattern]) for pattern, _ in shape.matching]
        made = []
        for number, (_, wanted) in enumerate([*shape.matching, ("", shape.others or ())]):
            if not self.possible(wanted):
                continue
            wrong = [*listed, *(one for other, one in enumerate(patterns) if other != number)]
            key = f"{patterns[number]}" if number < len(patterns) else f'/"{ecma.CHARACTER}*"/'
            key += "".join(f" & ~({one})" for one in ([" | ".join(wrong)] if wrong else []))
            if self._alive(key + sure):
                made.append(f"{self._terminal(key + sure)} {self._colon} {self.rule(wanted)}")
        return self._named("x", " | ".join(made)) if made else None


def _negations(of: str) -> dict[str, Callable[[Any], list[Any]]]:
    kind = {"Length": "string", "Items": "array", "Properties": "object"}[of]
    return {
        f"min{of}": lambda n: [{"type": kind, f"max{of}": n - 1}] if n else [],
        f"max{of}": lambda n: [{"type": kind, f"min{of}": n + 1}],
    }


def _other_types(given: Any) -> list[Any]:
    types = {given} if isinstance(given, str) else set(given)
    left = _TYPES - types - ({"number"} if "integer" in types else set())
    return [{"type": sorted(left)}] if left else []


def _barred(values: Iterable[Any]) -> list[Any]:
    """Of arrays and objects, none at all where one is not to be."""
    kinds = {_type_of(one) for one in values} & {"array", "object"}
    return [{"type": sorted(_TYPES - kinds), "x-barred": [one for one in values if _type_of(one) not in kinds]}]


_NEGATED: dict[str, Callable[[Any], list[Any]]] = {
    **_negations("Length"),
    **_negations("Items"),
    **_negations("Properties"),
    "type": _other_types,
    "enum": _barred,
    "const": lambda value: _barred([value]),
    "required": lambda names: [{"type": "object", "properties": {name: False}} for name in names],
    "minimum": lambda n: [{"type": "number", "exclusiveMaximum": n}],
    "maximum": lambda n: [{"type": "number", "exclusiveMinimum": n}],
    "exclusiveMinimum": lambda n: [{"type": "number", "maximum": n}],
    "exclusiveMaximum": lambda n: [{"type": "number", "minimum": n}],
    "items": lambda one: (
        [{"type": "array", "contains": {"not": one}}] if not isinstance(one, list) else _refuse("items")
    ),
}
_KEYWORDS = frozenset(
    "$dynamicRef $recursiveRef additionalItems additionalProperties contains dependencies dependentRequired "
    "dependentSchemas else format if maxContains minContains multipleOf oneOf patternProperties prefixItems "
    "propertyNames then unevaluatedItems unevaluatedProperties uniqueItems".split()
)


def _refuse(keyword: str) -> list[Any]:
    raise _Unheld(f"a negation of {keyword}")


def _joined(*several: All) -> All:
    return tuple(dict.fromkeys(one for each in several for one in each))


def _said(a: All | None, b: All | None) -> All | None:
    return b if a is None else a if b is None else _joined(a, b)


def _narrower(a: tuple[int, int | None], b: tuple[int, int | None]) -> tuple[int, int | None]:
    most = [one[1] for one in (a, b) if one[1] is not None]
    return max(a[0], b[0]), min(most) if most else None


def _some(span: tuple[int, int | None]) -> bool:
    return span[1] is None or span[0] <= span[1]


def _within(count: int, span: tuple[int, int | None]) -> bool:
    return span[0] <= count and (span[1] is None or count <= span[1])


def _times(text: str, least: int, most: int | None) -> str:
    if most == 0:
        return ""
    return f"{text}*" if not least and most is None else f"{text}{{{least},{'' if most is None else most}}}"


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")


def _same(a: Any, b: Any) -> bool:
    """As JSON Schema compares: 1 is 1.0, and no boolean."""
    if _type_of(a) != _type_of(b):
        return False
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(one, b[name]) for name, one in a.items())
    return bool(a == b)


def _unquoted(pointer: str) -> str:
    """A reference is a part of a URI."""
    return re.sub(
        "(?:%[0-9a-fA-F]{2})+", lambda found: bytes.fromhex(found[0].replace("%", "")).decode(errors="replace"), pointer
    )
