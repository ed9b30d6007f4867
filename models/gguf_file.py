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

# Beyond what any published file has, and little enough that a damaged count costs seconds at most.
_MOST_KEYS, _MOST_TENSORS, _MOST_STRINGS = 1 << 16, 1 << 16, 1 << 22
_MOST_PARTS = 10_000
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

    def bad(self, problem: str) -> PpsdError:
        return PpsdError(f"{self.path}: {problem}")

    def value(self, key: str, default: Any, *kinds: type) -> Any:
        """Of one of these types. default: None: there has to be one."""
        value = self.values.get(key, default)
        if value is None:
            raise self.bad(f"the metadata lacks {key}; convert the model again with a current llama.cpp")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.bad(f"the metadata {key} is of the wrong type ({type(value).__name__})")
        return value

    def scalar(self, key: str, default: Any) -> Any:
        return self.value(key, default, int, float, bool)

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive number. An array stands for its number where it says the same for every layer."""
        value = self.value(key, default, int, np.ndarray)
        if isinstance(value, np.ndarray):
            if len(value) == 0 or value.dtype.kind not in "iu" or (value != value[0]).any():
                raise self.bad(f"{key} differs from layer to layer, which is not supported")
            value = int(value[0])
        if not 1 <= value < 2**31:
            raise self.bad(f"the metadata {key} = {value} is out of range")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, as the shortest decimal that rounds to the same float32: 1e-05, not 9.99999974e-06."""
        value = self.value(key, default, int, float)
        if not 0 < value <= _LARGEST_FLOAT32:
            raise self.bad(f"the metadata {key} = {value} is not a positive number")
        return float(str(np.float32(value)))

    def at_least_0(self, key: str, default: float) -> float:
        """The same, or 0, which stands for `unknown`."""
        return 0.0 if self.scalar(key, default) == 0 else self.number(key, default)

    def text(self, key: str, default: str | None = None) -> str:
        return self.value(key, default, str)

    def numbers(self, key: str, count: int) -> NDArray[Any]:
        """One finite number for each of `count` tokens."""
        value = self.value(key, None, np.ndarray)
        if len(value) != count:
            raise self.bad(f"{key} has {len(value)} entries for {count} tokens")
        if not np.isfinite(value).all():
            raise self.bad(f"{key} holds NaN or infinite values: the file is damaged; fetch it again")
        return value

    def token_id(self, key: str, vocabulary: int, default: int | None = None) -> int | None:
        """None, or the default, where the file names no token of the vocabulary: 2^32 - 1 is a way to say none."""
        value = self.value(key, -1, int)
        if 0 <= value < vocabulary:
            return value
        return default if default is not None and default < vocabulary else None


class _Cursor:
    """Little-endian values off a buffer; whatever points past its end is refused before it is read."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def damaged(self, problem: str) -> PpsdError:
        """The one sentence for all that no writer of GGUF would write."""
        return PpsdError(f"{self.path}: damaged near byte {self.at}, {problem}: fetch the file again")

    def need(self, good: bool, problem: str) -> None:
        if not good:
            raise self.damaged(problem)

    def take(self, count: int) -> bytes:
        self.need(count <= len(self.data) - self.at, "it ends inside its metadata")
        self.at += count
        return self.data[self.at - count : self.at]

    def u32(self) -> int:
        return struct.unpack("<I", self.take(4))[0]

    def u64(self) -> int:
        return struct.unpack("<Q", self.take(8))[0]

    def count(self, smallest: int, most: int | None = None) -> int:
        """How many items follow, each of at least `smallest` bytes."""
        count = self.u64()
        fits = count * smallest <= len(self.data) - self.at and (most is None or count <= most)
        self.need(fits, f"the metadata announces {count} items")
        return count

    def text(self) -> str:
        return self.take(self.u64()).decode("utf-8")

    def texts(self) -> list[str]:
        """An array of strings: a vocabulary has 100,000, so this loop calls nothing of ours."""
        data, length = self.data, struct.Struct("<Q").unpack_from
        count = self.count(8, _MOST_STRINGS)
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
        self.need(kind < len(_SCALARS) and _SCALARS[kind] is not None, f"a value has the unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)


def read_gguf(path: Path) -> GgufFile:
    """Metadata and tensor table; the tensors' data is only located. Raises PpsdError, or OSError from the system.

    A model may be split over NAME-00001-of-00003.gguf and so on: any part stands for all, which lie in one folder.
    """
    part = _read_file(path)
    count = part.value("split.count", 1, int)
    if count in (0, 1):
        return part
    parts = [part if found == path else _read_file(found) for found in _parts_of(part, count)]
    tensors: dict[str, GgufTensor] = {}
    for number, other in enumerate(parts):
        if (other.value("split.no", -1, int), other.value("split.count", 0, int)) != (number, count):
            raise other.bad(f"this is not part {number + 1} of {count}, as its name says; fetch it again")
        for name, tensor in other.tensors.items():
            if name in tensors:
                raise other.bad(f"the tensor {name!r} is in {tensors[name].path.name}, too; fetch the parts again")
            tensors[name] = tensor
    announced = parts[0].value("split.tensors.count", len(tensors), int)
    if announced != len(tensors):
        raise parts[0].bad(f"{announced} tensors are announced, but the parts have {len(tensors)}; fetch them again")
    return GgufFile(parts[0].path, parts[0].values, tensors)


def _parts_of(part: GgufFile, count: int) -> list[Path]:
    """All parts, in order. Raises PpsdError where one is not there."""
    match = _PART.fullmatch(part.path.name)
    if not match or not 2 <= count <= _MOST_PARTS or int(match[4]) != count:
        raise part.bad(
            f"this is one of the {count} parts of a split model, which must be called NAME-00001-of-{count:05}.gguf"
        )
    before, _, *after = match.groups()
    paths = [part.path.with_name(f"{before}{number:05}{''.join(after)}") for number in range(1, count + 1)]
    for path in paths:
        if not path.is_file():
            raise part.bad(f"the part {path.name} of this split model is missing beside it; fetch all {count} parts")
    return paths


def _read_file(path: Path) -> GgufFile:
    if not path.is_file():
        raise PpsdError(f"{path} is not a file" if path.exists() else f"{path} does not exist")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise PpsdError(f"{path} is not a GGUF file: it does not begin with GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            try:
                return _parse(cursor)
            except (struct.error, OverflowError, UnicodeDecodeError) as error:
                raise cursor.damaged(str(error)) from None


def _parse(cursor: _Cursor) -> GgufFile:
    cursor.take(4)
    version = cursor.u32()
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "is big-endian" if swapped in (2, 3) else f"has GGUF version {version}"
        raise PpsdError(f"{cursor.path} {what}; supported are the versions 2 and 3, little-endian")
    # The least that a table entry takes: name length, dimension count, one dimension, type, offset.
    tensor_count = cursor.count(32, _MOST_TENSORS)
    values = _read_values(cursor, cursor.count(13, _MOST_KEYS))
    tensors = _read_tensor_table(cursor, tensor_count, values.get("general.alignment", 32))
    return GgufFile(cursor.path, values, tensors)


def _read_values(cursor: _Cursor, count: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.text()
        cursor.need(key not in values, f"the metadata gives {key!r} twice")
        values[key] = cursor.value(cursor.u32())
    return values


def _read_tensor_table(cursor: _Cursor, count: int, alignment: Any) -> dict[str, GgufTensor]:
    power = type(alignment) is int and alignment >= 1 and not alignment & (alignment - 1)
    cursor.need(power, f"general.alignment is {alignment!r}, not a power of two")
    entries = [_read_tensor_entry(cursor) for _ in range(count)]

    data = cursor.at + -cursor.at % alignment
    expected = 0  # llama.cpp, too, accepts only tensors that follow each other without a gap
    tensors: dict[str, GgufTensor] = {}
    for tensor in entries:
        size = tensor.rows * tensor.row_bytes
        cursor.need(tensor.name not in tensors, f"the tensor {tensor.name!r} is there twice")
        cursor.need(tensor.start == expected, f"the tensor {tensor.name!r} lies at {tensor.start}, not at {expected}")
        cursor.need(data + expected + size <= len(cursor.data), f"the tensor {tensor.name!r} runs past the end")
        tensors[tensor.name] = replace(tensor, start=data + expected)
        expected += size + -size % alignment
    return tensors


def _read_tensor_entry(cursor: _Cursor) -> GgufTensor:
    """One line of the table; its `start` still counts from where the tensors' data begins."""
    name = cursor.text()
    dimensions = cursor.u32()
    cursor.need(1 <= dimensions <= 4, f"the tensor {name!r} has {dimensions} dimensions")
    shape = tuple(reversed(struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))))
    number = cursor.u32()
    if number not in BLOCKS:
        from gguf import GGMLQuantizationType  # which knows the names of the others; it takes a while to import

        found = next((known.name for known in GGMLQuantizationType if known == number), str(number))
        supported = ", ".join(sorted(known.name for known in Kind))
        raise PpsdError(f"{cursor.path}: the tensor {name!r} has type {found}; supported are {supported}")
    kind = Kind(number)
    whole = min(shape) >= 1 and shape[-1] % BLOCKS[kind][0] == 0
    cursor.need(whole, f"the tensor {name!r} has shape {shape}, which {kind.name} does not allow")
    return GgufTensor(name, kind, shape, cursor.u64(), cursor.path)
