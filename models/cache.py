"""The cache folder: where it is, and how a model that is fetched into it gets there exactly once."""

import json
import logging
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import PpsdError
from .files import read_json_object

_STAMP = "ppsd-rt-stamp.json"
_WORK = re.compile(r"\.(.+)\.work-[0-9a-f]{8}")
_LOG = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$PPSD_CACHE`, else `$XDG_CACHE_HOME/ppsd-rt`, else the platform's place for caches. It need not exist yet."""
    platform = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    place = os.environ.get("PPSD_CACHE") or f"{os.environ.get('XDG_CACHE_HOME') or platform}/ppsd-rt"
    try:
        return Path(place).expanduser().absolute()
    except RuntimeError:
        raise PpsdError(f"the cache {place} has no home folder to be in: set PPSD_CACHE to a folder") from None


def kept_gguf(folder: Path, source: str, name: str, fetch: Callable[[Path], Path]) -> Path:
    """The .gguf file `name` in `folder`, a folder in the cache, fetched unless it is there already, and whole.

    `source` tells one origin from another (a hash): what came from elsewhere or was cut short is fetched anew.
    `fetch(work)` puts the file anywhere into the folder `work`, and says where.

    Of processes that want the same file, one fetches it and the others wait. It appears whole or not at all; what a
    killed process has left is removed by the next one. Raises PpsdError: what `fetch` raises, a cache that cannot be
    written, a full disk.
    """
    if _is_whole(folder, source, name):
        return folder / name
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder, name):
            if not _is_whole(folder, source, name):
                _make(folder, source, name, fetch)
    except (OSError, NotImplementedError) as error:  # the latter: file locks are not supported here
        reason = getattr(error, "strerror", None) or str(error)
        raise PpsdError(
            f"cannot write to the cache {folder.parent}: {reason}; set PPSD_CACHE to a folder with room for the model"
        ) from None
    return folder / name


def _is_whole(folder: Path, source: str, name: str) -> bool:
    try:
        return read_json_object(folder / _STAMP) == _stamp(folder, source, name)
    except (PpsdError, OSError):
        return False


def _stamp(folder: Path, source: str, name: str) -> dict[str, Any]:
    return {"stamp": source, "files": {name: (folder / name).stat().st_size}}


def model_folders(cache: Path) -> dict[Path, list[Path]]:
    """What `kept_gguf` has made in this cache: each model's folder, and which folders there are of it, with those that
    killed processes have left. Links are not followed."""
    found: dict[Path, list[Path]] = {}
    parent = cache / "models"
    for path in sorted(parent.iterdir()) if parent.is_dir() and not parent.is_symlink() else ():
        if path.is_dir() and not path.is_symlink():
            if work := _WORK.fullmatch(path.name):
                found.setdefault(parent / work[1], []).append(path)
            elif (path / _STAMP).is_file():
                found.setdefault(path, []).append(path)
    return found


def remove_model(folder: Path) -> None:
    """A folder of `model_folders`, and what is left of others of its name; it is gone at once, or stays whole.

    Raises PpsdError where another process is making it, and OSError.
    """
    with _only_one(folder):
        if folder.exists():
            folder.rename(_work_folder(folder))
        for work in folder.parent.glob(f".{folder.name}.work-*"):
            shutil.rmtree(work)


def _work_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.work-{secrets.token_hex(4)}")


@contextmanager
def _only_one(folder: Path, wait_for: str | None = None) -> Iterator[None]:
    """Hold the lock of `folder`. The system frees the lock of a process that dies.

    wait_for: what another process may be preparing, in the user's words; PpsdError where it is not to be waited for.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if wait_for is None:
            raise PpsdError(f"another process is preparing {folder}: try again when it has ended") from None
        _LOG.info("waiting for another process that is preparing %s", wait_for)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make(folder: Path, source: str, name: str, fetch: Callable[[Path], Path]) -> None:
    """Fetch in a sibling folder, then put the result in its place. The caller holds the lock."""
    for leftover in folder.parent.glob(f".{folder.name}.work-*"):  # of processes that were killed
        shutil.rmtree(leftover, ignore_errors=True)  # a pip that outlived its parent may still write there
    work = _work_folder(folder)
    work.mkdir()
    try:
        made = work / "model"
        made.mkdir()
        fetch(work).rename(made / name)
        (made / _STAMP).write_text(json.dumps(_stamp(made, source, name)), encoding="utf-8")
        if os.path.lexists(folder):
            folder.rename(work / "replaced")
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
