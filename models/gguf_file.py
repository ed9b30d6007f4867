"""The GGUF container: header, metadata, tensor table.

A small parser of our own: every count and offset is checked against the file's size before it is used, so a damaged
file costs neither memory nor time. What the fields mean stands in llama.cpp (`gguf-py`, `ggml/src/gguf.cpp`).
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PpsdError
from .files import unfit


class Kind(IntEnum):
    """llama.cpp's types of tensors: those that are supported, by its numbers."""

    F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
    Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = range(10, 15)
    IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS = range(16, 24)
    IQ1_M, BF16, TQ1_0, TQ2_0, MXFP4 = 29, 30, 34, 35, 39


# Bytes of a block of so many values.
_SIZES = {
    1: {Kind.F32: 4, Kind.F16: 2, Kind.BF16: 2},
    32: {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q5_0: 22, Kind.Q5_1: 24, Kind.Q8_0: 34, Kind.IQ4_NL: 18, Kind.MXFP4: 17},
    256: {Kind.Q2_K: 84, Kind.Q3_K: 110, Kind.Q4_K: 144, Kind.Q5_K: 176, Kind.Q6_K: 210, Kind.IQ4_XS: 136}
    | {Kind.IQ1_S: 50, Kind.IQ1_M: 56, Kind.IQ2_XXS: 66, Kind.IQ2_XS: 74, Kind.IQ2_S: 82, Kind.IQ3_XXS: 98}
    | {Kind.IQ3_S: 110, Kind.TQ1_0: 54, Kind.TQ2_0: 66},
}
BLOCKS = {kind: (values, size) for values, sizes in _SIZES.items() for kind, size in sizes.items()}
# The `gguf` package has the tables that these go by: it decodes them, a matrix at a time, and not the C++ extension.
BY_TABLE = {
    *(Kind.IQ1_S, Kind.IQ1_M, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S),
    *(Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4),
}
_LARGEST_FLOAT32 = 3.4028234663852886e38

# By GGUF's number of the type, as numpy writes it; 8 and 9 are strings and arrays.
_SCALARS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
_STRING, _ARRAY = 8, 9

_MOST = 1 << 22  # items, beyond what any published file has: a damaged count costs seconds
_PART = re.compile(r"(.+-)(\d{5})(-of-)(\d{5})(\.gguf)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class GgufTensor:
    name: str
    kind: Kind
    shape: tuple[int, ...]  # rows first, as in Hugging Face: (out, in) or (n,)
    start: int  # of its data, from the start of the file
    path: Path  # of that file, which may be one part of several

    @property
    def row_bytes(self) -> int:
        block, size = BLOCKS[self.kind]
        return self.shape[-1] // block * size

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


@dataclass(frozen=True)
class GgufFile:
    """A parsed file: its metadata and where its tensors lie."""

    path: Path
    values: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def bad(self, place: str, found: object, wanted: object = "") -> PpsdError:
        return unfit(self.path, place, found, wanted)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """What the metadata says, of this type; float takes whole numbers too. default: None: it has to be there."""
        value = self.values.get(key, default)
        if value is None:
            raise self.bad(key, "missing")
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise self.bad(key, f"of the type {type(value).__name__}", kind.__name__)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive number. An array stands for its number where it says the same for every layer."""
        value = self.values.get(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and len(set(value.tolist())) == 1:
            value = int(value[0])
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.bad(key, "missing" if value is None else value, "a positive number, of all layers the same")
        return value

    def number(self, key: str, default: float | None = None, unknown: bool = False) -> float:
        """A positive number, as the shortest decimal that rounds to the same float32: 1e-05, not 9.99999974e-06.

        unknown: or 0, which stands for that.
        """
        value = self.get(key, float, default)
        if not (0 < value <= _LARGEST_FLOAT32 or (unknown and value == 0)):
            raise self.bad(key, value, "a positive number")
        return float(str(np.float32(value)))

    def numbers(self, key: str, count: int) -> NDArray[Any]:
        """One finite number for each of `count` tokens."""
        value = self.get(key, np.ndarray)
        if len(value) != count or not np.isfinite(value).all():
            raise self.bad(key, f"{len(value)} numbers or NaN", f"a finite one for each of {count} tokens")
        return value

    def token_id(self, key: str, vocabulary: int, default: int | None = None) -> int | None:
        """None, or the default, where the file names no token of the vocabulary: 2^32 - 1 is a way to say none."""
        value = self.get(key, int, -1)
        if 0 <= value < vocabulary:
            return value
        return default if default is not None and default < vocabulary else None


class _Cursor:
    """Little-endian values off a buffer; whatever points past its end is refused before it is read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def need(self, good: bool, what: str = "not what a writer of GGUF writes") -> None:
        if not good:
            raise unfit(self.path, f"byte {self.at}", what)

    def take(self, count: int) -> bytes:
        self.need(count <= len(self.data) - self.at, "followed by too little")
        self.at += count
        return self.data[self.at - count : self.at]

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def count(self, smallest: int) -> int:
        """How many items follow, each of at least `smallest` bytes."""
        count = self.u64()
        self.need(count * smallest <= len(self.data) - self.at and (smallest == 1 or count <= _MOST))
        return count

    def text(self) -> str:
        return self.take(self.u64()).decode("utf-8")

    def texts(self) -> list[str]:
        """An array of strings: a vocabulary has 100,000, so this loop calls nothing of ours."""
        data, length = self.data, struct.Struct("<Q").unpack_from
        count = self.count(8)
        begin, texts = self.at, []
        for _ in range(count):
            stop = begin + 8 + length(data, begin)[0]
            texts.append(data[begin + 8 : stop].decode("utf-8"))
            begin = stop
        self.at = begin
        self.take(0)  # says so where the last one ends beyond the file
        return texts

    def value(self, kind: int) -> Any:
        """A scalar as a Python value, an array of strings as a list, an array of numbers as a numpy array."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind = self.u32()
            return self.texts() if kind == _STRING else self._numbers(kind, self.count(1))
        return self._numbers(kind, 1)[0].item()

    def _numbers(self, kind: int, count: int) -> NDArray[Any]:
        self.need(kind < len(_SCALARS) and _SCALARS[kind] is not None)
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table; the tensors' data is only located. Raises PpsdError, or OSError from the system.

    A model may be split over NAME-00001-of-00003.gguf and so on: any part stands for all, which lie in one folder.
    """
    part = _read_file(path)
    count = part.get("split.count", int, 1)
    if count in (0, 1):
        return part
    parts = [part if found == path else _read_file(found) for found in _parts_of(path, count)]
    tensors = {name: tensor for other in parts for name, tensor in other.tensors.items()}
    for number, other in enumerate(parts):
        if other.values.get("split.no") != number:
            raise other.bad("split.no", other.values.get("split.no"), number)
    have = sum(len(other.tensors) for other in parts)
    announced = parts[0].get("split.tensors.count", int, have)
    if not len(tensors) == have == announced:
        raise parts[0].bad("split.tensors.count", announced, f"what the parts have, {len(tensors)} of {have},")
    return GgufFile(parts[0].path, parts[0].values, tensors)


def _parts_of(path: Path, count: int) -> list[Path]:
    """All parts, in order. Raises PpsdError where one is not there."""
    match = _PART.fullmatch(path.name)
    if not match or int(match[4]) != count:
        raise unfit(path, "its name", path.name, f"for a part of this split model NAME-00001-of-{count:05}.gguf")
    before, _, *after = match.groups()
    paths = [path.with_name(f"{before}{number:05}{''.join(after)}") for number in range(1, count + 1)]
    for other in paths:
        if not other.is_file():
            raise unfit(path, f"the part {other.name} beside it", "missing")
    return paths


def _read_file(path: Path) -> GgufFile:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise unfit(path, "its beginning", "another", "GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            try:
                return _parse(cursor)
            except (struct.error, OverflowError, UnicodeDecodeError) as error:
                raise unfit(path, f"byte {cursor.at}", f"damaged ({error})") from None


def _parse(cursor: _Cursor) -> GgufFile:
    cursor.take(4)
    if (version := cursor.u32()) not in (2, 3):
        raise unfit(cursor.path, "its version", version, "2 or 3, little-endian")
    # The least that a table entry takes: name length, dimension count, one dimension, type, offset.
    tensor_count, values = cursor.count(32), {}
    for _ in range(cursor.count(13)):
        key = cursor.text()
        cursor.need(key not in values, f"{key!r} for the second time")
        values[key] = cursor.value(cursor.u32())
    return GgufFile(cursor.path, values, _read_tensors(cursor, tensor_count, values.get("general.alignment", 32)))


def _read_tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, GgufTensor]:
    power = type(alignment) is int and alignment >= 1 and not alignment & (alignment - 1)
    cursor.need(power, f"after an alignment of {alignment!r}")
    entries = [_read_tensor(cursor) for _ in range(count)]
    data = cursor.at + -cursor.at % alignment
    expected = 0  # llama.cpp, too, accepts only tensors that follow each other without a gap
    for tensor in entries:
        size = tensor.rows * tensor.row_bytes
        fits = tensor.start == expected and data + expected + size <= len(cursor.data)
        cursor.need(fits, f"followed by another place than that of the tensor {tensor.name!r}")
        expected += size + -size % alignment
    tensors = {tensor.name: replace(tensor, start=data + tensor.start) for tensor in entries}
    cursor.need(len(tensors) == count, "after a tensor that is there twice")
    return tensors


def _read_tensor(cursor: _Cursor) -> GgufTensor:
    """One line of the table; its `start` still counts from where the tensors' data begins."""
    name = cursor.text()
    dimensions = cursor.u32()
    cursor.need(1 <= dimensions <= 4, f"after {dimensions} dimensions of the tensor {name!r}")
    shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))))
    number = cursor.u32()
    if number not in BLOCKS:
        supported = ", ".join(sorted(known.name for known in Kind))
        raise unfit(cursor.path, f"the tensor {name!r}", f"of ggml's type {number}", f"one of {supported}")
    kind = Kind(number)
    whole = min(shape) >= 1 and shape[-1] % BLOCKS[kind][0] == 0
    cursor.need(whole, f"after a shape of the tensor {name!r}, {shape}, which {kind.name} does not allow")
    return GgufTensor(name, kind, shape, cursor.u64(), cursor.path)
