"""Random JSON schemas, answers drawn under their grammars, and a validator that judges them.

    PYTHONPATH=tests python -m fuzz.schemas --schemas 3000 --seed 1

No model is asked: every token is drawn from what the mask allows. An answer that ends by itself has to fit its schema,
and no answer may come to a point where nothing is allowed.
"""

import argparse
import json
import random
import sys
from collections import Counter
from typing import Any

import jsonschema_rs

from ppsd_rt.sampling.grammar_worker import Vocabulary, compile_grammar, prepare

Json = Any

# Besides, date-time and time, which have a leap second on any day.
FORMATS = ("date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

_NAMES = ("a", "b", "kind", "x-1", 'q"t', "é", "n\n")
_PATTERNS = (
    *("^[a-z]+$", "^a|b$", "[0-9]{2,4}", r"^\d{3}-\d{2}$", r"^\w+\s\w+$", r"\S", r"^[^a-f]*$", "^(?!foo).*$"),
    *("(?=a)b", "(?<=x)y", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r'^["\\]{1,3}$', r"^\u00e9\x41\t?$"),
    *(r"^[^\W\d]+$", "^(ab|c)*?d$", "x", r"^\p{Lu}\p{L}*$", r"^[\d\-_.]+$", "^$", r"\D", r"\W$"),
    *("^(?:a|(?<n>b))c", r"\bfoo\b", r"(a)\1", "^.{2,5}$", "[]", "[^]", r"^(?=.*\d)(?=.*[a-z]).{3,8}$"),
    *("a(?!b)", "(?<!a)b$", r"^\/[^/]+\/$", "^a{2}b{1,}c{0,2}$", r"^[\s\S]$", "^[a-c&&b]$"),
)


class Drawing:
    """Schemas of one seed."""

    def __init__(self, seed: object) -> None:
        self._random = random.Random(str(seed))

    def root(self) -> Json:
        draw = self._random
        made = self._schema(3)
        schema = made if isinstance(made, dict) else {"type": "object", "properties": {"a": made}}
        schema = {**schema, "$defs": {name: self._schema(1) for name in ("one", "two")}}
        if draw.random() < 0.25:
            schema["$schema"] = "http://json-schema.org/draft-07/schema#"
        return schema

    def _schema(self, depth: int) -> Json:
        draw = self._random
        if draw.random() < 0.04:
            return draw.choice((True, False))
        makers = [self._string, self._number, self._integer, self._enum, self._plain]
        if depth:
            makers += [self._object, self._object, self._array, self._combined, self._conditional]
        schema = draw.choice(makers)(depth)
        if depth and draw.random() < 0.08:
            more = draw.choice((self._combined, self._conditional, self._enum, self._object))(depth - 1)
            schema = {**more, **schema}
        if draw.random() < 0.1:
            schema["description"] = "of no effect"
        return schema

    def _some(self, **fields: Any) -> Json:
        return {name: make() for name, make in fields.items() if self._random.random() < 0.35}

    def _string(self, depth: int) -> Json:
        draw = self._random
        least = draw.randrange(4)
        return {"type": "string"} | self._some(
            minLength=lambda: least,
            maxLength=lambda: least + draw.randrange(9),
            pattern=lambda: draw.choice(_PATTERNS),
            **({"format": lambda: draw.choice([*FORMATS, "regex", "odd"])} if draw.random() < 0.3 else {}),
        )

    def _bounds(self, value: Any) -> Json:
        low, high = sorted((value(), value()))
        return self._some(
            **{self._random.choice(("minimum", "exclusiveMinimum")): lambda: low},
            **{self._random.choice(("maximum", "exclusiveMaximum")): lambda: high},
        )

    def _number(self, depth: int) -> Json:
        draw = self._random
        bounds = self._bounds(lambda: draw.choice((0, 1, -1.5, 0.25, 1e6, -1e-4, draw.randrange(-9999, 9999) / 100)))
        step = {"multipleOf": draw.choice((0.5, 0.25, 2, 3, 1))} if draw.random() < 0.2 else {}
        return {"type": "number"} | bounds | step

    def _integer(self, depth: int) -> Json:
        draw = self._random
        bounds = self._bounds(lambda: draw.choice((0, 1, 10**12, -(10**6), 0.5, draw.randrange(-999, 999))))
        step = {"multipleOf": draw.choice((2, 7, 10, 1, 97))} if draw.random() < 0.2 else {}
        return {"type": "integer"} | bounds | step

    def _enum(self, depth: int) -> Json:
        values = [None, True, 0, 1, 1.5, -2, "a", "b", 'q"\\', "\u007f\n", [], [1, "a"], {}, {"a": 1}, "foo", 1.0]
        chosen = self._random.sample(values, self._random.randrange(1, 6))
        return {"enum": chosen} if self._random.random() < 0.7 else {"const": chosen[0]}

    def _plain(self, depth: int) -> Json:
        draw = self._random
        types = draw.sample(["null", "boolean", "integer", "number", "string", "array", "object"], draw.randrange(1, 4))
        return {"type": types if len(types) > 1 else types[0]}

    def _object(self, depth: int) -> Json:
        draw = self._random
        names = draw.sample(_NAMES, draw.randrange(4))
        inner = depth - 1
        return {"type": "object", "properties": {name: self._schema(inner) for name in names}} | self._some(
            required=lambda: draw.sample([*names, "more"], draw.randrange(len(names) + 1)),
            additionalProperties=lambda: draw.choice((False, False, self._schema(0))),
            minProperties=lambda: draw.randrange(4),
            maxProperties=lambda: draw.randrange(1, 6),
            **self._rarely(
                patternProperties=lambda: {
                    draw.choice(_PATTERNS): self._schema(0) for _ in range(draw.randrange(1, 3))
                },
                propertyNames=lambda: draw.choice(
                    ({"pattern": "^[a-z]+$"}, {"enum": ["a", "b", "z"]}, {"maxLength": 2})
                ),
                dependentRequired=lambda: {draw.choice(_NAMES): [draw.choice(_NAMES)]},
                dependentSchemas=lambda: {draw.choice(_NAMES): self._schema(0)},
                unevaluatedProperties=lambda: draw.choice((False, self._schema(0))),
            ),
        )

    def _rarely(self, **fields: Any) -> dict[str, Any]:
        return {name: make for name, make in fields.items() if self._random.random() < 0.25}

    def _array(self, depth: int) -> Json:
        draw, least, inner = self._random, self._random.randrange(3), depth - 1
        return {"type": "array"} | self._some(
            items=lambda: self._schema(inner),
            minItems=lambda: least,
            maxItems=lambda: least + draw.randrange(4),
            **self._rarely(
                prefixItems=lambda: [self._schema(inner) for _ in range(draw.randrange(1, 4))],
                uniqueItems=lambda: True,
                contains=lambda: self._schema(0),
                minContains=lambda: draw.randrange(3),
                unevaluatedItems=lambda: False,
            ),
        )

    def _combined(self, depth: int) -> Json:
        draw = self._random
        kind = draw.choice(("anyOf", "oneOf", "allOf", "$ref", "not"))
        if kind == "$ref":
            return {"$ref": draw.choice(("#/$defs/one", "#/$defs/two", "#"))}
        if kind == "not":
            return {"type": draw.choice(("string", "integer", "object")), "not": self._schema(depth - 1)}
        branches = [self._schema(depth - 1) for _ in range(draw.randrange(1, 4))]
        if kind == "allOf" and draw.random() < 0.7:
            branches = [self._object(depth - 1), self._object(depth - 1)]
        return {kind: branches}

    def _conditional(self, depth: int) -> Json:
        condition = {"properties": {"kind": self._enum(0)}, "required": ["kind"]}
        return {"type": "object", "properties": {"kind": {"enum": ["a", "b", 1]}}, "if": condition} | self._some(
            then=lambda: self._object(0), **{"else": lambda: self._object(0)}
        )


def vocabulary() -> Vocabulary:
    """All bytes, and texts that cross the borders of JSON's parts as those of models do."""
    more = [
        *('{"', '":', '": ', '",', '", "', '"}', '"]', "]}", "}}", "[[", '["', "},", "}, {", ", ", "12", "007"),
        *("00", "e+", "-0"),
    ]
    more += ["true", "null", " {", "\n  ", "  ", "ab", "kind", '"kind"', ".5", "foo", "é", "\\n", '\\"', "\\u00"]
    tokens = [bytes([byte]) for byte in range(256)] + [text.encode() for text in more] + [b"<end>"]
    return Vocabulary(tokens, [len(tokens) - 1], None, [len(tokens) - 1], len(tokens))


class Answers:
    def __init__(self) -> None:
        made = vocabulary()
        self.tokenizer, self._tokens, self._end = made.tokenizer(), made.tokens, made.eos_token_id
        self._closing = [n for n, text in enumerate(made.tokens) if text[:1] in b'"}],' and len(text) < 3]

    def draw(self, matcher: Any, random: random.Random, most: int = 300) -> str | None:
        """The text of one that ended; None: it was cut. ValueError: nothing was allowed."""
        text = b""
        for _ in range(most):
            mask = matcher.compute_bitmask()
            allowed = [n for n in range(len(self._tokens)) if mask[n // 8] >> n % 8 & 1]
            if not allowed:
                raise ValueError(f"nothing is allowed after {text!r}: {matcher.get_error()}")
            if self._end in allowed and (len(allowed) == 1 or random.random() < 0.5):
                return text.decode()
            allowed = [n for n in allowed if n != self._end]
            closing = [n for n in self._closing if n in allowed]
            plain = [n for n in allowed if self._tokens[n].isascii()]
            near = (
                closing if closing and random.random() < 0.4 else plain if plain and random.random() < 0.9 else allowed
            )
            chosen = random.choice(near)
            text += self._tokens[chosen]
            if not matcher.consume_token(chosen):
                raise ValueError(f"a token that was allowed is refused after {text!r}")
        return None


def validator(schema: Json) -> Any:
    return jsonschema_rs.validator_for(schema, validate_formats=True, ignore_unknown_formats=True)


def strict_json(text: str) -> Any:
    """Without what no other reader takes."""

    def wrong(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=wrong)


def judge(schema: Json, answers: Answers, random: random.Random, count: int, seen: Counter[str]) -> str | None:
    """What is wrong, if anything is. seen: what came of it."""
    try:
        made, _ = prepare(answers.tokenizer, "json_schema", json.dumps(schema))
        matcher = compile_grammar(answers.tokenizer, made)
    except ValueError:
        seen["refused"] += 1
        return None
    try:
        fits = validator(schema)
    except (jsonschema_rs.ValidationError, ValueError):
        seen["the validator refuses it"] += 1
        return None
    for _ in range(count):
        try:
            text = answers.draw(matcher.deep_copy(), random)
        except ValueError as error:
            return str(error)
        seen["cut" if text is None else "ended"] += 1
        if text is None:
            continue
        try:
            value = strict_json(text)
        except ValueError as error:
            return f"{text!r}: {error}"
        if not fits.is_valid(value):
            return f"{text!r}: {next(iter(fits.iter_errors(value))).message}"
    seen["held"] += 1
    return None


def campaign(schemas: int, seed: int, count: int = 4) -> tuple[Counter[str], list[dict[str, Any]]]:
    answers, seen, wrong = Answers(), Counter[str](), list[dict[str, Any]]()
    for number in range(schemas):
        schema = Drawing(f"{seed} {number}").root()
        found = judge(schema, answers, random.Random(f"{seed} {number}"), count, seen)
        if found is not None:
            wrong.append({"number": number, "schema": schema, "wrong": found})
    return seen, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    seen, wrong = campaign(args.schemas, args.seed)
    for one in wrong[:20]:
        print(json.dumps(one))
    print(json.dumps({"schemas": args.schemas, "seed": args.seed, **seen, "wrong": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
