"""`ppsd-run rm`: remove a model that is here."""

import argparse
import sys

from ..errors import PpsdError, UsageError
from ..models.local import local_models
from ..printable import printable, quoted
from .cache import size


def run(args: argparse.Namespace) -> int:
    models = {model.name: model for model in local_models()}
    model = models.get(args.model)
    if model is None:
        here = ", ".join(models) or "none"
        raise UsageError(f"no model {quoted(args.model)} is in the caches; here are: {here}")
    what = f"{model.name} ({size(model.bytes)})"
    if not args.yes:
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError(f"{what} would be removed; --yes does so without a question")
        print(printable(f"Remove {what}? [y/N] "), end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return 1
    try:
        model.remove()
    except OSError as error:
        raise PpsdError(f"cannot remove {model.path}: {error.strerror or error}") from None
    print(printable(f"removed {what}"))
    return 0
