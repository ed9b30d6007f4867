"""`ppsd-run convert`: a GGUF file becomes a model folder."""

import argparse
from pathlib import Path

from ..models.gguf_import import convert_gguf
from .progress import progress_bar


def run(args: argparse.Namespace) -> None:
    with progress_bar(f"converting {args.source}") as advance:
        convert_gguf(Path(args.source), Path(args.target), dtype=args.dtype, progress=advance)
    print(args.target)
