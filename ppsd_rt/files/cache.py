"""Small files in the cache: what is measured once, and again where its file is of no use."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path


def read(path: Path, most: int) -> bytes:
    """Nothing where there is no file, where it is not a regular one of at most `most` bytes, or cannot be read."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            return b""
        with path.open("rb") as file:
            return file.read(found.st_size)
    except OSError:
        return b""


def write(path: Path, content: bytes) -> None:
    """For later runs: whole, or not at all. A cache that cannot be written only means measuring again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()  # nothing of ours; one with something in it stays
        handle, unfinished = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
