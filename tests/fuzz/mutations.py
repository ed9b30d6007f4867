"""Strategies that damage good input: JSON by its values, binary formats by their fields, texts by their words."""

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

# Values as JSON writes them, so that what Python's own writer refuses (1e999, deep nesting, a key twice) can be there.
# Simple ones come first: a failure is shrunk towards them.
FRAGMENTS = (
    *("null", "true", "false", "0", "1", "-1", "2", "3", "7", '""', '"x"', "[]", "{}", "[[]]", "[null]", "[1,1]"),
    *('{"a": 1}', '["x"]', "0.5", "-0.0", "1e-300", "1e300", "1e-45", "1e38", "1e999", "-1e999", "NaN", "Infinity"),
    *("-Infinity", "1024", "65536", "10000000", "2147483647", "2147483648", "4294967296", "9223372036854775807"),
    *("9223372036854775808", "18446744073709551616", "-9223372036854775809", "100000000000"),
    *("9" * 400, "-" + "9" * 400, "9" * 400 + ".5", "0." + "0" * 400 + "1", "9" * 5000),
    *('"\\u0000"', '"a\\nb"', '"\\u001b[31m"', '"\\ud800"', '"\\u202e"', '"../x"', '"/dev/zero"', '"1"', '"NaN"'),
    '"' + "x" * 100_000 + '"',
    "[" * 100_000,
    "[" * 400 + "]" * 400,
    '{"a":' * 400 + "1" + "}" * 400,
    "[" + ",".join(["0"] * 10_000) + "]",
)

TEXTS = (
    *("", " ", "0", "1", "-1", "2", "x", "-", "--", "=", ":", ",", "auto", "none", "nan", "inf", "-inf", "1e999"),
    *("0.5", "1e-300", "1e300", "1.0.0", "1e5", "0x10", "1_000", "²", "٣", "64", "1024", "2147483647", "2147483648"),
    *(
        "3000000000",
        "4294967296",
        "100000000000",
        "9223372036854775808",
        "18446744073709551616",
        "-9223372036854775809",
    ),
    *("9" * 20, "9" * 400, "9" * 5000, "x" * 5000, "a\nb", "a\rb", "\x1b[31m", "\x07", "\udc80", "\u202e", "/dev/null"),
    *("/dev/zero", "/dev/full", "/proc/self/mem", ".", "..", "/", "~", "~nobody", "{model}", "{head}", "{gguf}"),
    *("{prompts}", "{existing}", "{out}", "{missing}", "cuda", "cuda:0", "cuda:128", "cuda:" + "9" * 20, "cpu:0,cpu:1"),
)

# Special files: what `Place.put` makes of data that begins with this.
SPECIAL = b"@special "
SPECIALS = tuple(SPECIAL + kind for kind in (b"missing", b"empty", b"folder", b"loop", b"zero", b"null"))
PIPE = SPECIAL + b"pipe"  # whoever reads it waits for ever


def nasty_json() -> st.SearchStrategy[str]:
    return (
        st.sampled_from(FRAGMENTS)
        | st.integers().map(str)
        | st.floats().map(json.dumps)
        | st.text(max_size=6).map(json.dumps)
        | st.lists(st.sampled_from(FRAGMENTS[:40]), max_size=4).map(lambda items: f"[{','.join(items)}]")
    )


def nasty_text() -> st.SearchStrategy[str]:
    return st.sampled_from(TEXTS) | st.text(max_size=8) | st.integers().map(str) | st.floats().map(str)


class _Raw:
    """Texts that take the place of values after a document has been written."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def hold(self, text: str) -> str:
        self.texts.append(text)
        return f"\x01{len(self.texts) - 1}\x01"

    def write(self, document: Any) -> str:
        text = json.dumps(document)
        for number in reversed(range(len(self.texts))):  # later ones may hold earlier ones
            text = text.replace(f'"\\u0001{number}\\u0001"', self.texts[number])
        return text


@st.composite
def json_texts(draw: st.DrawFn, seeds: Sequence[Any]) -> str:
    """One of the documents with one to three values replaced, removed, added or given twice."""
    document = [copy.deepcopy(draw(st.sampled_from(seeds)))]
    raw = _Raw()
    for _ in range(draw(st.integers(1, 3))):
        holder, key = _place(draw, document)
        what = draw(st.sampled_from(("replace",) * 6 + ("remove", "twice", "add")))
        if what == "replace" or (isinstance(holder, list) and what != "remove"):
            holder[key] = raw.hold(draw(nasty_json()))
        elif what == "remove" and holder is not document:
            del holder[key]
        elif what == "twice":
            again = f"{json.dumps(holder[key])}, {json.dumps(key)}: {draw(nasty_json())}"
            holder[key] = raw.hold(again)
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from((key + "2", "", "a\nb", "\x1b", "type")))] = raw.hold(draw(nasty_json()))
    return raw.write(document)[1:-1]


def _place(draw: st.DrawFn, document: list[Any]) -> tuple[Any, Any]:
    """(holder, key) of any value, the whole document included; large tables are no likelier than small ones."""
    holder, key = document, 0
    while isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 4)):
        holder = holder[key]
        key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    return holder, key


def json_files(seeds: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """Of these documents: most are still JSON, some are damaged as bytes are, some are no files at all."""
    good = [json.dumps(seed).encode() for seed in seeds]
    texts = json_texts(seeds).map(lambda text: text.encode("utf-8", "surrogatepass"))
    return mostly(texts, damaged(good), st.sampled_from(SPECIALS))


@st.composite
def mostly(draw: st.DrawFn, usual: st.SearchStrategy[Any], *rare: st.SearchStrategy[Any]) -> Any:
    """Eight or nine times in ten the first."""
    number = draw(st.integers(0, 9))
    return draw(usual if number < 10 - len(rare) else rare[number - 10])


@st.composite
def damaged(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """Bits turned, pieces cut, put in, set to extremes or repeated; beginnings are hit more often."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(len(data), 256)) | st.integers(0, len(data)))
        what = draw(st.sampled_from(("turn", "set", "cut", "remove", "insert", "repeat")))
        if what == "turn" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del data[at:]
        elif what == "remove":
            del data[at : at + draw(st.integers(1, 64))]
        elif what == "repeat":
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
        else:
            piece = draw(extremes())
            data[at : at + (len(piece) if what == "set" else 0)] = piece
    return bytes(data)


def extremes() -> st.SearchStrategy[bytes]:
    """Little-endian numbers at the ends of their range, and small and odd ones."""
    ends = (0, 1, 2, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
    sizes = st.sampled_from((1, 2, 4, 8))
    return st.builds(
        lambda n, size: (n % 256**size).to_bytes(size, "little"), st.sampled_from(ends), sizes
    ) | st.binary(min_size=1, max_size=9)


def split_safetensors(data: bytes) -> tuple[bytes, bytes]:
    """(header, tensors)"""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def safetensors_files(seeds: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Their headers' values, lengths and bytes changed."""

    def whole(text: str, seed: bytes, length: int | None) -> bytes:
        header = text.encode("utf-8", "surrogatepass")
        return (len(header) if length is None else length).to_bytes(8, "little") + header + split_safetensors(seed)[1]

    def of(seed: bytes) -> st.SearchStrategy[bytes]:
        texts = json_texts([json.loads(split_safetensors(seed)[0])])
        lengths = st.sampled_from((0, 1, 2**31, 2**32, 2**40, 2**63, 2**64 - 1))
        changed = st.builds(whole, texts, st.just(seed), st.none())
        lying = st.builds(whole, texts, st.just(seed), lengths)
        return mostly(changed, lying, damaged([seed]), st.sampled_from(SPECIALS))

    return st.sampled_from(seeds).flatmap(of)


def gguf_fields(data: bytes) -> Iterator[tuple[int, int, str]]:
    """(begin, end, kind) of every field in front of the tensors: count, text, type, value, shape, offset."""
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    at = 4

    def number(size: int) -> int:
        nonlocal at
        at += size
        return int.from_bytes(data[at - size : at], "little")

    def field(size: int, kind: str) -> tuple[int, int, str]:
        nonlocal at
        at += size
        return at - size, at, kind

    yield field(4, "type")
    tensors, values = number(8), number(8)
    yield from ((8, 16, "count"), (16, 24, "count"))

    def text() -> Iterator[tuple[int, int, str]]:
        yield field(8, "count")
        yield field(int.from_bytes(data[at - 8 : at], "little"), "text")

    for _ in range(values):
        yield from text()
        yield field(4, "type")
        kind = int.from_bytes(data[at - 4 : at], "little")
        count = 1
        if kind == 9:
            yield field(4, "type")
            kind = int.from_bytes(data[at - 4 : at], "little")
            yield field(8, "count")
            count = int.from_bytes(data[at - 8 : at], "little")
        for _ in range(count):
            if kind == 8:
                yield from text()
            else:
                yield field(sizes[kind], "value")
    for _ in range(tensors):
        yield from text()
        yield field(4, "count")
        for _ in range(int.from_bytes(data[at - 4 : at], "little")):
            yield field(8, "shape")
        yield field(4, "type")
        yield field(8, "offset")


@st.composite
def gguf_files(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """One to three fields set to extremes, or replaced by ones of another length."""
    data = draw(st.sampled_from(seeds))
    fields = list(gguf_fields(data))
    # Tokens are most of a file's fields; those before and after them say more.
    few = [field for field in fields if field[0] < 800] + fields[-60:]
    chosen = draw(st.lists(st.sampled_from(few) | st.sampled_from(fields), min_size=1, max_size=3, unique=True))
    for begin, end, kind in sorted(chosen, reverse=True):
        if kind == "text":
            piece = draw(st.sampled_from((b"", b"x", b"\0", b"a\nb", b"\xff", b"\x1b[31m", b"x" * (end - begin))))
            resized = len(piece).to_bytes(8, "little") + piece
            data = data[: begin - 8] + resized + data[end:]
        else:
            piece = draw(extremes())
            data = data[:begin] + piece.ljust(end - begin, b"\0")[: end - begin] + data[end:]
    return data


@st.composite
def texts(draw: st.DrawFn, seeds: Sequence[str], separators: str) -> str:
    """One of them, with one to three of its words (between `separators`) replaced, removed, added or repeated."""
    text = draw(st.sampled_from(seeds))
    words = [""]
    for character in text:
        if character in separators or words[-1][-1:] in tuple(separators):
            words.append("")
        words[-1] += character
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(words)))
        what = draw(st.sampled_from(("replace", "replace", "replace", "remove", "insert", "repeat")))
        piece = [] if what == "remove" else words[at : at + 1] * 2 if what == "repeat" else [draw(nasty_text())]
        words[at : at + (what != "insert")] = piece
    return "".join(words)


@st.composite
def command_lines(draw: st.DrawFn, seeds: Sequence[Sequence[str]], options: Sequence[str]) -> list[str]:
    """One of them, with one to three arguments replaced, removed, added or repeated."""
    words = list(draw(st.sampled_from(seeds)))
    # What no command line can hold.
    nasty = nasty_text().map(lambda text: "".join(c for c in text if c != "\0" and not "\ud800" <= c < "\udc80"))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(words)))
        what = draw(
            st.sampled_from(("replace", "replace", "replace", "remove", "option", "option", "insert", "repeat"))
        )
        if what == "option":
            words[at:at] = [draw(st.sampled_from(options)), draw(nasty)]
        else:
            piece = [] if what == "remove" else words[at : at + 1] * 2 if what == "repeat" else [draw(nasty)]
            words[at : at + (what != "insert")] = piece
    return words
