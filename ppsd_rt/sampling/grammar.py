"""Grammars: which ids may come next in an answer, by a JSON schema, a regular expression or a Lark grammar.

llguidance (extra `grammar`) says so, as a bit for each id of the vocabulary. A draft must be taken back as cheaply as a
row, so every side of an answer (draft, verification) has a mask of its own, which is rolled back by counting.
"""

import ctypes
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import GrammarFailed, PpsdError, UsageError
from ..extras import need
from ..printable import quoted
from .grammar_trials import GrammarTrials
from .grammar_worker import ASKS, Unheld, Vocabulary, compile_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ..models.tokenizer import Tokenizer

_MOST_TEXT = 1 << 20  # characters
_MOST_KEPT = 256 << 20  # bytes that compiled grammars may take, and
_MOST_SEEN = 256  # how many of them, and of those that were refused
_KINDS = ("json_schema", "regex", "lark")
# Of any JSON, so that a small model that repeats itself ends.
_DEPTH = 4  # objects and arrays in each other
_MEMBERS = 64  # of an object or an array
_CHARACTERS = 1000  # of a string


def schema_of(given: Any) -> Any:
    """A pydantic class as its schema; others as they are."""
    return given.model_json_schema() if isinstance(given, type) and hasattr(given, "model_json_schema") else given


@dataclass(frozen=True)
class Grammar:
    """What an answer's text must be; made by `json`, `json_schema`, `regex` or `lark`.

    kind: `json_schema`, `regex` or `lark`. text: the schema as JSON, the pattern, or the grammar.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise UsageError(f"a grammar is one of {', '.join(_KINDS)}, not {quoted(self.kind)}")
        if not isinstance(self.text, str):
            raise UsageError(f"a grammar of kind {self.kind} must be a text, not {quoted(self.text)}")

    @classmethod
    def json(cls, *, bounded: bool = True) -> "Grammar":
        """A JSON object: at most 64 members in an object or array, 4 deep, in strings of at most 1000 characters.

        Without such limits, as of `json_schema({"type": "object"})`, a small model may not find an end.
        """
        return cls.json_schema(_any_object(), bounded=bounded)

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str | type, *, strict: bool = True, bounded: bool = True
    ) -> "Grammar":
        """JSON by a schema: a dict, its JSON, or a pydantic class.

        strict: a keyword that cannot be held is an error; else it is left out, and `Engine.unheld` tells it. bounded:
        numbers and white space have an end where the schema gives them none.
        """
        schema = schema_of(schema)
        if isinstance(schema, str) and strict and bounded:
            return cls("json_schema", schema)
        if isinstance(schema, str):
            schema = cls("json_schema", schema).schema()
        if not isinstance(schema, Mapping | bool):
            raise UsageError(f"a JSON schema must be a dict, JSON or a pydantic class, not {quoted(schema)}")
        options = {"lenient": not strict, "whitespace_flexible": not bounded}
        if isinstance(schema, Mapping) and any(options.values()):
            schema = {**schema, "x-guidance": {name: True for name, chosen in options.items() if chosen}}
        try:
            return cls("json_schema", json.dumps(schema))  # keeps the order of properties
        except (TypeError, ValueError) as error:
            raise UsageError(f"the JSON schema is no JSON: {error}") from None

    def schema(self) -> dict[str, Any]:
        """Of the kind `json_schema`: as a dict. UsageError where the text is none."""
        try:
            made = json.loads(self.text)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"the json_schema is not valid: {error}") from None
        if not isinstance(made, dict):
            raise UsageError("the json_schema is not valid: it must be an object that says at least a type")
        return made

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Text that the pattern matches from end to end, in the syntax of Rust's regex crate."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> "Grammar":
        """Text by a grammar in llguidance's variant of Lark's syntax."""
        return cls("lark", grammar)

    @classmethod
    def from_response_format(cls, wanted: Mapping[str, Any], *, bounded: bool = True) -> "Grammar | None":
        """Of OpenAI's `response_format`: None for `text`. Besides: `{"type": "regex", "regex": ...}`, and with lark.

        The schema may also stand beside the type, json_object too, as with llama.cpp, Together and Fireworks. bounded:
        as of `json_schema`.
        """
        kind = wanted.get("type") if isinstance(wanted, Mapping) else None
        if kind == "text":
            return None
        if kind in ("json_object", "json_schema"):
            given = wanted.get("json_schema", wanted) if kind == "json_schema" else wanted
            if isinstance(given, Mapping) and given.get("schema") is not None:
                return cls.json_schema(given["schema"], strict=given.get("strict") is not False, bounded=bounded)
            if kind == "json_object":
                return cls.json(bounded=bounded)
            raise UsageError("response_format: json_schema needs an object with the key schema")
        if kind in ("regex", "lark"):
            return cls(kind, wanted.get(kind, ""))
        raise UsageError(
            f"response_format must have the type text, json_object, json_schema, regex or lark, not {quoted(kind)}"
        )


def _any_object() -> dict[str, Any]:
    scalars = [
        {"type": "string", "maxLength": _CHARACTERS},
        *({"type": name} for name in ("number", "boolean", "null")),
    ]
    values: dict[str, Any] = {"values0": {"anyOf": scalars}}
    for depth in range(1, _DEPTH):
        inner = {"$ref": f"#/$defs/values{depth - 1}"}
        values[f"values{depth}"] = {"anyOf": [*scalars, _object(inner), _array(inner)]}
    return {**_object({"$ref": f"#/$defs/values{_DEPTH - 1}"}), "$defs": values}


def _object(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": values, "maxProperties": _MEMBERS}


def _array(values: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": values, "maxItems": _MEMBERS}


class TokenMask:
    """Which ids may come next, for one side of one answer."""

    def __init__(self, matcher: "LLMatcher", ends: frozenset[int], vocab_size: int) -> None:
        """ends: ids that end the answer, which no grammar reads."""
        self._matcher, self._ends, self._words = matcher, ends, words(vocab_size)
        self._read = 0  # ids of the answer that the grammar has read; it allowed them all

    def fill(self, start: int, ids: Sequence[int], rows: int, address: int) -> None:
        """The answer's ids from `start` on are `ids` now; those before are as they were.

        Writes [rows][words] uint32 at `address`, a bit for each id from the lowest on: row r has those that may follow
        the answer without its last rows - 1 - r ids. All may where the answer holds an id that was not allowed.
        """
        if self._read > start:
            self._matcher.rollback(self._read - start)
            self._read = start
        first = start + len(ids) - rows + 1
        for row in range(rows):
            self._read_on(ids[self._read - start : first + row - start] if self._read >= start else [])
            to = address + row * self._words * 4
            if self._read == first + row:
                self._matcher.unsafe_compute_mask_ptr(to, self._words * 4)
            else:
                ctypes.memset(to, 0xFF, self._words * 4)
        if self._matcher.is_error():
            raise GrammarFailed(f"the grammar gives up: {self._matcher.get_error().splitlines()[0]}")

    def _read_on(self, ids: Sequence[int]) -> None:
        before = next((place for place, id in enumerate(ids) if id in self._ends), len(ids))
        if before:
            self._read += self._matcher.try_consume_tokens(list(ids[:before]))

    def allowed(self, start: int, ids: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """`fill` for the id after all of them -> [at least vocabulary] bool."""
        bits = np.zeros(self._words, np.uint32)
        self.fill(start, ids, 1, bits.ctypes.data)
        return np.unpackbits(bits.view(np.uint8), bitorder="little").view(np.bool_)


Masks = Callable[[], TokenMask]  # a new one, for another side of the answer


def words(vocab_size: int) -> int:
    """Of 32 bits."""
    return -(-vocab_size // 32)


class Grammars:
    """Grammars over one vocabulary. Any thread may ask; one that compiles keeps nobody else waiting."""

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, ends: Sequence[int]) -> None:
        """ends: the ids that end an answer; a grammar that is fulfilled allows them. PpsdError without llguidance."""
        need("llguidance", "grammar", "a grammar")
        if not ends:
            raise PpsdError("grammars need a model with an end-of-sequence id: its config.json names none")
        self._ends, self._vocab_size = frozenset(ends), vocab_size
        tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        made = tokens, sorted(tokenizer.special_ids), tokenizer.bos_id, list(ends), vocab_size
        vocabulary = Vocabulary(*made)
        vocabulary.encode = partial(tokenizer.encode, add_special_tokens=False)
        self._tokenizer, self._trials = vocabulary.tokenizer(), GrammarTrials(made)
        # Or why not; bytes. The newest last.
        self._seen: OrderedDict[Grammar, tuple[LLMatcher | str, int, Unheld]] = OrderedDict()
        self._lock = Lock()

    def masks(self, grammar: Grammar) -> Masks:
        """UsageError for a grammar that is none, or is hopeless: grammar_worker.py has the limits."""
        matcher = self._known(grammar)[0]
        if isinstance(matcher, str):
            raise UsageError(f"the {grammar.kind} {'' if matcher.startswith(ASKS) else 'is not valid: '}{matcher}")
        return lambda: TokenMask(matcher.deep_copy(), self._ends, self._vocab_size)

    def unheld(self, grammar: Grammar) -> Unheld:
        """Places in its schema, and why what stands there is not held; of a grammar that need not hold all."""
        return self._known(grammar)[2]

    def _known(self, grammar: Grammar) -> "tuple[LLMatcher | str, int, Unheld]":
        with self._lock:
            known = self._seen.get(grammar)
            if known is not None:
                self._seen.move_to_end(grammar)
                return known
        known = self._compiled(grammar)
        with self._lock:
            self._seen[grammar] = known
            while len(self._seen) > _MOST_SEEN or sum(size for _, size, _ in self._seen.values()) > _MOST_KEPT:
                self._seen.popitem(last=False)
        return known

    def _compiled(self, grammar: Grammar) -> "tuple[LLMatcher | str, int, Unheld]":
        if len(grammar.text) > _MOST_TEXT:
            return f"it has {len(grammar.text)} characters, and {_MOST_TEXT} are the most", 0, ()
        wrong, size, made, unheld = self._trials.run(grammar.kind, grammar.text)
        try:
            return wrong or compile_grammar(self._tokenizer, made), size, unheld
        except ValueError as error:
            return str(error), 0, ()
