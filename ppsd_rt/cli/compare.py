"""`--compare`: answers made again with their schedule and plainly, in turns, so that both meet the same machine."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from ..engine import Engine
from ..errors import PpsdError
from ..generation import Completion
from ..pipeline.schedule import PLAIN, Auto, Schedule
from ..sampling.params import SamplingParams
from ..statistics import Statistics

TURNS = 4  # who begins one is second in the next

Turn = tuple[float, float]  # seconds of decoding, with the schedule and plainly


@dataclass(frozen=True)
class Comparison:
    """plain: of the last turn."""

    turns: tuple[Turn, ...]
    plain: Statistics


def compare(
    engine: Engine, completion: Completion, params: SamplingParams, schedule: Schedule | Auto, printed: bool
) -> Comparison:
    """TURNS times both. The ids must be those of the answer, or this project has a bug: PpsdError.

    printed: as the answer was, piece by piece. That takes time of the cores that decode, so here it is done too.
    """
    turns: list[Turn] = []
    for number in range(TURNS):
        order = (schedule, PLAIN) if number % 2 == 0 else (PLAIN, schedule)
        made = [_again(engine, completion, params, which, printed) for which in order]
        fast, plain = made if number % 2 == 0 else reversed(made)
        turns.append((fast.decode_seconds, plain.decode_seconds))
    return Comparison(tuple(turns), plain)


def _again(
    engine: Engine, completion: Completion, params: SamplingParams, schedule: Schedule | Auto, printed: bool
) -> Statistics:
    engine.forget()  # the answer before, which would be copied
    generation = engine.generate(completion.prompt_ids, params, schedule)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        for token in generation:
            if printed:
                print(token.text, end="", flush=True, file=nowhere)
    if generation.completion.ids != completion.ids:
        raise PpsdError("the answer differs from plain decoding: this is a bug; `ppsd-run check` shows where")
    return generation.statistics


def together(comparisons: Sequence[Comparison]) -> Iterator[Turn]:
    """The turns of several answers as if they were one."""
    for turn in zip(*(one.turns for one in comparisons), strict=True):
        yield sum(fast for fast, _ in turn), sum(plain for _, plain in turn)


def said(turns: Sequence[Turn]) -> str:
    """How much faster, with the range over the turns; nothing for answers of one token."""
    ratios = sorted(plain / fast for fast, plain in turns if fast > 0 and plain > 0)
    if not ratios:
        return ""
    seen = f"{ratios[0]:.2f} to {ratios[-1]:.2f} in {len(ratios)} turns"
    if ratios[0] <= 1 <= ratios[-1]:
        return f"no difference from plain decoding seen here ({seen})"
    return f"{median(ratios):.2f}x plain decoding ({seen})"
