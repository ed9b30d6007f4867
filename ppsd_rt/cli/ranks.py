"""The same commands over the ranks that torchrun has started: rank 0 runs the command, the others serve it."""

import argparse

from ..errors import UsageError
from ..ranks.options import RankOptions
from ..ranks.world import World

OVER_RANKS = ("generate", "check", "info")


def join_ranks(args: argparse.Namespace, world: World) -> bool:
    """True: this is rank 0, and `args.engine` drafts for the ranks. False: this rank has served, and all is done."""
    if args.command not in OVER_RANKS:
        raise UsageError(f"{args.command} runs in one process; over ranks run {', '.join(OVER_RANKS)}")
    from ..ranks.launch import join  # torch.distributed comes with it

    args.engine = join(world, rank_options(args))
    return args.engine is not None


def rank_options(args: argparse.Namespace) -> RankOptions:
    for option, allowed in (("backend", ("auto", "cpu")), ("device", ("auto", "cpu"))):
        if getattr(args, option) not in allowed:
            raise UsageError(f"ranks run C++ stages on a CPU: --{option} takes {' or '.join(allowed)} there")
    sizes = args.stages if isinstance(args.stages, tuple) else None
    if isinstance(args.stages, int) and args.stages not in (1, world_size := _size()):
        raise UsageError(
            f"over {world_size} ranks there are {world_size} stages; --stages A,B,... says how many layers"
        )
    if args.rank_timeout <= 0 or args.link_ms < 0:
        raise UsageError("--rank-timeout is above 0, --link-ms at least 0")
    return RankOptions(
        model=args.model,
        exit_head=args.exit_head,
        dtype=args.dtype,
        threads=args.threads,
        sizes=sizes,
        schedule=getattr(args, "schedule", None) or getattr(args, "schedules", None) or "",
        parallel=args.parallel,
        link_delay=args.link_ms / 1000,
        silence=args.rank_timeout,
    )


def _size() -> int:
    from ..ranks.world import find_world

    world = find_world()
    return world.size if world else 1
