"""`ppsd-run calibrate`: measure again what `auto` works with, and print it."""

import argparse

from .._native import StageCosts
from ..errors import PpsdError
from ..pipeline.schedule import MAX_ROWS
from .common import load_engine, print_json, table
from .notes import note


def run(args: argparse.Namespace) -> None:
    engine = load_engine(args)
    backend = engine.backend
    if not hasattr(backend, "costs"):
        raise PpsdError(f"the {backend.name} backend measures at every start; use --backend cpu or cuda")
    costs = backend.costs(again=True)
    if args.json:
        print_json({"dtype": backend.dtype, "threads": backend.threads, **costs.to_dict()})
        return
    columns = {"in turns, all threads": costs.turns}
    if costs.overlapped:
        columns["side by side"] = costs.overlapped
    rows = [[name, *(f"{1000 * value:.3f}" for value in values)] for name, values in _rows(list(columns.values()))]
    title = f"milliseconds: {engine.name}, {backend.dtype}, {backend.threads} threads, exit after layer "
    table(title + str(engine.head.exit_layer if engine.head else 0), ["pass", *columns], rows)
    print(
        f"a plain token takes {1000 * costs.plain_seconds:.3f} ms; a draft {_share(costs.turns, costs.plain_seconds)}"
    )
    if costs.crowded:
        note("others had much of the cores meanwhile: auto goes by this only until it finds a calmer moment")


def _rows(stages: list[StageCosts]) -> list[tuple[str, list[float]]]:
    rows = [
        ("one row, early layers", [s.row_step for s in stages]),
        ("a draft: the same and the exit head", [s.draft_step for s in stages]),
        ("the first draft after a pass", [s.first_draft or s.draft_step for s in stages]),
        ("a plain step", [s.plain_step for s in stages]),
    ]
    return rows + [(f"verify {n} rows", [s.verify[n - 1] for s in stages]) for n in range(1, MAX_ROWS + 1)]


def _share(stages: StageCosts, plain: float) -> str:
    rows, first = stages.verify[3] / stages.verify[0], stages.first_draft or stages.draft_step
    share = f"{stages.draft_step / plain:.3f} of that, the first of a round {first / plain:.3f}"
    return f"{share}; a pass over 4 rows {rows:.2f} of 1 row"
