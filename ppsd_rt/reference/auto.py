"""`auto` in eager torch: fills the table of costs, and asks the planner of csrc/pipeline/planner.h after every round.

Nothing else here needs the C++ extension: it is imported when `auto` is asked for.
"""

from collections.abc import Callable, Iterator
from time import perf_counter

import torch

from .._native import Costs, Planner, StageCosts
from ..pipeline.rounds import Drafted, Round
from ..pipeline.schedule import MAX_ROWS
from .pipeline import Pipeline
from .stage import DraftStage, VerifyStage

ROWS = (1, 2, 4, 8, MAX_ROWS)  # of the passes that are timed; those between are interpolated


def measure(draft: DraftStage, verify: VerifyStage, context: int) -> Costs:
    """Seconds of steps and passes after `context` rows of made-up text. The stages have room for MAX_ROWS more."""
    draft.rollback(0)
    verify.rollback(0)
    with torch.inference_mode():
        draft.run_tokens([0] * (context + MAX_ROWS))
        hidden = draft.exit_hidden(0, context + MAX_ROWS)
        verify.logits(hidden, 1)

        def row() -> None:
            draft.rollback(context)
            draft.run_tokens([0])

        def drafted() -> None:
            row()
            draft.draft_logits()

        def verified(rows: int) -> Callable[[], object]:
            def run() -> None:
                verify.rollback(context)
                verify.logits(hidden[context : context + rows], rows)

            return run

        passes = StageCosts.between({rows: _seconds(verified(rows)) for rows in ROWS})
        return Costs(StageCosts(_seconds(row), _seconds(drafted), passes))


def _seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median of several runs, after one that warms up."""
    work()
    times = []
    for _ in range(repeats):
        begun = perf_counter()
        work()
        times.append(perf_counter() - begun)
    return sorted(times)[repeats // 2]


def replanned(pipeline: Pipeline, planner: Planner, events: Iterator[Round | Drafted]) -> Iterator[Round | Drafted]:
    """The same events; after every round the planner chooses how the pipeline goes on."""
    seconds = 0.0  # of work since the last round
    while True:
        begun = perf_counter()
        event = next(events, None)
        seconds += perf_counter() - begun
        if event is None:
            return
        if isinstance(event, Round):
            if not event.prompt and not pipeline.finished:
                learn(planner, event, seconds)
                pipeline.set_schedule(planner.schedule())
            seconds = 0.0
        yield event


def learn(planner: Planner, round: Round, seconds: float) -> None:
    """seconds: since the round before."""
    planner.after(
        committed=len(round.committed),
        judged=len(round.judged),
        accepted=round.accepted,
        seconds=seconds,
        copied=sum(draft.copied > 0 for draft in round.judged),
        siblings=round.siblings,
        rescued=round.rescued,
        position=round.position,
        dropped=round.dropped,
    )
