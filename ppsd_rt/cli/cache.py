"""`ppsd-run cache`, `pull`, `list`, `rm`: what lies in the cache folder, and models in the hub's cache."""

import argparse
from pathlib import Path

from ..errors import PpsdError, UsageError
from ..models.cache import LocalModel, bytes_of, cache_dir, local_models, model_folders, remove_model
from ..models.checkpoint import Checkpoint
from ..models.resolve import resolve_model
from ..printable import printable, quoted
from .common import counted, may_delete, print_json, table
from .options import ALL, FILES, MODELS


def run(args: argparse.Namespace) -> int:
    if args.yes and args.clean is None:
        raise UsageError("--yes goes with --clean")
    folder = cache_dir()
    chosen = {kind: paths for kind, paths in found(folder).items() if args.clean in (None, ALL, kind)}
    items = [path for paths in chosen.values() for path in paths]
    total = f"{counted(len(items), 'item')}, {size(sum(map(_bytes, items)))}"
    if args.clean is None:
        print(printable(str(folder)))  # a table's title is cut into lines
        rows = [(kind, len(paths), size(sum(map(_bytes, paths)))) for kind, paths in chosen.items() if paths]
        table("", ["kind", "items", "size"], rows)
        print(total)
        return 0
    if items and not may_delete(
        f"{total} of {folder} ({', '.join(kind for kind in chosen if chosen[kind])})", args.yes
    ):
        return 1
    for path in items:
        try:
            remove_model(path) if path in chosen.get(MODELS, ()) else path.unlink(missing_ok=True)
        except OSError as error:
            raise PpsdError(f"cannot remove {path}: {error.strerror or error}") from None
    print(f"removed {total}")
    return 0


def found(folder: Path) -> dict[str, list[Path]]:
    """What ppsd-rt has put there, by kind. Links are not followed: what they lead to is somebody else's."""
    items = {MODELS: list(model_folders(folder))}
    for kind, (name, patterns) in FILES.items():
        paths = {path for pattern in patterns for path in (folder / name).glob(pattern) if path.is_file()}
        items[kind] = [] if (folder / name).is_symlink() else sorted(paths)
    return items


def _bytes(path: Path) -> int:
    """Of a model, what a killed process has left too."""
    return sum(map(bytes_of, (path, *path.parent.glob(f".{path.name}.work-*"))))


def size(bytes: int) -> str:
    return f"{bytes / 1e6:.1f} MB" if bytes >= 1e5 else f"{bytes / 1e3:.1f} kB"


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
    if model.weights is None:
        return {"stored_as": "incomplete", "exit_head": "-"}
    try:
        checkpoint = Checkpoint(model.weights)
    except PpsdError:
        return {"stored_as": "cannot be loaded", "exit_head": "-"}
    from ..find_head import find_head

    head = find_head("auto", checkpoint)
    kind = "none" if head is None else head.info.told
    return {"stored_as": ", ".join(checkpoint.stored_as), "exit_head": kind}


def remove(args: argparse.Namespace) -> int:
    models = {model.name: model for model in local_models()}
    model = models.get(args.model)
    if model is None:
        here = ", ".join(models) or "none"
        raise UsageError(f"no model {quoted(args.model)} is in the caches; here are: {here}")
    what = f"{model.name} ({size(model.bytes)})"
    if not may_delete(what, args.yes):
        return 1
    try:
        model.remove()
    except OSError as error:
        raise PpsdError(f"cannot remove {model.path}: {error.strerror or error}") from None
    print(printable(f"removed {what}"))
    return 0
