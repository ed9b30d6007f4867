"""The models that are on this machine: in the cache folder, and in the hub's cache."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import PpsdError
from .cache import cache_dir, model_folders, remove_model
from .checkpoint import Checkpoint
from .default_model import NAME

_HUB = "models--"  # what huggingface_hub puts before a name, with -- instead of the slash


@dataclass(frozen=True)
class LocalModel:
    """name: what `-m` takes. path: the folder of all that belongs to it. bytes: on the disk."""

    name: str
    path: Path
    bytes: int
    weights: Path | None  # the folder, or the .gguf file, that is loaded
    of_hub: bool

    def checkpoint(self) -> Checkpoint | str:
        """The model, opened and not read; or why it cannot be."""
        if self.weights is None:
            return "incomplete"
        try:
            return Checkpoint(self.weights)
        except PpsdError:
            return "cannot be loaded"

    def remove(self) -> None:
        """Raises PpsdError where another process is fetching it, and OSError."""
        shutil.rmtree(self.path) if self.of_hub else remove_model(self.path)


def local_models() -> list[LocalModel]:
    return [*_own(), *_of_hub()]


def hub_cache() -> Path:
    """Where huggingface_hub keeps models; the package itself need not be installed."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or f"{home}/hub").expanduser()


def _own() -> Iterator[LocalModel]:
    for path in model_folders(cache_dir()):
        weights = next(iter(sorted(path.glob("*.gguf"))), path)
        name = NAME if weights.stem == NAME else str(weights)
        yield LocalModel(name, path, _bytes(path), weights, False)


def _of_hub() -> Iterator[LocalModel]:
    for path in sorted(hub_cache().glob(f"{_HUB}*")):
        if path.is_dir() and not path.is_symlink():
            name, weights = path.name.removeprefix(_HUB).replace("--", "/"), _snapshot(path)
            tag = f":{weights.name}" if weights is not None and weights.suffix == ".gguf" else ""
            yield LocalModel(f"{name}{tag}", path, _bytes(path), weights, True)


def _snapshot(path: Path) -> Path | None:
    """Of the branch `main`, else the newest one; None where no weights are there."""
    found: list[Path] = sorted(path.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
    with suppress(OSError):
        found += [path / "snapshots" / (path / "refs" / "main").read_text().strip() / "config.json"]
    folders = [file.parent for file in found if file.is_file() and any(file.parent.glob("*.safetensors"))]
    return folders[-1] if folders else next(iter(sorted(path.glob("snapshots/*/**/*.gguf"))), None)


def _bytes(path: Path) -> int:
    """Links are not followed: a hub's snapshot is links to its blobs."""
    total = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):
            total += 0 if file.is_symlink() or not file.is_file() else file.lstat().st_size
    return total
