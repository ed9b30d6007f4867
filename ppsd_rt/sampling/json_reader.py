"""Reads JSON schemas of draft 4 to 2020-12 into shapes, and says what of them no grammar can hold."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import Any

from . import ecma_regex as ecma
from .json_formats import FORMATS, FREE_FORMATS, WHOLE_FORMATS
from .json_numbers import Numbers, exact
from .json_shapes import ANY, TYPES, All, At, Lives, Shape, Shapes, same, type_of

OPTIONS = "x-ppsd"  # key of the root: {"lenient", "unbounded", "compact", "of"}; of: what a place begins with


class _Again(Exception):
    """A schema refers to itself, without a value between; the text is its place."""


class _Unheld(Exception):
    """A negation that cannot be written; the text says of what."""


class Reader(Shapes):
    def __init__(self, root: Any, lives: Lives) -> None:
        super().__init__(lives)
        given = root if isinstance(root, dict) else {}
        self.options, dialect = given.get(OPTIONS) or {}, re.search("draft(?:-0|/)([0-9]+)", str(given.get("$schema")))
        self._root, self._draft = root, int(dialect[1]) if dialect else 2020
        self._read: dict[All, list[Shape]] = {}
        self._anchors: dict[str, At] | None = None

    def shapes(self, schemas: All) -> list[Shape]:
        if schemas not in self._read:
            found = [ANY]
            for one in schemas:
                try:
                    found = self._meet(found, self._expand(one, ()), one.place)
                except _Again as again:
                    raise ValueError(f"{str(again) or '#'} refers to itself without a value between") from None
            self._read[schemas] = found
        return self._read[schemas]

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
        found = [self._plain(at)]
        for others, keyword in self._applied(at, (*around, place)):
            found = self._meet(found, others, f"{place}/{keyword}")
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in schema:
                found = [self._unsaid(shape, keyword, (at.down(keyword),)) for shape in found]
        return found

    def _unsaid(self, shape: Shape, keyword: str, rest: All) -> Shape:
        if keyword == "unevaluatedItems":
            return shape if shape.items is not None else replace(shape, items=rest)
        return shape if shape.others is not None else replace(shape, others=rest)

    def _applied(self, at: At, around: tuple[str, ...]) -> Iterator[tuple[list[Shape], str]]:
        """What the schemas say that are applied to the same value, by keyword."""
        schema = at.schema
        beside = [
            (self._resolved(at, name), name) for name in ("$ref", "$dynamicRef", "$recursiveRef") if name in schema
        ]
        for one, keyword in (*beside, *((one, "allOf") for one in self._several(at, "allOf"))):
            try:
                yield self._expand(one, around), keyword
            except _Again as again:  # that it holds itself says nothing
                if str(again) != at.place:
                    raise
        if "anyOf" in schema:
            ways = []
            for one in self._several(at, "anyOf"):
                with suppress(_Again):  # it is no other way than those beside it
                    ways += self._expand(one, around)
            yield ways, "anyOf"
        if "oneOf" in schema:
            yield self._one_of(at, around), "oneOf"
        if "not" in schema and (negated := self._not(at.down("not"), f"{at.place}/not")) is not None:
            yield self._expand(negated, around), "not"
        if "if" in schema and ("then" in schema or "else" in schema):
            condition = at.down("if")
            if (negated := self._not(condition, condition.place)) is not None:
                yield self._if(at, condition, "then", around) + self._if(at, negated, "else", around), "if"
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name in self._map(at, keyword):
                yield self._depending(at.down(keyword, name), name, around), keyword

    def _if(self, at: At, condition: At, keyword: str, around: tuple[str, ...]) -> list[Shape]:
        found = self._expand(condition, around)
        return self._meet(found, self._expand(at.down(keyword), around), at.place) if keyword in at.schema else found

    def _depending(self, at: At, name: str, around: tuple[str, ...]) -> list[Shape]:
        """Either there is no member of this name, or what stands at `at` holds."""
        without = At({"properties": {name: False}}, f"{at.place}/without")
        needs = [name, *at.schema] if isinstance(at.schema, list) else [name]
        present = self._expand(At({"required": needs}, f"{at.place}/with"), around)
        if not isinstance(at.schema, list):
            present = self._meet(present, self._expand(at, around), at.place)
        return [*self._expand(without, around), *present]

    def _one_of(self, at: At, around: tuple[str, ...]) -> list[Shape]:
        branches = self._several(at, "oneOf")
        each = [self._expand(one, around) for one in branches]
        made = []
        for number, one in enumerate(branches):
            found = each[number]
            for other in range(len(branches)):
                if other == number or all(self._apart(a, b, 4) for a in found for b in each[other]):
                    continue
                negated = self._not(branches[other], f"{at.place}/oneOf", "two of its branches may both fit: ")
                if negated is None:
                    return [shape for shapes in each for shape in shapes]
                found = self._meet(found, self._expand(negated, around), one.place)
            made += found
        return made

    def _plain(self, at: At) -> Shape:
        """What the keywords say that are no schemas for the same value."""
        schema, place = at.schema, at.place
        patterns, most = self._texts(at)
        first, items = self._items(at)
        required = schema.get("required", [])
        if isinstance(required, bool):  # of draft 3, which OpenAPI's users still write
            self.unheld(f"{place}/required", "it must be a list of names")
            required = []
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise ValueError(f"{place}/required must be a list of names")
        matching = [at.down("patternProperties", pattern) for pattern in self._map(at, "patternProperties")]
        return Shape(
            types=self._types(at),
            values=self._values(at),
            barred=tuple(schema.get("x-barred", ())),
            numbers=self._numbers(at).both(most),
            length=self._range(at, "Length"),
            patterns=patterns,
            first=first,
            items=items,
            count=self._range(at, "Items"),
            unique=f"{place}/uniqueItems" if schema.get("uniqueItems") is True else "",
            hits=self._hits(at),
            named=tuple((name, (at.down("properties", name),)) for name in self._map(at, "properties")),
            required=tuple(dict.fromkeys(required)),
            others=(at.down("additionalProperties"),) if "additionalProperties" in schema else None,
            matching=tuple(
                (pattern, (one,))
                for pattern, one in zip(schema.get("patternProperties", {}), matching, strict=True)
                if all(self._pattern(pattern, one.place, wide) is not None for wide in (False, True))
            ),
            names=(at.down("propertyNames"),) if "propertyNames" in schema else (),
            members=self._range(at, "Properties"),
            place=place,
        )

    def _types(self, at: At) -> frozenset[str]:
        types = at.schema.get("type", sorted(TYPES))
        types = [types] if isinstance(types, str) else types
        if not isinstance(types, list) or not all(one in TYPES or one == "integer" for one in types):
            raise ValueError(f"{at.place}/type must be one or several of {', '.join(sorted(TYPES))}, integer")
        if at.schema.get("nullable") is True and "type" in at.schema:
            types = [*types, "null"]
        return frozenset(types) - ({"integer"} if "number" in types else set())

    def _values(self, at: At) -> tuple[Any, ...] | None:
        values = at.schema.get("enum")
        if "enum" in at.schema and not isinstance(values, list):
            raise ValueError(f"{at.place}/enum must be a list")
        if "const" in at.schema:
            value = at.schema["const"]
            values = [value] if values is None or any(same(value, one) for one in values) else []
        return None if values is None else tuple(values)

    def _texts(self, at: At) -> tuple[tuple[tuple[Any, bool], ...], Numbers]:
        """Patterns, and bounds of numbers that a format has."""
        schema, place, patterns, numbers = at.schema, at.place, [], Numbers()
        for keyword in ("pattern", "x-not-pattern"):
            if keyword in schema:
                if not isinstance(schema[keyword], str):
                    raise ValueError(f"{place}/{keyword} must be a text")
                wrong = keyword != "pattern"
                if (parsed := self._pattern(schema[keyword], f"{place}/pattern", wrong)) is not None:
                    patterns.append((parsed, wrong))
        wanted = schema.get("format")
        if wanted in FORMATS:
            patterns.append((self._pattern(f"^({FORMATS[wanted]})$", f"{place}/format"), False))
        elif wanted in WHOLE_FORMATS:
            most = Fraction(WHOLE_FORMATS[wanted])
            numbers = Numbers(least=-most, most=most - 1)
        elif "format" in schema and wanted not in FREE_FORMATS:
            self.unheld(f"{place}/format", f"the format {json.dumps(wanted)[:60]} is not known")
        return tuple(patterns), numbers

    def _hits(self, at: At) -> tuple[tuple[All, int, str], ...]:
        if "contains" not in at.schema:
            return ()
        if "maxContains" in at.schema:
            self.unheld(f"{at.place}/maxContains", "a grammar does not count what fits beside what need not")
        least = self._number(at, "minContains", 1) if self._draft > 7 else 1
        return (((at.down("contains"),), least, f"{at.place}/contains"),) if least else ()

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

    def _pattern(self, pattern: str, place: str, wide: bool = False) -> Any:
        """None: it cannot be held, and nothing says it any more."""
        try:
            return self.parsed(pattern, wide)
        except ecma.Unheld as error:
            self.unheld(place, str(error))
            return None

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

    def _not(self, at: At, place: str, why: str = "") -> At | None:
        """A schema of the values that `at` does not allow, or of some of them. None: there is none, which is noted."""
        try:
            return At(self._negated(at, 0), f"{at.place}/negated")
        except _Unheld as error:
            self.unheld(place, f"{why}{error}")
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
            elif keyword == "items" and not isinstance(value, list):
                made.append({"type": "array", "contains": {"not": value}})
            elif keyword == "$ref":
                made.append(self._negated(self._resolved(at, keyword), depth + 1))
            elif keyword == "properties":
                for name in self._map(at, keyword):
                    wrong = self._negated(at.down(keyword, name), depth + 1)
                    made.append({"type": "object", "required": [name], "properties": {name: wrong}})
            elif keyword in _KEYWORDS:
                raise _Unheld(f"a negation of {keyword}")
        return {"anyOf": made}


def _negations(of: str) -> dict[str, Callable[[Any], list[Any]]]:
    kind = {"Length": "string", "Items": "array", "Properties": "object"}[of]
    return {
        f"min{of}": lambda n: [{"type": kind, f"max{of}": n - 1}] if n else [],
        f"max{of}": lambda n: [{"type": kind, f"min{of}": n + 1}],
    }


def _other_types(given: Any) -> list[Any]:
    types = {given} if isinstance(given, str) else set(given)
    left = TYPES - types - ({"number"} if "integer" in types else set())
    return [{"type": sorted(left)}] if left else []


def _barred(values: Iterable[Any]) -> list[Any]:
    """Of arrays and objects, none at all where one is not to be."""
    kinds = {type_of(one) for one in values} & {"array", "object"}
    return [{"type": sorted(TYPES - kinds), "x-barred": [one for one in values if type_of(one) not in kinds]}]


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
}
_KEYWORDS = {
    *("$dynamicRef", "$recursiveRef", "additionalItems", "additionalProperties", "contains", "dependencies"),
    *("dependentRequired", "dependentSchemas", "else", "format", "if", "maxContains", "minContains", "multipleOf"),
    *("items", "oneOf", "patternProperties", "prefixItems", "propertyNames", "then", "unevaluatedItems", "uniqueItems"),
    "unevaluatedProperties",
}


def _unquoted(pointer: str) -> str:
    """A reference is a part of a URI."""
    return re.sub(
        "(?:%[0-9a-fA-F]{2})+", lambda found: bytes.fromhex(found[0].replace("%", "")).decode(errors="replace"), pointer
    )
