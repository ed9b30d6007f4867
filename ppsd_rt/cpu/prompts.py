"""Keys and values of prompts in a file, so that the next process need not read a document again.

A file is a header of one page, which says what the blocks behind it are of (csrc/loop/blocks.cpp), and the
blocks as the loop has them.
"""

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import _native
from ..errors import PpsdError
from ..printable import quoted

_MARK = b'{"ppsd-rt": "prompts"'
_HEADER = 4096  # bytes
_EVERYTHING = 2**31 - 1  # blocks

Facts = Mapping[str, object]


def save(path: Path, of: Facts, built: Facts, loop: _native.Loop, most: int | None) -> int:
    """Writes blocks of at most `most` bytes, without the least recently used: whole, or not at all, and for nobody else
    to read. Returns how many. of: what they are blocks of; built: by what, so that they have the same bits.

    Raises PpsdError for a file of something else, and where it cannot be written.
    """
    _find(path, of)
    blocks = _EVERYTHING if most is None else most // loop.block_bytes
    unfinished = ""
    try:
        handle, unfinished = tempfile.mkstemp(".unfinished", dir=os.path.dirname(os.path.realpath(path)))
        with os.fdopen(handle, "wb") as file:
            count = loop.write_blocks(handle, _HEADER, blocks)
            header = json.dumps({"ppsd-rt": "prompts", "of": of, "built": built, "blocks": count}).encode()
            file.write(header.ljust(_HEADER))
            file.flush()
            os.fsync(handle)
        os.replace(unfinished, os.path.realpath(path))
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            os.unlink(unfinished)
        raise PpsdError(f"cannot save prompts to {path}: {getattr(error, 'strerror', None) or error}") from None
    return count


def load(path: Path, of: Facts, built: Facts, loop: _native.Loop) -> int:
    """Returns how many blocks are here now: none of a file that is not there, is damaged, or that another build of the
    kernels has written. Raises PpsdError for a file of something else, and one that cannot be read."""
    found = _find(path, of)
    if found.get("built") != built or not isinstance(count := found.get("blocks"), int):
        return 0
    try:
        with path.open("rb") as file:
            return loop.read_blocks(file.fileno(), _HEADER, count)
    except OSError as error:
        raise PpsdError(f"cannot read {path}: {error.strerror or error}") from None


def _find(path: Path, of: Facts) -> dict[str, Any]:
    """The header; nothing of a file that is not there, or is damaged."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:  # not to wait for a pipe
            header = file.read(_HEADER)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise PpsdError(f"cannot read {path}: {error.strerror or error}") from None
    if not header.startswith(_MARK):
        raise PpsdError(f"{path} holds no saved prompts: name another file for them")
    try:
        found: dict[str, Any] = json.loads(header)
        theirs = dict(found["of"])
    except (ValueError, KeyError, TypeError):
        return {}
    if theirs != dict(of):
        differs = ", ".join(name for name in of if theirs.get(name) != of[name])
        raise PpsdError(
            f"{path} holds prompts of {quoted(str(theirs.get('model')))} (another {differs}): name another file, or "
            "remove it"
        )
    return found
