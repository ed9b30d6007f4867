"""Models of the Hugging Face hub, in the cache folder of `huggingface_hub` (`HF_HOME`).

That package finds out what there is and lays the files out; here the large ones are fetched first, so that a download
that was interrupted goes on where it ended. (The package itself begins an unfinished file anew.)
"""

import hashlib
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import PpsdError
from ..extras import need
from .eagle3 import TORCH_FILE
from .files import one_line

_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_OF_HEADS = ["config.json", "*.safetensors*", TORCH_FILE]
_DOUBLES = ["*/*", "consolidated*"]  # the same weights once more, in other formats or under other names
_LARGE = 1 << 20  # bytes; smaller files are left to the package
_LOG = logging.getLogger(__name__)


def hub_model(name: str, *, head: bool = False) -> Path:
    """The folder of the model `name`, with the files that this runtime uses and no others. head: it is an exit head.

    Raises PpsdError: no such model, a gated one, one without safetensors, no network, no room.
    """
    need("huggingface_hub", "hub", f"there is no folder {name} here, and the hub")
    import huggingface_hub
    from huggingface_hub import errors

    wanted: dict[str, Any] = {"allow_patterns": _OF_HEADS if head else _FILES, "ignore_patterns": _DOUBLES}
    try:
        with _no_bars_of_the_package():
            _fetch_large(name, wanted)
            return Path(huggingface_hub.snapshot_download(name, **wanted))
    except errors.GatedRepoError:
        raise PpsdError(f"{name} is gated: accept its terms on the hub, then log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise PpsdError(f"there is no folder {name} here and no model {name} on the hub (or it is private)") from None
    except errors.LocalEntryNotFoundError:
        missing = f"{name} is neither a folder here nor in the hub's cache"
        raise PpsdError(f"{missing}, and the hub cannot be reached") from None
    except PpsdError:
        raise
    except Exception as error:  # the hub, its HTTP library, the disk: a long and changing list
        reason = one_line(error) or type(error).__name__
        raise PpsdError(f"{name} could not be fetched from the hub: {reason}; what came is kept, try again") from None


def _fetch_large(name: str, wanted: dict[str, Any]) -> None:
    """All large files that the cache lacks, one after the other, under one progress bar. wanted: patterns."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        plan = huggingface_hub.snapshot_download(name, **wanted, dry_run=True)
    except (errors.DryRunError, errors.LocalEntryNotFoundError):
        return  # out of reach: the cache may have it
    names = {file.filename for file in plan}
    if "config.json" not in names or not any(file.endswith((".safetensors", ".bin")) for file in names):
        raise PpsdError(f"{name} on the hub lacks config.json or *.safetensors: only such models can be loaded")
    missing = [file for file in plan if file.will_download and file.file_size >= _LARGE]
    if not missing:
        return
    total = sum(file.file_size for file in missing)
    with _bar(name, total) as advance:
        for file in missing:
            _fetch(name, file, advance)


def _fetch(name: str, file: Any, advance: Callable[[int], None]) -> None:
    """A file into the cache's folder `blobs`, where the package finds it; what is there of it already is kept."""
    from filelock import FileLock
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(name, file.filename, revision=file.commit_hash)
    found = get_hf_file_metadata(url)
    if found.etag is None:  # then the package says what is wrong
        return
    blob = Path(file.local_path).parents[2] / "blobs" / found.etag  # of MODEL/snapshots/COMMIT/FILE
    partial = blob.with_name(f"{blob.name}.ppsd-rt")
    headers = build_hf_headers()
    if urlsplit(found.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # it is the hub's, and nobody else's
    blob.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(blob.with_name(f"{blob.name}.ppsd-rt.lock")):
        if blob.exists():  # another process has fetched it
            advance(file.file_size)
            return
        if partial.exists() and partial.stat().st_size > file.file_size:
            partial.unlink()
        with _Counted(partial, advance) as out:
            there = out.tell()
            _refuse_full_disk(name, blob.parent, file.file_size - there)
            advance(there)
            http_get(found.location, out, resume_size=there, headers=headers, expected_size=file.file_size)
        if there and re.fullmatch("[0-9a-f]{64}", found.etag):
            _check_hash(partial, found.etag, file.filename)
        partial.replace(blob)


def _refuse_full_disk(name: str, folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PpsdError(
            f"{name} needs {needed / 1e9:.1f} GB more, {folder} has {free / 1e9:.1f} GB free; "
            "make room or choose another place (HF_HOME is the hub's)"
        )


def _check_hash(path: Path, expected: str, name: str) -> None:
    """Of a file that came in several pieces."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        path.unlink()
        raise PpsdError(f"{name} was damaged on its way (its hash differs): fetch it again")


class _Counted(BufferedWriter):
    """A file that goes on, and tells what is written to it; bytes that are taken back count as negative."""

    def __init__(self, path: Path, advance: Callable[[int], None]) -> None:
        super().__init__(FileIO(path, "ab"))
        self._advance = advance

    def write(self, data: Any) -> int:
        self._advance(len(data))
        return super().write(data)

    def seek(self, place: int, whence: int = 0) -> int:
        self._advance(place - self.tell())
        return super().seek(place, whence)


@contextmanager
def _bar(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives advance(bytes): a bar on a terminal, else one line."""
    if not sys.stderr.isatty():
        _LOG.info("fetching %s (%d MB)", name, round(total / 1e6))
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(f"fetching {name}", total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def _no_bars_of_the_package() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
