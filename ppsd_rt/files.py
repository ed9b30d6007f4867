"""Files that are written whole or not at all: what a command puts out, and small ones of the cache."""

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

from .errors import PpsdError, UsageError

_IN_PLACE = (errno.EACCES, errno.EPERM, errno.EBUSY)  # its folder is closed to us, or it is a mount of its own


def write_whole(path: Path, content: bytes, mode: int | None = None) -> None:
    """mode: its permissions; None: as of any new file. Raises OSError, and leaves what was there."""
    unfinished = path.with_name(f".ppsd-{secrets.token_hex(8)}.unfinished")
    try:
        with open(unfinished, "xb") as file:
            if mode is not None:
                os.chmod(unfinished, mode)
            file.write(content)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read_cached(path: Path, most: int) -> bytes:
    """Nothing where there is no file, where it is not a regular one of at most `most` bytes, or cannot be read."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            return b""
        with path.open("rb") as file:
            return file.read(found.st_size)
    except OSError:
        return b""


def write_cached(path: Path, content: bytes) -> None:
    """For later runs. A cache that cannot be written only means measuring again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            path.rmdir()  # nothing of ours; one with something in it stays
        write_whole(path, content, 0o600)


class OutputFile:
    """Tried at once, so that a bad path is told before hours of work; written by `finish`, whole or not at all.

    Until then, and when `finish` is never called or fails, a file that was there stays as it was. What is no regular
    file (a pipe, a terminal, /dev/null), and what this process's standard output or error goes to, cannot be replaced:
    it is opened at once and written to.
    kind: what errors call it, as in `trace`. inputs: files that the command reads, which it must not overwrite.
    """

    def __init__(self, path: str | Path, kind: str, inputs: Iterable[str | Path | None] = ()) -> None:
        self._path, self._kind = path, kind
        self._target = ""  # what is replaced, symbolic links resolved
        self._stream: IO[bytes] | None = None
        self._mode: int | None = None  # permissions of the file that is there
        try:
            self._try(str(path))
        except (OSError, ValueError) as error:
            raise UsageError(self._problem(error)) from None
        for other in inputs:
            if other is not None and os.path.exists(other) and _same(self._path, other):
                raise UsageError(f"the {kind} would overwrite {other}, which this command reads: name another file")

    def _try(self, path: str) -> None:
        self._target = os.path.realpath(path)
        try:
            found = os.stat(path)
        except FileNotFoundError:
            if path.endswith(os.sep):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
            found = None
        if found and (standard := _standard_stream(found)) is not None:
            self._stream = os.fdopen(os.dup(standard), "wb")
        elif found and not stat.S_ISREG(found.st_mode):
            self._stream = open(path, "wb")  # noqa: SIM115 (closed in finish)
        else:
            if found:
                self._mode = stat.S_IMODE(found.st_mode)
                os.close(os.open(path, os.O_WRONLY))
            try:
                with tempfile.TemporaryFile(dir=os.path.dirname(self._target)):
                    pass
            except PermissionError:  # of the folder; the file itself may be written to
                if found is None:
                    raise

    def finish(self, content: str | bytes) -> None:
        """PpsdError where it cannot be written. Text is written as UTF-8."""
        data = content.encode() if isinstance(content, str) else content
        try:
            if self._stream is None:
                try:
                    write_whole(Path(self._target), data, self._mode)
                    return
                except OSError as error:
                    if error.errno not in _IN_PLACE:
                        raise
                self._stream = open(self._path, "wb")  # noqa: SIM115 (closed below)
            with self._stream as stream:
                stream.write(data)
        except OSError as error:
            raise PpsdError(self._problem(error)) from None

    def _problem(self, error: OSError | ValueError) -> str:
        return f"cannot write the {self._kind} to {self._path}: {getattr(error, 'strerror', None) or error}"


def _standard_stream(found: os.stat_result) -> int | None:
    """The descriptor of this process's standard output or error, if that is the file."""
    for number in (1, 2):
        try:
            if os.path.samestat(os.fstat(number), found):
                return number
        except OSError:  # closed
            continue
    return None


def _same(path: str | Path, other: str | Path) -> bool:
    try:
        return os.path.samefile(path, other)
    except OSError:  # a new file
        return False
