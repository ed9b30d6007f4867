"""Schemas as people write them, and answers drawn under their grammars.

No model is asked: every token is drawn from what the mask allows.
"""

import random
from typing import Any

from ppsd_rt.sampling.grammar_worker import Vocabulary

Json = Any

_NODE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["name"],
    "additionalProperties": False,
}
_MONEY = {"type": "number", "minimum": 0, "maximum": 1e6, "multipleOf": 0.01}
_CALL = {"properties": {"kind": {"const": "call"}, "number": {"type": "string", "pattern": r"^\+?\d{3,9}$"}}}
_MAIL = {"properties": {"kind": {"const": "mail"}, "to": {"type": "string", "format": "email"}}}
SCHEMAS: list[Json] = [
    {"type": "object", "properties": {"city": {"enum": ["Rome", "Bern", 'q"t']}, "n": {"type": "integer"}}},
    {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
    {"oneOf": [{"type": "object", "required": ["kind"], **one} for one in (_CALL, _MAIL)]},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "array", "items": {"type": "number"}, "maxItems": 3}]},
    {"type": "array", "prefixItems": [{"const": 1}, {"type": "string", "maxLength": 5}], "items": False, "minItems": 2},
    {"type": "object", "patternProperties": {"^x-[a-z]{1,3}$": _MONEY}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer", "exclusiveMinimum": -5, "maximum": 99}},
    {"type": ["string", "null"], "minLength": 2, "maxLength": 7, "pattern": "^[a-f]+$"},
    {"type": "object", "properties": {f: {"type": "string", "format": f} for f in ("date", "time", "uuid", "ipv4")}},
    {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": _MONEY, "\u00e9\n": {"type": "string"}}}]},
    {"const": {"a": [1, "a", None], "b": {}}},
    True,
]


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
