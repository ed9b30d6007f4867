"""Packed weights in the cache folder: made once, and mapped from then on.

A file is a header of one page and the memory that packing filled. The header is compared, never read, but for the
checksum of the rest: whatever differs (the weights' files, their sizes and times, the build of the kernels) makes the
file anew. Its name says whose weights they are, and not of which version: an old file is replaced.
"""

import atexit
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from threading import Thread
from time import time

from .. import _native
from ..models.cache import cache_dir

FOLDER, SUFFIX, UNFINISHED = "packed", ".packed", ".unfinished"
LEAST = 4 << 20  # bytes: to pack fewer takes no longer than to map them
ROOM = 5  # times the file is what the disk is to have left
_STALE = 3600.0  # seconds after which nobody writes on at an unfinished file
_TEXT = _native.PackedFile.HEADER - 17  # bytes of the header before its checksum and newline; a longer one has no file

NO_FILE = _native.PackedFile(-1, 0)
_LOG = logging.getLogger(__name__)
_writers: "list[_Writer]" = []


def packed(
    files: Sequence[Path], how: Mapping[str, object], pack: Callable[[_native.PackedFile | None], _native.Model]
) -> _native.Model:
    """What `pack` makes of these files: mapped, or packed now and written for the next time, beside all that goes on.

    how: all else that it depends on; `pack`: given no file, it packs. Raises what that raises.
    """
    if os.environ.get("PPSD_PACKED") == "0":
        return pack(None)
    facts = {**how, "files": [str(file.resolve()) for file in files], "isa": _native.isa()}
    path = cache_dir() / FOLDER / (sha256(json.dumps(facts).encode()).hexdigest()[:16] + SUFFIX)
    stamps = [_stamp(file) for file in (*files, Path(_native.__file__))]
    header = json.dumps({"ppsd-rt": "packed weights", **facts, "stamps": stamps}).encode().ljust(_TEXT)
    known = _mapped(path, header, pack)
    if known is not None:
        return known
    model = pack(None)
    if model.own_bytes >= LEAST and len(header) == _TEXT:
        _writers.append(_Writer(path, header, model))
        _writers[-1].start()
    return model


@atexit.register
def finish() -> None:
    """Returns when all is written; where somebody does not want to wait (Ctrl-C), nothing is left of it."""
    try:
        for writer in _writers:
            writer.join()
    except KeyboardInterrupt:
        for writer in _writers:
            Path(writer.unfinished).unlink(missing_ok=True)


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _mapped(
    path: Path, header: bytes, pack: Callable[[_native.PackedFile | None], _native.Model]
) -> _native.Model | None:
    """None where there is no such file, or one that is damaged or of other weights."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.read(handle, _native.PackedFile.HEADER)
        if not found.startswith(header):
            return None
        return pack(_native.PackedFile(handle, int(found[len(header) :], 16)))
    except (OSError, ValueError, _native.NotPacked) as error:
        _LOG.info("%s is of no use (%s): it is made anew", path, error)
        return None
    finally:
        os.close(handle)


class _Writer(Thread):
    """Whole, or not at all. A file that cannot be written only means packing again."""

    unfinished = os.devnull + UNFINISHED

    def __init__(self, path: Path, header: bytes, model: _native.Model) -> None:
        super().__init__(name="ppsd-packed", daemon=True)
        self._path, self._header, self._model = path, header, model

    def run(self) -> None:
        with suppress(OSError, AttributeError):  # this thread alone, on Linux: the first answer comes first
            os.setpriority(os.PRIO_PROCESS, self.native_id or 0, 10)
        with suppress(OSError, RuntimeError):
            self._write(self._path.parent)

    def _write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"*{UNFINISHED}"):
            if time() - old.stat().st_mtime > _STALE:
                old.unlink(missing_ok=True)
        if shutil.disk_usage(folder).free < ROOM * self._model.own_bytes:
            return
        handle, self.unfinished = tempfile.mkstemp(UNFINISHED, dir=folder)
        try:
            checksum = self._model.write_packed(handle)
            os.pwrite(handle, b"%s%016x\n" % (self._header, checksum), 0)
            os.fsync(handle)
            os.replace(self.unfinished, self._path)
        except BaseException:
            Path(self.unfinished).unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
