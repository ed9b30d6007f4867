"""The same commands over ranks, of `--ranks` or of torchrun: rank 0 runs the command, the others serve it."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..ranks.world import MOST_RANKS, Child, World, start_children

if TYPE_CHECKING:
    from ..ranks.launch import RankOptions

OVER_RANKS = ("generate", "watch", "serve", "engine", "check", "info")


def start_ranks(args: argparse.Namespace, argv: Sequence[str], world: World | None) -> tuple[World | None, list[Child]]:
    """Starts the ranks of --ranks N, this process being rank 0, unless torchrun has. world: as torchrun has it."""
    count = getattr(args, "ranks", None)
    if count is None or (world is not None and count == world.size):
        return world, []
    if world is not None:
        raise UsageError(f"--ranks {count} in a world of {world.size} ranks: leave it out, torchrun has started them")
    if not 1 < count <= MOST_RANKS:
        raise UsageError(f"--ranks is from 2 to {MOST_RANKS}, not {count}")
    check_command(args)
    rank_options(args, count)  # what is wrong with them is said before anything is started
    return start_children(count, argv)


def check_command(args: argparse.Namespace) -> None:
    if args.command not in OVER_RANKS:
        raise UsageError(f"{args.command} runs in one process; over ranks run {', '.join(OVER_RANKS)}")


def join_ranks(args: argparse.Namespace, world: World) -> bool:
    """Takes part. True: as rank 0, with `args.engine`, which drafts for the ranks. False: it has served to the end."""
    from ..ranks.launch import join

    check_command(args)
    args.engine = join(world, rank_options(args, world.size))
    return args.engine is not None


def rank_options(args: argparse.Namespace, size: int) -> "RankOptions":
    from ..ranks.launch import RankOptions, check_backend

    check_backend(args.backend, args.device)
    sizes = args.stages if isinstance(args.stages, tuple) else None
    if isinstance(args.stages, int) and args.stages not in (1, size):
        raise UsageError(f"over {size} ranks there are {size} stages; --stages A,B,... says how many layers")
    if not 0 <= args.link_ms / 1000 <= args.rank_timeout / 2:  # a message on its way must not be taken for silence
        raise UsageError(
            f"--link-ms is from 0 to half of --rank-timeout, {500 * args.rank_timeout:g}, not {args.link_ms:g}"
        )
    same = ("model", "exit_head", "dtype", "kv_dtype", "kv_memory", "threads")
    return RankOptions(
        **{name: getattr(args, name) for name in same},
        sizes=sizes,
        schedule=str(getattr(args, "schedule", None) or ""),
        link_delay=args.link_ms / 1000,
        silence=args.rank_timeout,
    )
