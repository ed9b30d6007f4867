"""Reads an answer as it comes: what is thought, what is said, which tools are called with what.

A call goes out whole, once every strict reader takes its name and its arguments. What a small model leaves a little
broken is mended; what cannot be is text.
"""

import ast
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from uuid import uuid4

from ..strict_json import fault
from .tools import FENCE, LLAMA, MISTRAL_11, NAME, Json, Syntax

_MOST_NAME = 200  # characters that may stand between a mark and a brace
_SPARE = " \n\t\r,;]}"  # after calls, and what a model writes too many of
_OPENS = re.compile(r"\s*(?:```)?\s*(?:json|xml)?\s*")  # before a call, and what may become that
_OPENING = re.compile(r"(?:`{1,2}|j|js|jso|x|xm)?")
_KEYS = {"name", "arguments", "parameters", "type", "function", "id"}
_KEY, _NAMED = re.compile(r"""[\[\s]*\{\s*["'](\w+)["']"""), re.compile(r'[\[\s]*\{\s*"name"\s*:\s*"([^"\\]{0,128})"')
_CALL = re.compile(r"""(?=\{\s*["'](?:name|type|function)["']\s*:)""")
_CLOSED_BY = {"{": "}", "[": "]"}
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class Piece:
    """kind: of a `call`, which is whole, the text is its arguments."""

    kind: Literal["thought", "said", "call"]
    text: str
    name: str = ""
    id: str = ""


class Reader:
    """Of one answer. Pieces come as early as they are certain."""

    def __init__(
        self, syntax: Syntax | None, names: frozenset[str], thinks: bool, inside: bool, one: bool = False
    ) -> None:
        """syntax: None where no calls are looked for. names: of the tools. thinks: look for `<think>`; inside: the
        prompt has ended with it. one: calls after the first do not count."""
        self._syntax, self._names, self._rest = syntax or Syntax(""), names, ""
        self._state = self._thinking if inside else self._beginning if thinks else self._saying
        self._begun, self._trim = False, inside
        self._mark = ""  # with which calls begin, and the blanks before it
        self._scan, self._closes, self._last = _Scan(()), list[str](), ("", "")
        self.calls, self._one = 0, one

    def push(self, text: str) -> list[Piece]:
        self._rest += text
        return self._read(False)

    def end(self) -> list[Piece]:
        """What was held back, at the end of the answer."""
        pieces = self._read(True)
        if self._rest:
            pieces.append(Piece("thought" if self._state == self._thinking else "said", self._rest))
        return pieces

    def _read(self, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        state = None
        while state != (self._state, self._rest):
            state = self._state, self._rest
            pieces += self._state(last)
        return [piece for piece in pieces if piece.text]

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    # --- states: each takes what it is certain of from the rest, and may set the next state ---

    def _beginning(self, last: bool) -> list[Piece]:
        text = self._rest.lstrip()
        if text.startswith("<think>"):
            self._rest, self._state, self._trim = text.removeprefix("<think>"), self._thinking, True
        elif last or not "<think>".startswith(text):
            self._state = self._saying
        return []

    def _thinking(self, last: bool) -> list[Piece]:
        if self._trim:
            self._rest = self._rest.lstrip()
            self._trim = not self._rest
        thought, found, after = self._rest.partition("</think>")
        if found:
            self._rest, self._state, self._trim = after, self._saying, True
            return [Piece("thought", thought.rstrip())]
        return [Piece("thought", self._take(self._certain(("</think>",), last)))]

    def _saying(self, last: bool) -> list[Piece]:
        if self._trim:
            self._rest = self._rest.lstrip()
            self._trim = not self._rest
        marks = self._syntax.marks
        if self._syntax.bare and not self._begun:
            text = self._rest.lstrip()
            if not text and not last:
                return []
            if text.startswith("{"):
                self._take_mark(len(self._rest) - len(text))
                return []
        places = [(place, mark) for mark in marks if (place := self._rest.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            said = self._take(len(self._rest[:place].rstrip()))
            self._take_mark(place - len(said) + len(mark))
        else:
            said = self._take(self._certain(marks, last))
        self._begun, self._last = self._begun or bool(said), ("", "") if said.strip() else self._last
        return [Piece("said", said)]

    def _take_mark(self, count: int) -> None:
        self._mark, self._state = self._take(count), self._calling
        self._scan = _Scan((*self._syntax.marks, *filter(None, [self._syntax.close])))

    def _calling(self, last: bool) -> list[Piece]:
        """After a mark, or at a brace that begins the answer."""
        opens = _OPENS.match(self._rest)
        begin = opens.end() if opens and self._syntax is not MISTRAL_11 else 0
        if not last and _OPENING.fullmatch(self._rest, begin):
            return []
        if not self._promising(self._rest[begin:]):
            return self._no_call(0)
        end = self._scan.end(self._rest, begin, last)
        if end is None:
            return []
        pieces = self._pieces(self._rest[begin:end])
        if pieces is None:  # a quote that does not end may hide a mark
            end = min(
                (place for mark in self._scan.marks if (place := self._rest.find(mark, begin, end)) > 0), default=end
            )
            pieces = self._pieces(self._rest[begin:end])
        if pieces is None:
            return self._no_call(end)
        self._take(end)
        self._mark, self._state, self._closes = "", self._closing, [FENCE, self._syntax.close]
        return pieces

    def _closing(self, last: bool) -> list[Piece]:
        """After calls: what closes them."""
        text = self._rest.lstrip()
        for close in self._closes:
            if close and text.startswith(close):
                self._rest = text.removeprefix(close)
                self._closes.remove(close)
                return []
        if last or (text and not any(close.startswith(text) for close in self._closes)):
            self._rest, self._state, self._begun = text, self._saying, True
        return []

    def _promising(self, text: str) -> bool:
        """May calls begin so?"""
        if self._syntax is MISTRAL_11:
            return len(text.partition("{")[0]) <= _MOST_NAME
        key, name = _KEY.match(text), _NAMED.match(text)
        other = name is not None and self._must_be_known and name[1] not in self._names
        return text.lstrip("[ \n\t\r")[:1] in ("", "{") and (key is None or key[1] in _KEYS) and not other

    @property
    def _must_be_known(self) -> bool:
        """Without a mark, JSON may be other JSON; so may all of Llama's answers."""
        return self._syntax is LLAMA or not self._mark.strip().strip(FENCE)

    def _pieces(self, text: str) -> list[Piece] | None:
        """Of a text in which calls stand; None: there are none."""
        if self._syntax is MISTRAL_11:
            name, _, after = text.partition("{")
            name = re.split(r"\[(?:CALL_ID|ARGS)\]", name)[0].strip()
            text = f'{{"name": {json.dumps(name)}, "arguments": {{{after}}}'
        calls = [self._call_of(value, not self._must_be_known) for value in _values(text)]
        if calls and None not in calls:
            return [piece for call in calls if call for piece in self._call(*call)]
        parts = [(part, self._call_of(_mended(part), False)) for part in _CALL.split(text) if part.strip(f"[{_SPARE}")]
        if not any(call for _, call in parts):
            return None
        return [piece for part, call in parts for piece in (self._call(*call) if call else [Piece("said", part)])]

    def _call_of(self, value: Any, any_name: bool) -> tuple[str, str] | None:
        """Name and arguments; None for what a strict reader would not take, and for a name that is no tool's."""
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
            return None
        given = value.get("arguments", value.get("parameters")) or {}
        if isinstance(given, str):
            given = next(iter(_values(given)), None)
        named = name in self._names or (any_name and re.fullmatch(NAME, name) is not None)
        if not named or not isinstance(given, dict) or fault(given):
            return None
        return name, json.dumps(given, ensure_ascii=False)

    def _call(self, name: str, arguments: str) -> list[Piece]:
        """Nothing where it is the call before it once more."""
        if (name, arguments) == self._last or (self._one and self.calls):
            return []
        self.calls, self._last = self.calls + 1, (name, arguments)
        letters = uuid4().hex
        id = letters[:9] if "[TOOL_CALLS]" in self._syntax.marks else f"call_{letters[:24]}"
        return [Piece("call", arguments, name, id)]

    def _no_call(self, end: int) -> list[Piece]:
        """What looked like a call is text."""
        said, self._mark = self._mark + self._take(end), ""
        self._state, self._begun, self._last = self._saying, True, ("", "")
        return [Piece("said", said)]

    def _certain(self, marks: tuple[str, ...], last: bool) -> int:
        """How many characters of the rest are no beginning of a mark, nor white space before one."""
        if last:
            return len(self._rest)
        held = max((n for mark in marks for n in range(1, len(mark)) if self._rest.endswith(mark[:n])), default=0)
        return len(self._rest[: len(self._rest) - held].rstrip()) if marks else len(self._rest)


def _values(text: str) -> list[Any]:
    """Of one JSON value after the other; none where the text has anything else."""
    found, place = [], 0
    try:
        while rest := text[place:].lstrip(f"[{_SPARE}"):
            value, place = _DECODER.raw_decode(text, len(text) - len(rest))
            found.append(value)
    except (ValueError, RecursionError):
        return []
    return found


def _mended(text: str) -> Any:
    """Of a value whose brackets do not pair, that has a comma too many, or that is written as in Python."""
    made, open, quoted, escaped = list[str](), list[str](), False, False
    for character in text:
        if quoted:
            quoted, escaped = character != '"' or escaped, character == "\\" and not escaped
        elif character in "]}":
            while character in open and open[-1] != character:
                made.append(open.pop())
            if not open or open[-1] != character:
                continue
            while made[-1] in ", \n":
                made.pop()
            open.pop()
        elif character in "{[":
            open.append(_CLOSED_BY[character])
        else:
            quoted = character == '"'
        made.append(character)
    whole = "".join(made).rstrip(" \n\t\r,;") + "".join(reversed(open))
    if len(found := _values(whole)) == 1:
        return found[0]
    try:
        return None if quoted else ast.literal_eval(whole)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class _Scan:
    """Where do calls end that come in pieces? At a mark outside of quotes; after a value, where another text begins."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.marks, self._begins = marks, {mark[0] for mark in marks}
        self._place = self._depth = self._values = 0
        self._quoted = self._escaped = False

    def end(self, text: str, begin: int, last: bool) -> int | None:
        """The place; None: it is not there yet. text: the same as before, and more."""
        for place in range(max(self._place, begin), len(text)):
            character = text[place]
            if self._quoted:
                self._quoted = character != '"' or self._escaped
                self._escaped = character == "\\" and not self._escaped
            elif character == '"':
                self._quoted = True
            elif character in self._begins and any(text.startswith(mark, place) for mark in self.marks):
                return place
            elif character in self._begins and not last and any(mark.startswith(text[place:]) for mark in self.marks):
                self._place = place
                return None
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth = max(0, self._depth - 1)
                self._values += self._depth == 0
            elif self._values and self._depth == 0 and character not in _SPARE + ":":
                return place
        self._place = len(text)
        return len(text) if last else None


@dataclass
class Block:
    kind: Literal["thought", "said", "call"]
    index: int
    text: str = ""  # of a call: its arguments
    name: str = ""
    id: str = ""


Step = tuple[Literal["begin", "more", "end"], Block, str]  # more: with this text


class Blocks:
    """An answer as a row of blocks, each of one kind."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open = False

    def add(self, pieces: Iterable[Piece], last: bool = False) -> Iterator[Step]:
        """last: no more pieces come."""
        for piece in pieces:
            if piece.kind == "call" or not self._open or self.all[-1].kind != piece.kind:
                yield from self._end()
                self.all.append(Block(piece.kind, len(self.all), name=piece.name, id=piece.id))
                self._open = True
                yield "begin", self.all[-1], ""
            self.all[-1].text += piece.text
            yield "more", self.all[-1], piece.text
        if last:
            yield from self._end()

    def _end(self) -> Iterator[Step]:
        """Of the block at hand."""
        if self._open:
            self._open = False
            yield "end", self.all[-1], ""


def message_of(pieces: Iterable[Piece | Block]) -> Json:
    """An answer as a message: role, content, and reasoning_content and tool_calls where there are any."""
    pieces = list(pieces)
    said, thought = ("".join(one.text for one in pieces if one.kind == kind) for kind in ("said", "thought"))
    calls = [
        {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.text}}
        for one in pieces
        if one.kind == "call"
    ]
    made = {"role": "assistant", "content": said if said or not calls else None}
    return made | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})
