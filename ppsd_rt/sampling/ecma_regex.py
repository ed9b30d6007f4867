"""Regular expressions of JSON Schema (ECMA-262) as terminals of llguidance's Lark, over text as JSON quotes it.

A terminal is what stands between two quotation marks, these included. No mark stands alone inside, so that `^` and `$`
are the marks, and `&` and `~` of terminals make look-around of what surrounds them. Where readers differ (`\\w`, `\\s`,
`.` and `$` of Python, Rust and ECMA), only what all of them agree on is written.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any
from unicodedata import category

Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
_MOST_TIMES = 1 << 16
# What JSON cannot hold as it is, and how it is written here: in one way only, so that keys are known by their text.
_NAMED = {0x22: '\\"', 0x5C: "\\\\", 8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r"}
ESCAPED = {**{code: f"\\u{code:04x}" for code in (*range(32), 127)}, **_NAMED}
_QUOTED: Ranges = ((0, 31), (0x22, 0x22), (0x5C, 0x5C), (127, 127))
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)

_DIGIT: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029))
_SPACE += ((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))
_SOME_SPACE: Ranges = (*_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0x180E, 0x180E), (0xFEFF, 0xFEFF))
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x85, 0x85), (0x2028, 0x2029))
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


class Unheld(Exception):
    """What no grammar here can hold; its text says what that is."""


@dataclass(frozen=True)
class Set:
    """Characters, of ranges in order."""

    ranges: Ranges


@dataclass(frozen=True)
class Seq:
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Alt:
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Rep:
    item: Any
    least: int
    most: int | None


@dataclass(frozen=True)
class Look:
    item: Any
    ahead: bool
    negated: bool


BEGIN, END = "^", "$"
_ASSERTIONS = (BEGIN, END)


def quote(text: str) -> str:
    """As JSON, in the one way that grammars here write it."""
    return '"' + text.translate(ESCAPED) + '"'


def parse(pattern: str, wide: bool = False) -> Any:
    """Unheld for what is no ECMA expression or cannot be held anywhere.

    Narrow: what all readers find the pattern in. wide: what any of them does, for texts that it must not be found in.
    """
    return _Parser(pattern, wide).parse()


class _Parser:
    def __init__(self, pattern: str, wide: bool) -> None:
        self._text, self._at, self._wide = pattern, 0, wide

    def parse(self) -> Any:
        found = self._alternatives(0)
        if self._at < len(self._text):
            raise Unheld("a parenthesis closes that was not opened")
        return found

    def _next(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _match(self, rule: str) -> "re.Match[str] | None":
        found = re.compile(rule).match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        self._at += 1
        taken = self._text[self._at - 1 : self._at]
        if not taken:
            raise Unheld("the pattern ends too early")
        return taken

    def _alternatives(self, depth: int) -> Any:
        if depth > 50:
            raise Unheld("groups nest too deep")
        found = [self._sequence(depth)]
        while self._next("|"):
            found.append(self._sequence(depth))
        return found[0] if len(found) == 1 else Alt(tuple(found))

    def _sequence(self, depth: int) -> Seq:
        items: list[Any] = []
        while (character := self._peek()) and character not in "|)":
            if character == END and self._wide:  # Python's matches before a last new line, too
                items.append(Rep(Set(_LINE_ENDS[:1]), 0, 1))
            item = self._term(depth)
            times = self._times()
            if times is not None:
                if item in _ASSERTIONS or isinstance(item, Look):
                    raise Unheld("an assertion is repeated")
                item = Rep(item, *times)
            items.append(item)
        return Seq(tuple(items))

    def _times(self) -> tuple[int, int | None] | None:
        least, most = 0, None
        if self._next("?"):
            most = 1
        elif self._next("+"):
            least = 1
        elif self._next("{"):
            found = self._match(r"([0-9]{1,9})(,?)([0-9]{0,9})\}")
            if not found or (found[3] and not found[2]):
                raise Unheld("a brace that is no {n}, {n,} or {n,m}: write \\{")
            least = int(found[1])
            most = int(found[3]) if found[3] else None if found[2] else least
            if max(least, most or 0) > _MOST_TIMES or (most is not None and most < least):
                raise Unheld(f"a repetition is out of order or above {_MOST_TIMES}")
        elif not self._next("*"):
            return None
        self._next("?")  # lazy: the same texts
        if self._peek() and self._peek() in "*+?":
            raise Unheld("a repetition is repeated")
        return least, most

    def _term(self, depth: int) -> Any:
        character = self._take()
        if character in _ASSERTIONS:
            return character
        if character == ".":
            return Set(others(_LINE_ENDS[:1] if self._wide else _LINE_ENDS))
        if character == "[":
            return self._class()
        if character == "(":
            return self._group(depth)
        if character == "\\":
            return self._escape()
        if character in "*+?":
            raise Unheld("nothing is there to repeat")
        if character == "{":
            raise Unheld("a brace that is no {n}, {n,} or {n,m}: write \\{")
        return Set(((ord(character), ord(character)),))

    def _group(self, depth: int) -> Any:
        look = next((begin for begin in ("?=", "?!", "?<=", "?<!") if self._next(begin)), None)
        if look is None and not self._next("?:") and self._next("?") and not self._match(r"<[^\W\d]\w*>"):
            raise Unheld("a group begins as none of ECMA-262 does")
        negative = look in ("?!", "?<!")
        self._wide ^= negative
        inner = self._alternatives(depth + 1)
        self._wide ^= negative
        if not self._next(")"):
            raise Unheld("a parenthesis is not closed")
        return inner if look is None else Look(inner, "<" not in look, negative)

    def _escape(self) -> Any:
        kind = self._peek()
        if kind and kind in "bB":
            raise Unheld(f"a word's edge, \\{kind}")
        if kind and kind in "123456789k":
            raise Unheld("a reference back")
        return Set(self._characters(False))

    def _characters(self, negated: bool) -> Ranges:
        """After a backslash. negated: inside of a negated class."""
        kind = self._take()
        if kind in "dwsDWS":
            small = kind.lower()
            wide = (kind.islower() == negated) != self._wide
            found = _most(small) if wide else {"d": _DIGIT, "w": _WORD, "s": _SPACE}[small]
            return found if kind.islower() else others(found)
        if kind in "pP":
            named = self._match(r"\{(?:(?:General_Category|gc)=)?([A-Z][A-Za-z_]*)\}")
            name = _LONG.get(named[1], named[1]) if named else ""
            if not named or not _CATEGORIES.fullmatch(name):
                raise Unheld(r"a property other than a general category such as \p{L}")
            return categories(name) if kind == "p" else others(categories(name))
        code = self._code(kind)
        return ((code, code),)

    def _code(self, kind: str) -> int:
        if kind in _CONTROL:
            if kind == "0" and self._peek().isdigit():
                raise Unheld("an octal escape")
            return _CONTROL[kind]
        if kind == "c":
            letter = self._take()
            if not (letter.isascii() and letter.isalpha()):
                raise Unheld("an escape \\c without a letter")
            return ord(letter) % 32
        if kind in "xu":
            code = self._hex(kind)
            if 0xD800 <= code <= 0xDBFF and self._next("\\u"):
                low = self._hex("u")
                if 0xDC00 <= low <= 0xDFFF:
                    return 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
            if 0xD800 <= code <= 0xDFFF:
                raise Unheld("half of a surrogate pair")
            return code
        if kind.isascii() and (kind.isalnum() or kind == "_"):
            raise Unheld(f"\\{kind}, which is no escape of ECMA-262")
        return ord(kind)

    def _hex(self, kind: str) -> int:
        found = self._match(r"[0-9a-fA-F]{2}" if kind == "x" else r"[0-9a-fA-F]{4}|\{[0-9a-fA-F]{1,8}\}")
        if not found:
            raise Unheld(f"an escape \\{kind} without its digits")
        code = int(found[0].strip("{}"), 16)
        if code > _LAST:
            raise Unheld("a character beyond Unicode")
        return code

    def _class(self) -> Set:
        negated = self._next("^")
        ranges: list[tuple[int, int]] = []
        while not self._next("]"):
            low = self._member(negated)
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member(negated)
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] < low[0][0]:
                    raise Unheld("a class has a range out of order")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        return Set(others(_joined(ranges)) if negated else _joined(ranges))

    def _member(self, negated: bool) -> Ranges:
        character = self._take()
        if character != "\\":
            return ((ord(character), ord(character)),)
        return ((8, 8),) if self._next("b") else self._characters(negated)


_CATEGORIES = re.compile("L[ultmo]?|M[nce]?|N[dlo]?|P[cdseifo]?|S[mcko]?|Z[slp]?|C[cf]")
_LONG = {"Letter": "L", "Uppercase_Letter": "Lu", "Lowercase_Letter": "Ll", "Mark": "M", "Number": "N"}
_LONG |= {"Decimal_Number": "Nd", "Punctuation": "P", "punct": "P", "Symbol": "S", "Separator": "Z"}


@cache
def _by_category() -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for name, run in groupby(range(_LAST + 1), lambda code: category(chr(code))):
        codes = list(run)
        found.setdefault(name, []).append((codes[0], codes[-1]))
    return found


@cache
def categories(*names: str) -> Ranges:
    """Whose general category begins with one of the names."""
    return _joined(one for name, ranges in _by_category().items() if name.startswith(names) for one in ranges)


@cache
def _most(kind: str) -> Ranges:
    """What Python or Rust takes for a digit, a letter of a word or a space."""
    if kind == "w":
        return _joined(categories("L", "M", "N", "Pc"), ((0x200C, 0x200D), (0x24B6, 0x24E9), (0x1F130, 0x1F189)))
    return categories("Nd") if kind == "d" else _SOME_SPACE


def _joined(*several: Iterable[tuple[int, int]]) -> Ranges:
    made: list[tuple[int, int]] = []
    for low, high in sorted(one for ranges in several for one in ranges):
        if made and low <= made[-1][1] + 1:
            made[-1] = made[-1][0], max(high, made[-1][1])
        else:
            made.append((low, high))
    return tuple(made)


def others(ranges: Ranges) -> Ranges:
    """All other characters, without halves of pairs."""
    made, low = [], 0
    for first, last in _joined(ranges, _SURROGATES):
        if low < first:
            made.append((low, first - 1))
        low = last + 1
    return tuple([*made, (low, _LAST)] if low <= _LAST else made)


def _rust(ranges: Ranges) -> str:
    """For the inside of a class."""
    return "".join(f"\\x{{{a:X}}}" if a == b else f"\\x{{{a:X}}}-\\x{{{b:X}}}" for a, b in ranges)


def _has(item: Any, kinds: tuple[Any, ...]) -> bool:
    if item in _ASSERTIONS:
        return item in kinds
    if isinstance(item, Look):
        return Look in kinds or _has(item.item, kinds)
    if isinstance(item, Rep):
        return _has(item.item, kinds)
    return isinstance(item, Seq | Alt) and any(_has(one, kinds) for one in item.items)


_PLACED = (BEGIN, END, Look)
CHARACTER = r'([^"\\\x00-\x1F\x7F]|\\(["\\bfnrt]|u00(0[0-7bef]|1[0-9a-f]|7f)))'
TEXT = f"/{CHARACTER}*/"
MARK = r'"\""'


def terminal(pattern: Any) -> str:
    """An expression of a Lark terminal: a JSON string whose text the parsed pattern is found in. Unheld."""
    return _both(pattern, True, True)


def _both(item: Any, first: bool, last: bool) -> str:
    """first, last: it begins with the string's mark and all before what is found; ends with all after it."""
    if isinstance(item, Alt):
        return "(" + " | ".join(_both(one, first, last) for one in item.items) + ")"
    items = item.items if isinstance(item, Seq) else (item,)
    if not first and not last:
        return _inside(item)
    head, at = "", 0
    if first:
        if items and items[0] == BEGIN:
            head, at = MARK, 1
        elif items and isinstance(items[0], Seq | Alt) and _has(items[0], (BEGIN,)):
            alone = last and len(items) == 1
            head, at = _both(items[0], True, alone), 1
            if alone:
                return head
        else:
            head = f"{MARK} {TEXT}"
    while at < len(items):
        one = items[at]
        if isinstance(one, Look) and not one.ahead:
            if not first:
                raise Unheld("a look behind inside of a repetition or a group")
            head = f"({head} & {'~' if one.negated else ''}({_both(one.item, True, False)}))"
        elif one == BEGIN and head == MARK:
            pass
        elif last and (one == END or isinstance(one, Look) or (at == len(items) - 1 and _has(one, _PLACED))):
            return f"({head} {_tail(items[at:], head == MARK)})"
        else:
            head += " " + _inside(one)
        at += 1
    return f"({head} {TEXT} {MARK})" if last else f"({head})" if head.strip() else '""'


def _without_begin(item: Any) -> Any:
    """At the begin of the string, where `^` says nothing."""
    if isinstance(item, Alt):
        return Alt(tuple(map(_without_begin, item.items)))
    if isinstance(item, Seq) and item.items:
        first = item.items[0]
        return Seq(item.items[1:] if first == BEGIN else (_without_begin(first), *item.items[1:]))
    return item


def _tail(items: tuple[Any, ...], begins: bool = False) -> str:
    """From here to the end of the string. begins: nothing but its mark came before."""
    if not items:
        return f"{TEXT} {MARK}"
    one, rest = items[0], items[1:]
    if one == END:
        if any(other != END for other in rest):
            raise Unheld("something follows the end, $")
        return MARK
    if isinstance(one, Look) and one.ahead:
        ahead = _both(_without_begin(one.item) if begins else one.item, False, True)
        return f"({'~' if one.negated else ''}({ahead}) & ({_tail(rest, begins)}))"
    if begins and one == BEGIN:
        return _tail(rest, True)
    if not rest and _has(one, _PLACED) and isinstance(one, Seq | Alt):
        return _both(one, False, True)
    return f"{_inside(one)} {_tail(rest)}"


def _inside(item: Any) -> str:
    """Of what is found, as JSON writes it."""
    if item in _ASSERTIONS or isinstance(item, Look):
        raise Unheld("an assertion (^, $ or look-around) inside of a repetition or in the middle")
    if isinstance(item, Set):
        return _set(item)
    if isinstance(item, Rep):
        most = "" if item.most is None else item.most
        if item.most == 0:
            return '""'
        return f"({_inside(item.item)}){{{item.least},{most}}}"
    parts = [_inside(one) for one in item.items]
    if isinstance(item, Alt):
        return "(" + " | ".join(parts) + ")"
    return "(" + " ".join(parts) + ")" if parts else '""'


def _set(found: Set) -> str:
    escaped = [text for code, text in ESCAPED.items() if any(low <= code <= high for low, high in found.ranges)]
    plain = others(_joined(others(found.ranges), _QUOTED))
    shown = [f"[{_rust(plain)}]"] if plain else []
    if not shown and not escaped:
        raise Unheld("a class without any character")
    return "/(" + "|".join([*shown, *(one.replace("\\", r"\x5C").replace('"', r"\x22") for one in escaped)]) + ")/"


def matcher(item: Any) -> "re.Pattern[str]":
    """The same in Python, to judge values that are known."""
    return re.compile(_python(item))


def _python(item: Any) -> str:
    if item in _ASSERTIONS:
        return r"\A" if item == BEGIN else r"\Z"
    if isinstance(item, Look):
        return f"(?{'' if item.ahead else '<'}{'!' if item.negated else '='}{_python(item.item)})"
    if isinstance(item, Rep):
        return f"(?:{_python(item.item)}){{{item.least},{'' if item.most is None else item.most}}}"
    if isinstance(item, Alt):
        return "(?:" + "|".join(map(_python, item.items)) + ")"
    if isinstance(item, Seq):
        return "".join(map(_python, item.items))
    return "[" + "".join(f"\\U{low:08X}-\\U{high:08X}" for low, high in item.ranges) + "]"
