"""`ppsd-run pull`, `convert`, `list` and `rm`: models in the cache folder and in the hub's."""

import argparse
import sys
from pathlib import Path

from ..errors import PpsdError, UsageError
from ..models.local import LocalModel, local_models
from ..models.resolve import resolve_model
from ..printable import printable, quoted
from .cache import size
from .common import agreed, print_json, table
from .progress import progress_bar


def pull(args: argparse.Namespace) -> None:
    print(resolve_model(args.model))


def convert(args: argparse.Namespace) -> None:
    from ..models.gguf_import import convert_gguf  # with packages that the others do without

    with progress_bar(f"converting {args.source}") as advance:
        convert_gguf(Path(args.source), Path(args.target), dtype=args.dtype, progress=advance)
    print(args.target)


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
