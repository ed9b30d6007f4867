"""`ppsd-run cache`, `pull`, `list`, `rm`: what lies in the cache folder, and models in the hub's cache."""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from ..errors import PpsdError, UsageError
from ..models.cache import cache_dir, model_folders, remove_model
from ..models.local import LocalModel, local_models
from ..models.resolve import resolve_model
from ..printable import printable, quoted
from .common import agreed, print_json, table
from .options import ALL, FILES, MODELS

_AGES = ((86400, "day"), (3600, "hour"), (60, "minute"))


@dataclass(frozen=True)
class Item:
    """A model's folder or a file. age: seconds since it was written."""

    kind: str
    path: Path
    bytes: int
    age: float


def run(args: argparse.Namespace) -> int:
    if args.yes and args.clean is None:
        raise UsageError("--yes goes with --clean")
    folder = cache_dir()
    items = list(found(folder, time.time()))
    if args.clean is None:
        print(printable(str(folder)))  # a table's title is cut into lines
        table("", ["kind", "name", "size", "age"], [list(map(printable, row)) for row in _rows(items, folder)])
        print(_total(items))
        return 0
    chosen = [item for item in items if args.clean in (ALL, item.kind)]
    if not args.yes and not _agreed(chosen):
        chosen = []
    for item in chosen:
        _remove(item)
    print(f"removed {_total(chosen)}")
    return 0


def _rows(items: list[Item], folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """A row for each model, and one for all files of another kind, with the age of the newest."""
    for kind, group in groupby(items, key=lambda item: item.kind):
        alike = list(group)
        for part in [[item] for item in alike] if kind == MODELS else [alike]:
            name = str(part[0].path.relative_to(folder)) if len(part) == 1 else f"{len(part)} files"
            yield kind, name, size(sum(item.bytes for item in part)), _age(min(item.age for item in part))


def found(folder: Path, now: float) -> Iterator[Item]:
    """What ppsd-rt has put into the cache folder. Links are not followed: what they lead to is somebody else's."""
    for path, parts in model_folders(folder).items():
        yield from _item(MODELS, path, (file for part in parts for file in (part, *part.rglob("*"))), now)
    for kind, (name, patterns) in FILES.items():
        if not (folder / name).is_symlink():
            for path in sorted({path for pattern in patterns for path in (folder / name).glob(pattern)}):
                if path.is_file():
                    yield from _item(kind, path, [path], now)


def _item(kind: str, path: Path, files: Iterable[Path], now: float) -> Iterator[Item]:
    """Nothing where another process has just removed it."""
    status = []
    for file in files:
        with suppress(FileNotFoundError):
            status.append(file.lstat())
    if status:
        yield Item(kind, path, sum(s.st_size for s in status), max(0.0, now - max(s.st_mtime for s in status)))


def _agreed(items: list[Item]) -> bool:
    """Whether models are to be removed, which take a while to fetch: asked where somebody is there."""
    models = [item for item in items if item.kind == MODELS]
    if not models or not (sys.stdin and sys.stdin.isatty()):
        return True
    names = ", ".join(item.path.name for item in models)
    return agreed(f"Remove the models {names}? Their next use fetches them again. [y/N] ")


def _remove(item: Item) -> None:
    try:
        if item.kind == MODELS:
            remove_model(item.path)
        else:
            item.path.unlink(missing_ok=True)
    except OSError as error:
        raise PpsdError(f"cannot remove {item.path}: {error.strerror or error}") from None


def _total(items: list[Item]) -> str:
    return f"{len(items)} item{'s' * (len(items) != 1)}, {size(sum(item.bytes for item in items))}"


def size(bytes: int) -> str:
    return f"{bytes / 1e6:.1f} MB" if bytes >= 1e5 else f"{bytes / 1e3:.1f} kB"


def _age(seconds: float) -> str:
    for length, name in _AGES:
        if (count := int(seconds // length)) > 0:
            return f"{count} {name}{'s' * (count != 1)}"
    return "now"


def pull(args: argparse.Namespace) -> None:
    print(resolve_model(args.model))


def list_models(args: argparse.Namespace) -> None:
    models = local_models()
    if args.json:
        for model in models:
            print_json({"name": model.name, "bytes": model.bytes, "path": str(model.path), **_facts(model)})
        return
    if not models:
        print("no models are here; `ppsd-run pull` fetches the default one")
        return
    rows = [(model.name, size(model.bytes), *_facts(model).values()) for model in models]
    table("", ["name", "size", "stored as", "exit head"], [[printable(str(cell)) for cell in row] for row in rows])


def _facts(model: LocalModel) -> dict[str, str]:
    checkpoint = model.checkpoint()
    if isinstance(checkpoint, str):
        return {"stored_as": checkpoint, "exit_head": "-"}
    from ..find_head import find_head

    head = find_head("auto", checkpoint)
    kind = "none" if head is None else f"{head.info.kind} after layer {head.info.exit_layer}"
    return {"stored_as": ", ".join(checkpoint.stored_as), "exit_head": kind}


def remove(args: argparse.Namespace) -> int:
    models = {model.name: model for model in local_models()}
    model = models.get(args.model)
    if model is None:
        here = ", ".join(models) or "none"
        raise UsageError(f"no model {quoted(args.model)} is in the caches; here are: {here}")
    what = f"{model.name} ({size(model.bytes)})"
    if not args.yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"{what} would be removed; --yes does so without a question")
        if not agreed(f"Remove {what}? [y/N] "):
            return 1
    try:
        model.remove()
    except OSError as error:
        raise PpsdError(f"cannot remove {model.path}: {error.strerror or error}") from None
    print(printable(f"removed {what}"))
    return 0
