"""The cache of converted models: where it is, how a folder in it is made exactly once, and what the user sees of it.

A model that is there already is found without the packages that convert one: they are imported where they are used.
"""

import json
import logging
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import PpsdError
from .files import read_json_object

# To be raised whenever what gguf_import.py puts into a folder changes: cached folders of another version are made anew.
CONVERTER_VERSION = 1

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


def converted_folder(folder: Path, source: str, name: str, fetch: Callable[[Path], Path]) -> Path:
    """`folder`, a model folder in the cache, made from a GGUF file unless a whole one is there already.

    `source` tells one origin from another (a hash): a folder of another origin, of another converter version or with
    files missing or cut short is made anew. `fetch(work)` gives the GGUF file and may put it into the folder `work`.
    `name` is what the user knows the model by.

    Of processes that want the same folder, one makes it and the others wait. It appears whole or not at all; what a
    killed process has left is removed by the next one. Raises PpsdError: what `fetch` and the conversion raise, a
    cache that cannot be written, a full disk.
    """
    stamp = f"converter {CONVERTER_VERSION}, {source}"
    if _is_whole(folder, stamp):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(folder, name):
            if not _is_whole(folder, stamp):
                _make(folder, stamp, name, fetch)
    except (OSError, NotImplementedError) as error:  # the latter: file locks are not supported here
        reason = getattr(error, "strerror", None) or str(error)
        raise PpsdError(
            f"cannot write to the cache {folder.parent}: {reason}; set PPSD_CACHE to a folder with room for the model"
        ) from None
    return folder


def _is_whole(folder: Path, stamp: str) -> bool:
    try:
        found = read_json_object(folder / _STAMP)
        return found["stamp"] == stamp and found["files"].items() <= _file_sizes(folder).items()
    except (PpsdError, OSError, KeyError, TypeError, AttributeError):
        return False


def _file_sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.name != _STAMP}


def converted_folders(cache: Path) -> dict[Path, list[Path]]:
    """What `converted_folder` has made in this cache: each model's folder, and which folders there are of it, with
    those that killed processes have left. Links are not followed."""
    found: dict[Path, list[Path]] = {}
    for parent in (cache / "models", cache / "gguf"):
        if parent.is_dir() and not parent.is_symlink():
            for path in sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink()):
                if work := _WORK.fullmatch(path.name):
                    found.setdefault(parent / work[1], []).append(path)
                elif (path / _STAMP).is_file():
                    found.setdefault(path, []).append(path)
    return found


def remove_converted(folder: Path) -> None:
    """A folder of `converted_folders`, and what is left of others of its name; it is gone at once, or stays whole.

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


def _make(folder: Path, stamp: str, name: str, fetch: Callable[[Path], Path]) -> None:
    """Fetch and convert in a sibling folder, then put the result in its place. The caller holds the lock."""
    for leftover in folder.parent.glob(f".{folder.name}.work-*"):  # of processes that were killed
        shutil.rmtree(leftover, ignore_errors=True)  # a pip that outlived its parent may still write there
    work = _work_folder(folder)
    work.mkdir()
    try:
        made = work / "model"
        _convert(fetch(work), made, name)
        (made / _STAMP).write_text(json.dumps({"stamp": stamp, "files": _file_sizes(made)}), encoding="utf-8")
        if os.path.lexists(folder):
            folder.rename(work / "replaced")
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(source: Path, target: Path, name: str) -> None:
    """Convert with a progress bar, or with one line at the end where standard error is not a terminal."""
    from .gguf_import import convert_gguf

    if not sys.stderr.isatty():
        began = time.monotonic()
        convert_gguf(source, target)
        _LOG.info("converted %s in %.1f s", name, time.monotonic() - began)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"converting {name}", total=None)
        convert_gguf(source, target, progress=lambda done, total: bar.update(task, completed=done, total=total))
