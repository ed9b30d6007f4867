"""Answers as versions before 2026-12 kept them, which a folder's first use by this one takes over.

Files `answers-00000.bin` and so on hold records one after the other. A record is little-endian: a CRC-32 of what
follows it, how many ids there are, how many of them the prompt has, 1 if the answer is free, the day since 1970, an
owner that says nothing, and the ids of 32 bits each.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

Old = tuple[npt.NDArray[np.int32], int, bool, int]  # ids, of which so many were asked; free; day

_HEAD = struct.Struct("<IIIIIQ")


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("answers-*.bin"))


def read(path: Path) -> Iterator[Old]:
    """Up to where it is damaged. They are nobody's: owner 0 was everybody with --memory shared. Raises OSError."""
    data, place = path.read_bytes(), 0
    while place + _HEAD.size <= len(data):
        checksum, length, answer, flags, day, _ = _HEAD.unpack_from(data, place)
        end = place + _HEAD.size + 4 * length
        if end > len(data) or zlib.crc32(data[place + 4 : end]) != checksum:
            return
        yield np.frombuffer(data, "<i4", length, place + _HEAD.size), answer, bool(flags & 1), day
        place = end
