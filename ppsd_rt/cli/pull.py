"""`ppsd-run pull`: fetch a model into the cache."""

import argparse

from ..models.resolve import resolve_model


def run(args: argparse.Namespace) -> None:
    print(resolve_model(args.model))
