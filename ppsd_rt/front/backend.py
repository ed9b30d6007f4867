"""The backend of a front: engines elsewhere decode, and an answer outlives them.

What is committed is kept here. When an engine is lost, the text so far is the prompt of the rest: `Limits.own` says
how much of it is the answer's. Noise depends on positions and kernels are row-invariant, so the rest has the same bits.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..backend import Cancellation, Request
from ..errors import PpsdError, UsageError
from ..models.head_file import HeadFile, HeadInfo
from ..pipeline.rounds import Drafted, Logprob, Round
from .asks import Ask, EngineLost, EngineSlots, Facts
from .learned import hash_of
from .wire import head_text

MOST_LOSSES = 10  # of engines, one after the other, without a token of the answer: then it is what ends them


class FrontBackend:
    outlived = True  # engines may have heard of a head from a front before
    concurrency = 1 << 16  # answers that have no place yet wait for one here

    def __init__(self, facts: Facts, places: EngineSlots) -> None:
        self._facts, self._places = facts, places
        self.name, self.device, self.dtype, self.threads = facts.name, facts.device, facts.dtype, facts.threads
        self.longest, self.copies = facts.longest, facts.copies
        self.extras = frozenset(facts.extras)

    @property
    def head(self) -> HeadInfo | None:
        return self._facts.head

    def use_head(self, file: HeadFile | None) -> None:
        raise UsageError("engines of a front get their exit head when they start: give them --exit-head")

    def pack_head(self, file: HeadFile) -> str:
        """As engines are told of it."""
        return head_text(file)

    def swap_head(self, file: HeadFile, packed: str) -> None:
        """To a head of the same sizes, in every engine when nothing is decoded there."""
        self._facts = replace(self._facts, head=file.info)
        self._places.tell("head", hash=hash_of(packed), head=packed)

    def recall(self, ids: Sequence[int], owner: int) -> None:
        """Copy drafts from this text too, as if it had been answered by every engine."""
        self._places.tell("recall", ids=[*map(int, ids)], owner=owner)

    def know(self, successors: npt.NDArray[np.int32] | None) -> None:
        """Every engine counts by itself."""

    def rounds(self, *request: *Request) -> Generator[Round | Drafted, None, None]:
        prompt, params, schedule, limits, options, cancellation = request
        if options.oracle or options.trace:
            raise UsageError("oracles and timelines do not go through a front: ask the engine itself")
        text, before, losses = list(prompt), 0.0, 0
        while (place := self._places.take(text, cancellation)) is not None:
            own, seconds = limits.own + len(text) - len(prompt), before
            ask = Ask(list(text), params, schedule, replace(limits, own=own), options.report_drafts, options.copied_by)
            try:
                with closing(place.events(ask, cancellation)) as events:
                    for event in events:
                        if isinstance(event, Round):
                            text += event.committed
                            losses = 0
                            seconds = before + (event.seconds or 0.0)
                            # What another engine begins with is a round like any other.
                            first = event.prompt and own == limits.own
                            event = replace(event, prompt=first, seconds=event.seconds and seconds)
                        yield event
                return
            except EngineLost as lost:
                if len(text) > len(prompt) and (len(text) >= limits.end or text[-1] in limits.stop_ids):
                    return  # all but its end has come
                before, losses = seconds, losses + 1
                if losses == MOST_LOSSES:
                    raise PpsdError(f"{losses} engines were lost at this answer: {lost}") from None
            finally:
                place.leave()

    def explain(self) -> str:
        return ""

    def logits(self, ids: Sequence[int], last: int = 1) -> npt.NDArray[np.float32]:
        raise PpsdError("logits stay with the engine: run this in one process")

    def logprobs(self, ids: Sequence[int], top: int) -> list[Logprob]:
        for _ in range(MOST_LOSSES):
            place = self._places.take(list(ids), Cancellation())
            assert place is not None  # nobody cancels
            try:
                return place.logprobs(list(ids), top)
            except EngineLost:
                continue
            finally:
                place.leave()
        raise PpsdError(f"{MOST_LOSSES} engines were lost at this prompt")

    def bytes_per_token(self, context: int) -> int:
        return 0  # not known here

    def spans(self) -> list[tuple[str, int, int, float, float]]:
        return []

    def facts(self) -> dict[str, Any]:
        return dict(self._facts.facts)
