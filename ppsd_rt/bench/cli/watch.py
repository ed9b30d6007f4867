"""`ppsd-run watch`: record an answer, then show it slowly on the terminal, or as an animation in a file."""

import argparse
import sys

from ...cli.common import as_chat, load_engine, note_plain, only_prompt, sampling_params
from ...errors import UsageError
from ...files import OutputFile
from ...pipeline.schedule import parse_schedule


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from ..watch.record import record
    from ..watch.svg import draw
    from ..watch.terminal import play

    params, schedule = sampling_params(args), parse_schedule(args.schedule)
    if not 1 <= args.slow <= 1e6:
        raise UsageError(f"--slow is from 1 to 1000000, not {args.slow:g}")
    if args.svg and args.step:
        raise UsageError("--svg does not go with --step")
    console = Console()
    if not args.svg and not console.is_terminal:
        raise UsageError("watch draws on a terminal, and standard output is none; --svg FILE writes an animation")
    text = only_prompt(args.prompt, command="ppsd-run watch")
    svg = OutputFile(args.svg, "animation", (args.exit_head, args.model)) if args.svg else None
    engine = load_engine(args)
    note_plain(engine, args.raw)
    recording = record(engine, as_chat(engine, text, args.raw, args.system), params, schedule, args.stages)
    if svg:
        svg.finish(draw(recording, text, args.slow))
    else:
        play(recording, args.slow, console, step=_enter if args.step else None)
    return 0


def _enter() -> bool:
    """A line from the terminal; no more of them: False."""
    return bool(sys.stdin is not None and sys.stdin.readline())
