"""`ppsd-run engine`: decodes for `ppsd-run serve --engines`, which keeps what is committed."""

import argparse
import os

from .common import load_engine
from .notes import note


def run(args: argparse.Namespace) -> int:
    from ..front.work import work

    engine = load_engine(args)
    note(f"{engine.name} is loaded, for the server at {args.front[0]}:{args.front[1]}")
    work(engine, args.front, os.environ.get("PPSD_ENGINE_KEY", ""), args.engine_timeout, args.once)
    return 0
