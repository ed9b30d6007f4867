"""Compiles grammars; as a program, tries them out under limits, so that a hopeless one takes nothing but this process.

llguidance has limits for every step of an answer, but none for the time of some compilations, and it may overflow the
stack. `python -I grammar_worker.py` reads pickles: its set-up, then one job at a time. It answers each with a pickle,
or is ended by a limit. It imports nothing of this package: it has to start quickly.
"""

import json
import os
import pickle
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Between two parts of JSON. Models that do not know what to say next write white space until the answer's limit.
WHITE = r"[\x20\x0A\x0D\x09]{1,24}"
_MOST_UNIQUE = 16  # items of an array whose items must differ: llguidance does not know that they must
_STACK = 4 << 20  # bytes: what compiles on half of the usual stack does so on the threads of a server
# Of a schema, what constrains no value.
_NOTES = {"$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description"}
_NOTES |= {"example", "examples", "readOnly", "title", "writeOnly", "x-guidance"}
_LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")


class Vocabulary:
    """A tokenizer as llguidance asks for it: every token's bytes, as our decoders join them."""

    encode: Callable[[str], list[int]] | None = None

    def __init__(self, tokens: list[bytes], special_ids: list[int], bos_id: int | None, ends: list[int], size: int):
        """ends: the ids that end an answer. size: of the model's vocabulary, which may be larger."""
        self.tokens, self.special_token_ids, self.bos_token_id = tokens, special_ids, bos_id
        self.eos_token_id, self._ends, self._size = ends[0], ends, size

    def __call__(self, text: str) -> list[int]:
        """Of what a grammar forces. Without the model's way of cutting a text, the longest tokens do to try it out."""
        return self._made.greedy_tokenize(text) if self.encode is None else self.encode(text)

    def tokenizer(self) -> "LLTokenizer":
        import llguidance

        wrapped = llguidance.TokenizerWrapper(self)
        self._made = llguidance.LLTokenizer(wrapped, n_vocab=self._size, eos_token=self._ends)
        return self._made


def compile_grammar(tokenizer: "LLTokenizer", kind: str, text: str) -> "LLMatcher":
    """ValueError, which says why, for what is no grammar, says nothing, or gives up before the first token."""
    from llguidance import LLMatcher

    if kind == "json_schema":
        schema = _schema(text)
        made = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITE})
    elif kind == "regex":
        made = LLMatcher.grammar_from_regex(text)
    else:
        made = LLMatcher.grammar_from_lark(text)
    matcher = LLMatcher(tokenizer, made, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    first = matcher.deep_copy()
    mask = first.compute_bitmask()
    if first.get_error().startswith("NoExtensionBias") or not (first.is_error() or any(mask)):
        raise ValueError("it allows no answer at all")
    if first.is_error():
        raise ValueError(f"it gives up at once: {first.get_error()}")
    return matcher


def _schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    if _says_nothing(schema, schema, ()):
        raise ValueError("it allows every value: say at least a type")
    if isinstance(schema, dict) and (schema.get("x-guidance") or {}).get("lenient"):
        return json.dumps(_near(schema, schema))
    return text


def _says_nothing(schema: Any, root: Any, seen: tuple[str, ...], again: bool = True) -> bool:
    """Does it allow every value, or refer to nothing but itself? again: what a reference back says, alone or beside
    others that all hold, nothing; as one choice among others it adds no value to them."""
    if not isinstance(schema, dict):
        return schema is True
    said = {key: value for key, value in schema.items() if key not in _NOTES}
    for key, value in said.items():
        if key == "$ref":
            if not (again if value in seen else _says_nothing(_resolved(root, value), root, (*seen, value), again)):
                return False
        elif key == "allOf" and isinstance(value, list):
            if not all(_says_nothing(one, root, seen, again) for one in value):
                return False
        elif key in ("anyOf", "oneOf") and isinstance(value, list):
            if not any(_says_nothing(one, root, seen, False) for one in value):
                return False
        else:
            return False
    return True


def _resolved(root: Any, reference: object) -> Any:
    """What a reference inside the schema points to; False, which allows nothing, where it points to nothing here."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    for step in reference[1:].split("/")[1:]:
        root = root.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return False if root is None else root


def _near(schema: Any, root: Any) -> Any:
    """What llguidance can do of a schema: without patterns that look around, such as those that pydantic writes for
    Decimal; and with a bound where items must differ, or a small model repeats them up to the answer's limit."""
    if isinstance(schema, list):
        return [_near(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {
        key: _near(value, root)
        for key, value in schema.items()
        if not (key == "pattern" and isinstance(value, str) and _LOOKS_AROUND.search(value))
    }
    if schema.get("uniqueItems") is True and "maxItems" not in schema:
        items, least = schema.get("items"), schema.get("minItems")
        if isinstance(items, dict) and "$ref" in items:
            items = _resolved(root, items["$ref"])
        values = items.get("enum") if isinstance(items, dict) else None
        most = len(values) if isinstance(values, list) else _MOST_UNIQUE
        made["maxItems"] = max(most, least) if isinstance(least, int) else most
    return made


def _held() -> tuple[int, int]:
    """Bytes of address space and of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        virtual, resident = file.read().split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(virtual) * page, int(resident) * page


def _try(tokenizer: "LLTokenizer", seconds: float, memory: int, kind: str, text: str) -> tuple[str | None, int]:
    """What is wrong with a grammar, if anything is, and the bytes that it takes. seconds: of processor time."""
    address, before = _held()
    resource.setrlimit(resource.RLIMIT_AS, (address + memory, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process: nothing handles it
    try:
        matcher = compile_grammar(tokenizer, kind, text)
    except MemoryError:
        os.abort()
    except BaseException as error:  # a panic of the library is no Exception
        return str(error), 0
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    taken = _held()[1] - before
    del matcher
    return None, max(0, taken)


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    os.nice(5)  # answers go on beside it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    sys.path[:], made = pickle.load(source)
    tokenizer = Vocabulary(*made).tokenizer()
    while True:
        try:
            job = pickle.load(source)
        except EOFError:  # nobody is there any more
            return
        pickle.dump(_try(tokenizer, *job), sink)
        sink.flush()


if __name__ == "__main__":
    main()
