"""Reads an answer as it comes: what is thought, what is said, which tools are called with what."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal
from uuid import uuid4

from .tools import LLAMA, MISTRAL_11, Syntax

_NAME = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_END = "</tool_call>"


@dataclass(frozen=True)
class Piece:
    """kind: `call` begins a call (its name is the text), whose arguments follow."""

    kind: Literal["thought", "said", "call", "arguments"]
    text: str
    id: str = ""


class Reader:
    """Of one answer. Pieces come as early as they are certain; only a call that is not one gives its text back late."""

    def __init__(self, syntax: Syntax | None, names: frozenset[str], thinks: bool, inside: bool) -> None:
        """syntax: None where no calls are looked for. names: of the tools. thinks: look for `<think>`; inside: the
        prompt has ended with it."""
        self._syntax, self._names, self._rest = syntax, names, ""
        self._state = self._thinking if inside else self._beginning if thinks else self._saying
        self._begun, self._trim = False, inside
        self._mark = ""  # before which no call has come yet
        self._braces, self._looked = _Braces(), 0
        self.calls = 0

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
        return [piece for piece in pieces if piece.text or piece.kind == "call"]

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
        syntax = self._syntax
        if syntax is None:
            return [Piece("said", self._take(len(self._rest)))]
        places = [(place, mark) for mark in syntax.marks if (place := self._rest.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            said = self._take(place)
            self._rest, self._state, self._mark = self._rest.removeprefix(mark), self._calling, mark
            return [Piece("said", said.rstrip())]
        if not syntax.head and syntax.call.startswith("{") and not self._begun:
            text = self._rest.lstrip()
            if text.startswith("{"):
                self._rest, self._state = text, self._calling
                return []
            if not text and not last:
                return []
        said = self._take(self._certain(syntax.marks, last))
        self._begun = self._begun or bool(said)
        return [Piece("said", said)]

    def _calling(self, last: bool) -> list[Piece]:
        """Before a call, or after one."""
        named = self._syntax is MISTRAL_11
        text = self._rest.lstrip() if named else self._rest.lstrip(" \n\t\r,;[]")
        if text.startswith(_END):
            self._rest, self._state, self._trim = text.removeprefix(_END), self._saying, True
        elif named and "{" in text:
            name, _, after = text.partition("{")
            self._rest, self._state, self._braces = "{" + after, self._passing, _Braces()
            return [self._call(re.split(r"\[(?:CALL_ID|ARGS)\]", name.replace("[TOOL_CALLS]", ""))[0].strip())]
        elif text.startswith("{"):
            self._rest, self._state, self._braces, self._looked = text, self._reading, _Braces(), 0
        elif text and not named and not _END.startswith(text):
            return self._no_call(0)
        elif last:
            self._rest = ""
        return []

    def _reading(self, last: bool) -> list[Piece]:
        """A call, up to its arguments."""
        found = _NAME.match(self._rest)
        name = json.loads(found[1], strict=False) if found else ""
        if found and self._is_tool(name):
            self._take(found.end())
            self._state, self._braces = self._passing, _Braces()
            return [self._call(name)]
        end = self._braces.end(self._rest[self._looked :])
        if end is None:
            self._looked = len(self._rest)
            return self._no_call(len(self._rest)) if last else []
        end += self._looked
        try:
            call = json.loads(self._rest[:end], strict=False)
        except ValueError:
            return self._no_call(end)
        inner = call.get("function")
        call = inner if isinstance(inner, dict) else call
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or not self._is_tool(name):
            return self._no_call(end)
        self._take(end)
        self._state = self._calling
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        return [self._call(name), Piece("arguments", arguments)]

    def _passing(self, last: bool) -> list[Piece]:
        """The arguments, as they are written."""
        end = self._braces.end(self._rest)
        if end is None:
            return [Piece("arguments", self._take(len(self._rest)))]
        arguments = self._take(end)
        self._state = self._calling if self._syntax is MISTRAL_11 else self._closing
        return [Piece("arguments", arguments)]

    def _closing(self, last: bool) -> list[Piece]:
        """The brace after the arguments, and what a model writes before it."""
        _, found, after = self._rest.partition("}")
        if found or last:
            self._rest, self._state = after, self._calling
        return []

    def _is_tool(self, name: str) -> bool:
        """Llama's answers may be other JSON."""
        return name in self._names if self._syntax is LLAMA else bool(name)

    def _no_call(self, end: int) -> list[Piece]:
        """What looked like a call is text."""
        said, self._mark = self._mark + self._take(end), ""
        self._state, self._begun = self._saying, True
        return [Piece("said", said)]

    def _call(self, name: str) -> Piece:
        self.calls, self._mark = self.calls + 1, ""
        letters = uuid4().hex
        mistral = self._syntax is not None and "[TOOL_CALLS]" in self._syntax.marks
        return Piece("call", name, letters[:9] if mistral else f"call_{letters[:24]}")

    def _certain(self, marks: tuple[str, ...], last: bool) -> int:
        """How many characters of the rest are no beginning of a mark, nor white space before one."""
        if last:
            return len(self._rest)
        held = max((n for mark in marks for n in range(1, len(mark)) if self._rest.endswith(mark[:n])), default=0)
        return len(self._rest[: len(self._rest) - held].rstrip())


class _Braces:
    """Where does a JSON object end that comes in pieces?"""

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def end(self, text: str) -> int | None:
        """The place after the last brace; None: it is not there yet. `text` goes on where the last one stopped."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character == "{":
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


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

    def add(self, pieces: Iterable[Piece], last: bool) -> Iterator[Step]:
        """last: no more pieces come."""
        for piece in pieces:
            kind = "call" if piece.kind == "arguments" else piece.kind
            if piece.kind == "call" or not self._open or self.all[-1].kind != kind:
                yield from self._end()
                block = Block(kind, len(self.all), id=piece.id, name=piece.text if piece.kind == "call" else "")
                self.all.append(block)
                self._open = True
                yield "begin", block, ""
            if piece.kind != "call":
                self.all[-1].text += piece.text
                yield "more", self.all[-1], piece.text
        if last:
            yield from self._end()

    def _end(self) -> Iterator[Step]:
        """Of the block at hand."""
        if self._open:
            self._open = False
            yield "end", self.all[-1], ""
