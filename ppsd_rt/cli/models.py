"""`ppsd-run list`: the models that are here."""

import argparse

from ..models.local import LocalModel, local_models
from ..printable import printable
from .cache import size
from .common import print_json, table


def run(args: argparse.Namespace) -> None:
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
