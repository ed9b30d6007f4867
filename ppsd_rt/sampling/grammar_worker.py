"""Compiles grammars; as a program, tries them out under limits, so that a hopeless one takes nothing but this process.

llguidance's own limits end every step of an answer, but not every compilation: whether a value fits several expressions
at once may take minutes, and rules that nest 50,000 deep overflow the stack. `python -I grammar_worker.py` reads
pickles: its set-up, then one grammar at a time. It answers each with a pickle, or is ended by a limit. It imports
nothing of this package: it has to start quickly.
"""

import json
import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SECONDS = 2.0  # of processor time for one grammar: a hundred times what those of programs take
MEMORY = 256 << 20  # bytes
_STACK = 4 << 20  # bytes: what compiles on half of the usual stack does so on the threads of a server
ASKS = "asks for what no grammar can hold"
Unheld = tuple[tuple[str, str], ...]  # places in a schema, and why what stands there is not held

_GUIDANCE = "x-guidance"  # key of a schema's root: llguidance's options
# White space that models write between the parts of JSON: a line and its indent, or two spaces. It ends.
_SPACE = {"whitespace_pattern": r"[ ]{1,2}(\r?\n[ \t]{0,24})?|\r?\n[ \t]{0,24}"}
_LARGEST = 10**18  # of numbers without a bound: any reader holds them
_FINEST = 1e-9
_BOUNDS = {-1: ("minimum", "exclusiveMinimum"), 1: ("maximum", "exclusiveMaximum")}
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # their keys are no keywords
_VALUES = {"const", "enum", "default", "examples", "example", _GUIDANCE}
_UNQUOTED = {"oneOf": "oneOf ", "minProperties": "min/maxProperties ", "maxProperties": "min/maxProperties "}
# Of JSON Schema; all others say nothing of a text's form.
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uuid", "uri", "uri-reference", "uri-template", "iri", "iri-reference", "json-pointer", "regex"),
    "relative-json-pointer",
}


class Vocabulary:
    """A tokenizer as llguidance asks for it: every token's bytes, as our decoders join them."""

    encode: Callable[[str], list[int]] | None = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], bos_id: int | None, ends: list[int], size: int):
        """ends: the ids that end an answer. size: of the model's vocabulary, which may be larger: the rest is never
        allowed."""
        self.tokens = [*tokens[:size], *[b""] * (size - len(tokens))]
        self.special_token_ids, self.bos_token_id = special_ids, bos_id
        self.eos_token_id, self._ends, self._size = ends[0], ends, size

    def __call__(self, text: str) -> list[int]:
        """Of what a grammar forces. Without the model's way of cutting a text, the longest tokens do to try it out."""
        return self._made.greedy_tokenize(text) if self.encode is None else self.encode(text)

    def tokenizer(self) -> "LLTokenizer":
        import llguidance

        wrapped = llguidance.TokenizerWrapper(self)
        self._made = llguidance.LLTokenizer(wrapped, n_vocab=self._size, eos_token=self._ends)
        return self._made


def prepare(tokenizer: "LLTokenizer", kind: str, text: str) -> tuple[str, Unheld]:
    """A grammar as llguidance reads it. ValueError, which says why, for what is none or cannot be held and has to be.

    A lenient schema loses the keywords that cannot be held.
    """
    from llguidance import LLMatcher

    try:
        parts = _parts(kind, text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    schemas = [(f"{part.get('title', '')}" if kind == "lark" else "", part) for part in parts if isinstance(part, dict)]
    unheld: dict[str, str] = {}
    while True:
        made = _written(kind, parts)
        matcher = LLMatcher(tokenizer, made, log_level=0)
        error = re.split(r"\n +\d+ \| ", matcher.get_error())[0]  # it draws the text of a grammar below
        error = error.partition("failed to compile JSON schema: ")[2] or error
        said = [error] if error else matcher.get_grammar_warnings()
        found = [
            (schema, within, keyword, (place, _in_one_line(message)))
            for message in said
            for of, schema in schemas
            for within, keyword, place in _keywords(schema, of)
            if _is_of(message, keyword, within[keyword])
        ]
        if not error:
            return made, (*unheld.items(), *(named for *_, named in found if named[0] not in unheld))
        lenient = [one for one in found if one[0][_GUIDANCE].get("lenient")]
        if not lenient:
            places = "".join(f", at {place}" for place in dict.fromkeys(named[0] for *_, named in found[:5]))
            hint = '. "strict": false leaves it out'
            raise ValueError(f"{ASKS}{places}: {_in_one_line(error)}{hint}" if places else _in_one_line(error))
        for _, within, keyword, named in lenient:
            within.pop(keyword, None)
            unheld.setdefault(*named)


def _parts(kind: str, text: str) -> list[Any]:
    """The texts and the schemas of a grammar."""
    if kind == "json_schema":
        return [_tidied(json.loads(text))]
    parts: list[Any] = []
    decoder = json.JSONDecoder()
    while kind == "lark" and (found := re.search(r"%json\s*(?=\{)", text)):
        schema, end = decoder.raw_decode(text, found.end())
        parts += [text[: found.end()], _tidied(schema)]
        text = text[end:]
    return [*parts, text]


def _written(kind: str, parts: list[Any]) -> str:
    from llguidance import LLMatcher

    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(json.dumps(parts[0]))
    text = "".join(part if isinstance(part, str) else json.dumps(part) for part in parts)
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def _tidied(schema: Any) -> Any:
    """In place: formats that nobody asserts go, and numbers and white space end unless the schema's options let them
    be free (`"whitespace_flexible": true`)."""
    options = schema.setdefault(_GUIDANCE, {}) if isinstance(schema, dict) else {}
    if not isinstance(options, dict):
        raise ValueError(f"{_GUIDANCE} must be an object")
    free = options.get("whitespace_flexible") is True
    if not options.keys() & {"whitespace_flexible", "whitespace_pattern"}:
        options.update(_SPACE)
    for within, keyword, _ in list(_keywords(schema, "")):
        if keyword == "format" and isinstance(within[keyword], str) and within[keyword] not in _FORMATS:
            del within[keyword]
        elif keyword == "type" and not free:
            _bound(within, within[keyword])
    return schema


def _bound(schema: dict[str, Any], types: Any) -> None:
    types = types if isinstance(types, list) else [types]
    if schema.keys() & {"enum", "const"} or not ("integer" in types or "number" in types):
        return
    for sign, names in _BOUNDS.items():
        given = [one for name in names if isinstance(one := schema.get(name), int | float) and one is not True]
        if not any(sign * one < _LARGEST for one in given):
            schema[names[0]] = sign * _LARGEST
    if "number" in types:
        schema.setdefault("multipleOf", _FINEST)


def _keywords(schema: Any, place: str) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Of a schema and of all in it: what has a keyword, the keyword, and the JSON pointer to it."""
    if isinstance(schema, list):
        for number, one in enumerate(schema):
            yield from _keywords(one, f"{place}/{number}")
    elif isinstance(schema, dict):
        for keyword, value in list(schema.items()):
            here = f"{place}/{_escaped(keyword)}"
            yield schema, keyword, here
            if keyword in _MAPS and isinstance(value, dict):
                for name, one in value.items():
                    yield from _keywords(one, f"{here}/{_escaped(name)}")
            elif keyword not in _VALUES:
                yield from _keywords(value, here)


def _escaped(step: str) -> str:
    return step.replace("~", "~0").replace("/", "~1")


def _is_of(message: str, keyword: str, value: Any) -> bool:
    """Does llguidance speak of this keyword?"""
    if message.startswith("Unimplemented keys: "):
        return json.dumps(keyword) in message
    if message.startswith("Unknown format: "):
        return keyword == "format" and message.endswith(f": {value}")
    if keyword in ("pattern", "patternProperties"):
        return any(str(pattern) in message for pattern in (value if isinstance(value, dict) else [value]))
    if keyword in _UNQUOTED:
        return _UNQUOTED[keyword] in message
    return f"'{keyword}'" in message and json.dumps(value)[:100] in message


def compile_grammar(tokenizer: "LLTokenizer", made: str) -> "LLMatcher":
    """Of what `prepare` made. ValueError, which says why, for what gives up before the first token."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, made, log_level=0)
    first = matcher.deep_copy()
    mask = first.compute_bitmask()
    error = first.get_error()
    if error.startswith("NoExtensionBias") or not (error or any(mask)):
        raise ValueError("it allows no answer at all")
    if error:
        raise ValueError(f"it gives up at once: {_in_one_line(error)}")
    return matcher


def _in_one_line(text: str) -> str:
    """What a part of llguidance calls the error, or else the first line that it says; the rest draws where it is."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it says no more"]
    return next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])


def _held() -> tuple[int, int]:
    """Bytes of address space and of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        virtual, resident = file.read().split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(virtual) * page, int(resident) * page


def _try(tokenizer: "LLTokenizer", seconds: float, kind: str, text: str) -> tuple[str | None, int, str, Unheld]:
    """What is wrong with a grammar, if anything is; the bytes that it takes; what `prepare` makes of it.

    seconds: of processor time.
    """
    before = _held()[1]
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process: nothing handles it
    try:
        made, unheld = prepare(tokenizer, kind, text)
        matcher = compile_grammar(tokenizer, made)
    except MemoryError:
        os.abort()
    except BaseException as error:  # a panic of the library is no Exception
        return str(error), 0, "", ()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    taken = _held()[1] - before
    del matcher
    return None, max(0, taken), made, unheld


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    os.nice(5)  # answers go on beside it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    sys.path[:], made, memory = pickle.load(source)
    tokenizer = Vocabulary(*made).tokenizer()
    resource.setrlimit(resource.RLIMIT_AS, (_held()[0] + memory, resource.RLIM_INFINITY))
    while True:
        try:
            job = pickle.load(source)
        except EOFError:  # nobody is there any more
            return
        pickle.dump(_try(tokenizer, *job), sink)
        sink.flush()


if __name__ == "__main__":
    main()
