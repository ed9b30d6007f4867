"""The same commands over the ranks that torchrun has started: rank 0 runs the command, the others serve it."""

import argparse

from ..errors import UsageError
from ..ranks.launch import RankOptions, check_backend, join
from ..ranks.world import World

OVER_RANKS = ("generate", "watch", "serve", "engine", "check", "info")
SILENCES = (0.5, 3600.0)  # seconds; a sign of life comes every quarter of a second


def join_ranks(args: argparse.Namespace, world: World) -> bool:
    """True: this is rank 0, and `args.engine` drafts for the ranks. False: this rank has served, and all is done."""
    if args.command not in OVER_RANKS:
        raise UsageError(f"{args.command} runs in one process; over ranks run {', '.join(OVER_RANKS)}")
    args.engine = join(world, rank_options(args, world.size))
    return args.engine is not None


def rank_options(args: argparse.Namespace, size: int) -> RankOptions:
    check_backend(args.backend, args.device)
    sizes = args.stages if isinstance(args.stages, tuple) else None
    if isinstance(args.stages, int) and args.stages not in (1, size):
        raise UsageError(f"over {size} ranks there are {size} stages; --stages A,B,... says how many layers")
    least, most = SILENCES
    if not least <= args.rank_timeout <= most:
        raise UsageError(f"--rank-timeout is from {least:g} to {most:g} seconds, not {args.rank_timeout:g}")
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
