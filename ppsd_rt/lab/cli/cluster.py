"""`ppsd-run lab simulate --cluster`: requests at replicas, in simulated time."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ...errors import UsageError
from ..bench.report import Report, columns
from ..cluster import Cluster, Replica, Shape, poisson, users
from ..simulate import ModelCosts
from .bench import interrupted, print_report, result_file, run_facts

_EARLY = 0.1  # of the layers, where nothing says how many come before the exit head
_COLUMNS = columns(
    replicas="replicas", stages="stages", batch="batch", drafts="drafts", acceptance="acceptance|2", users="users",
    rate="requests/s|2", tokens_per_second="tok/s|1", busy="busy|0%", first_ms="first ms|0", first_ms_95="95 %|0",
    token_ms="ms/token|1", token_ms_95="95 %|1", over_plain="x plain|2"
)  # fmt: skip


def run_cluster(args: argparse.Namespace, model: ModelCosts | None) -> int:
    file = result_file(args)
    if (args.users is None) == (args.rate is None):
        raise UsageError("--cluster needs --users or --rate: how many ask, or how often")
    if args.shared_tokens >= args.prompt_tokens:
        raise UsageError("--shared-tokens are the beginning of --prompt-tokens, so there must be fewer")
    rows: list[dict[str, Any]] = []
    whole = True
    try:
        rows.extend(_rows(args, model))
    except KeyboardInterrupt:
        whole = False
    if not rows:
        raise KeyboardInterrupt
    facts = run_facts("simulate-cluster", args.model if args.measured else "none")
    plain = _replica(args, model, 1, 1, 0, 0.0)
    facts["costs"] = {
        "token_ms": 1e3 * sum(plain.stages),
        "early_ms": 1e3 * plain.early,
        "head_ms": 1e3 * plain.head,
        "row_share": plain.row_share,
        "measured": args.measured,
    }
    print_report(Report("simulated", _COLUMNS, rows, facts, {"interrupted": not whole}), args.output, file)
    return 0 if whole else interrupted()


def _rows(args: argparse.Namespace, model: ModelCosts | None) -> Iterator[dict[str, Any]]:
    axes = {
        "stages": args.stages or [1],
        "link_ms": args.link_ms,
        "replicas": args.replicas,
        "batch": args.batch,
        "users" if args.users else "rate": args.users or args.rate,
        "acceptance": args.acceptance,
    }
    for values in product(*axes.values()):
        chosen: dict[str, Any] = dict(zip(axes, values, strict=True))
        before: float | None = None
        for drafts in sorted({0, *args.drafts}):
            one = _replica(args, model, chosen["stages"], chosen["batch"], drafts, chosen["link_ms"])
            cluster = _play(args, replace(one, acceptance=chosen["acceptance"]), chosen)
            row = {"drafts": drafts, **chosen, **_result(cluster)}
            before = row["token_ms"] if before is None else before
            row["over_plain"] = before / row["token_ms"] if row["token_ms"] else None
            if drafts in args.drafts:
                yield row


def _replica(
    args: argparse.Namespace, model: ModelCosts | None, stages: int, batch: int, drafts: int, link_ms: float
) -> Replica:
    if model is None:
        token, head, share = (args.token_ms or 20.0) / 1e3, (args.head_ms or 0.0) / 1e3, args.row_share or 0.0
        seconds: tuple[float, ...] = (token / stages,) * stages
        early = token * _EARLY if stages == 1 else seconds[0]
    else:
        split = model.cut(max(stages, 2))
        head = model.layers.head
        seconds = model.without_head(split)
        early = seconds[0]
        seconds = (sum(seconds),) if stages == 1 else seconds
        share = (model.growth[-1] - 1) / (len(model.growth) - 1)
    link, late = (link_ms / 1e3, args.late_ms / 1e3) if stages > 1 else (0.0, 0.0)
    return Replica(seconds, early, head, share, link, late, batch, drafts, prefixes=args.prefix_room)


def _play(args: argparse.Namespace, replica: Replica, given: dict[str, Any]) -> Cluster:
    shape = Shape(args.prompt_tokens, args.answer_tokens, prefixes=args.prefixes, shared=args.shared_tokens)
    if args.users:
        requests = users(given["users"], args.think, shape, args.seed)
    else:
        requests = poisson(given["rate"], args.requests, shape, args.burst, args.seed)
    return Cluster([replica] * given["replicas"], shape, args.by_prefix, args.seed).run(requests, args.requests)


def _result(cluster: Cluster) -> dict[str, Any]:
    """Of the last nine tenths: at first all replicas are idle."""
    kept = cluster.answered[len(cluster.answered) // 10 :]
    seconds = max(a.ended for a in kept) - min(a.ended for a in kept)
    first, pace = sorted(a.wait for a in kept), sorted(a.pace for a in kept if a.tokens > 1) or [0.0]
    return {
        "tokens_per_second": sum(a.tokens for a in kept) / seconds if seconds else 0.0,
        "busy": cluster.busy(),
        "first_ms": 1e3 * first[int(0.5 * len(first))],
        "first_ms_95": 1e3 * first[int(0.95 * len(first))],
        "token_ms": 1e3 * pace[int(0.5 * len(pace))],
        "token_ms_95": 1e3 * pace[int(0.95 * len(pace))],
    }
