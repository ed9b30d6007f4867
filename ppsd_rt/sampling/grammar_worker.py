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
from types import ModuleType
from typing import TYPE_CHECKING, Any

if __package__:
    from .json_schema import OPTIONS, Rules, rules
else:  # as a program: this folder becomes a package of its own
    sys.modules["grammars"] = ModuleType("grammars")
    sys.modules["grammars"].__path__ = [os.path.dirname(__file__)]
    from grammars.json_schema import OPTIONS, Rules, rules  # type: ignore[no-redef,import-not-found]

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_STACK = 4 << 20  # bytes: what compiles on half of the usual stack does so on the threads of a server
ASKS = "asks for what no grammar can hold"
Unheld = tuple[tuple[str, str], ...]  # places in a schema, and why what stands there is not held


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


def prepare(tokenizer: "LLTokenizer", kind: str, text: str) -> tuple[str, Unheld]:
    """A grammar as llguidance takes it. ValueError for a schema that is none, or that cannot be held and has to be."""
    if kind == "json_schema":
        try:
            made = _rules(tokenizer, json.loads(text))
        except RecursionError:
            raise ValueError("it nests too deep") from None
        return "\n".join(["%llguidance {}", f"start: {made.start}", *made.lines]), tuple(made.unheld)
    if kind != "lark" or "%json" not in text:
        return text, ()
    unheld: list[tuple[str, str]] = []
    lines = [text]
    decoder, at = json.JSONDecoder(), 0
    while found := re.compile(r"%json\s*(?=\{)").search(lines[0], at):
        schema, end = decoder.raw_decode(lines[0], found.end())
        made = _rules(tokenizer, schema, f"json{len(lines)}-")
        lines[0] = lines[0][: found.start()] + made.start + lines[0][end:]
        at = found.start()
        lines += made.lines
        unheld += made.unheld
    return "\n".join(lines), tuple(unheld)


def _rules(tokenizer: "LLTokenizer", schema: Any, prefix: str = "") -> Rules:
    from llguidance import LLMatcher

    def lives(terminal: str) -> bool:
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(f"start: T\nT: {terminal}"), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return _begins(matcher)

    made = rules(schema, lives, prefix)
    lenient = isinstance(schema, dict) and (schema.get(OPTIONS) or {}).get("lenient")
    if made.unheld and not lenient:
        said = "; ".join(f"at {place}: {why}" for place, why in made.unheld[:5])
        raise ValueError(f'{ASKS}, {said}. "strict": false leaves it out')
    return made


def compile_grammar(tokenizer: "LLTokenizer", kind: str, text: str) -> "LLMatcher":
    """Of what `prepare` made. ValueError, which says why, for what is no grammar or gives up before the first token."""
    from llguidance import LLMatcher

    made = LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)
    matcher = LLMatcher(tokenizer, made, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    if not _begins(matcher.deep_copy()):
        raise ValueError("it allows no answer at all")
    return matcher


def _begins(matcher: "LLMatcher") -> bool:
    """Is there a first token? ValueError where it gives up."""
    mask = matcher.compute_bitmask()
    if matcher.get_error().startswith("NoExtensionBias"):
        return False
    if matcher.is_error():
        raise ValueError(f"it gives up at once: {matcher.get_error()}")
    return any(mask)


def _held() -> tuple[int, int]:
    """Bytes of address space and of memory that this process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        virtual, resident = file.read().split()[:2]
    page = os.sysconf("SC_PAGE_SIZE")
    return int(virtual) * page, int(resident) * page


def _try(
    tokenizer: "LLTokenizer", seconds: float, memory: int, kind: str, text: str
) -> tuple[str | None, int, str, Unheld]:
    """What is wrong with a grammar, if anything is; the bytes that it takes; what `prepare` makes of it.

    seconds: of processor time.
    """
    address, before = _held()
    resource.setrlimit(resource.RLIMIT_AS, (address + memory, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process: nothing handles it
    try:
        made, unheld = prepare(tokenizer, kind, text)
        matcher = compile_grammar(tokenizer, kind, made)
    except MemoryError:
        os.abort()
    except BaseException as error:  # a panic of the library is no Exception
        return str(error), 0, "", ()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    taken = _held()[1] - before
    del matcher
    return None, max(0, taken), made, unheld


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
