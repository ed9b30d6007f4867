"""Reading the files of a model folder; whatever is wrong with one is one line."""

import errno
import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any

from ..errors import PpsdError

_LONGEST_REASON = 300
_MOST_BYTES = 1 << 24  # of JSON or a template; the longest that is published, an index of 90 000 tensors, has half
_DEEPEST = 100  # levels of JSON; what walks a value later on may take several frames of Python's stack for each


def is_gguf(path: Path) -> bool:
    """Is a model of this path a .gguf file, and not a folder?"""
    return path.suffix.lower() == ".gguf" and path.is_file()


def drop_pages(array: Any) -> None:
    """Give back the memory of a mapped file: the system maps many pages around each one that is touched."""
    mapped = getattr(array, "_mmap", None)
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def one_line(error: object) -> str:
    """The text of an error (or of anything) on one line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


def shown(value: object) -> str:
    """A value of somebody's file, on one line."""
    return one_line(repr(value))


def unfit(file: object, place: str, found: object, wanted: object = "") -> PpsdError:
    """The one sentence for what cannot be used of a file. place: the tensor, the key or the offset in it."""
    expected = f", where {wanted} is needed" if str(wanted) else ""
    why = "the file is damaged, another model's or not supported; fetch or mend it"
    return PpsdError(f"{file}: {place} is {one_line(found)}{expected}: {why}")


def read_bytes(path: Path, most: int = _MOST_BYTES, *, pipe_ok: bool = False) -> bytes:
    """The content of a regular file of at most `most` bytes; with `pipe_ok` also of a pipe or a device.

    Raises FileNotFoundError, and PpsdError, one line with the path, for everything else that is wrong.
    """
    try:
        # Without O_NONBLOCK, to open a pipe that nobody writes to would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipe_ok else os.O_NONBLOCK))
        with os.fdopen(handle, "rb") as file:
            mode = os.fstat(handle).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not pipe_ok and not stat.S_ISREG(mode):
                raise PpsdError(f"{path} is not a regular file: put the file itself in its place")
            content = file.read(most + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with NUL
        raise PpsdError(f"cannot read {path}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    if len(content) > most:
        raise PpsdError(f"{path} has more than {most >> 20} MiB, which no such file needs: fetch it again")
    return content


def read_text(path: Path, most: int = _MOST_BYTES, *, pipe_ok: bool = False) -> str:
    """The same as UTF-8 text, without the mark that may stand at its head. Raises as `read_bytes` does."""
    try:
        return read_bytes(path, most, pipe_ok=pipe_ok).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PpsdError(f"{path} is not UTF-8 text ({one_line(error)}): mend it or download it again") from None


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """The value of a JSON text. Raises ValueError for whatever is wrong with it.

    That includes lone surrogates, which are good JSON but no text, more than a hundred levels and, with `unique`, an
    object that has a key twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [item for outer in level for item in inside(outer)]
    if level:
        raise ValueError(_TOO_DEEP)
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("it holds a lone surrogate, which is no text") from None
    return value


_TOO_DEEP = f"it is nested more than {_DEEPEST} levels deep"


def inside(value: Any) -> Any:
    """What an object or a list of JSON holds."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"{key!r} is there twice")
        value[key] = item
    return value


def read_json_object(path: Path, *, missing_ok: bool = False, unique: bool = False) -> dict[str, Any]:
    """The JSON object in the file `path`; an empty one where there is no such file and there need not be one.

    Raises PpsdError when the file is missing, cannot be read, is not what `parse_json` takes, or holds no object.
    """
    try:
        value = parse_json(read_bytes(path), unique=unique)
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise PpsdError(f"{path.parent} has no {path.name}: it is not a whole model folder") from None
    except ValueError as error:
        raise PpsdError(f"{path} is not valid JSON ({one_line(error)}): mend it or fetch it again") from None
    if not isinstance(value, dict):
        raise PpsdError(f"{path} must hold a JSON object, not {type(value).__name__}: mend it or fetch it again")
    return value
