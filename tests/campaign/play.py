"""Decodes a case's answers on the engine under test: one after another, or several at once."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ppsd_rt.async_generation import AsyncGeneration
from ppsd_rt.backend import Oracle, RunOptions, common_prefix
from ppsd_rt.engine import Engine
from ppsd_rt.generation import Committed, Completion, Generation
from ppsd_rt.pipeline.rounds import Drafted

from .draw import Answer, Case


@dataclass
class Played:
    """What an answer gave. passes: verification passes by "drafts judged/accepted".

    shared: rows of its prompt that the answer before has left; None: others were decoded beside it.
    """

    answer: Answer
    completion: Completion
    passes: dict[str, int] = field(default_factory=dict)
    shared: int | None = None
    after_open: bool = False  # the answer before was abandoned, and left for this one to end

    @property
    def whole(self) -> bool:
        return self.completion.finish_reason != "cancelled"


def play(case: Case, engine: Engine, prompts: Sequence[list[int]], plain: Sequence[Completion]) -> Iterator[Played]:
    """prompts, plain: of each text, its prompt and its plain answer."""
    if case.at_once == 1:
        yield from _one_by_one(case, engine, prompts, plain)
    else:
        yield from asyncio.run(_at_once(case, engine, prompts))


def _one_by_one(
    case: Case, engine: Engine, prompts: Sequence[list[int]], plain: Sequence[Completion]
) -> Iterator[Played]:
    held: list[int] = []  # the text whose rows the engine has
    left: Generation | None = None
    for answer in case.answers:
        prompt, oracle = prompts[answer.text], None
        if answer.acceptance is not None:
            oracle = Oracle((*prompt, *plain[answer.text].ids), answer.acceptance, answer.oracle_seed)
        options = RunOptions(report_drafts=answer.events is not None, oracle=oracle)
        generation = engine.generate(prompt, case.texts[answer.text].params, answer.schedule, options)
        played = Played(answer, generation.completion, {}, common_prefix(held, prompt), left is not None)
        for number, event in enumerate(generation.events(), 1):
            _count(played.passes, event)
            if number == answer.events:
                break
        played.completion = generation.completion
        left = None if played.whole or answer.closed else generation
        if not played.whole and answer.closed:
            generation.close()
        yield played
        held = [*prompt, *played.completion.ids]


async def _at_once(case: Case, engine: Engine, prompts: Sequence[list[int]]) -> list[Played]:
    """In the order in which they end. One that is abandoned is cancelled, or closed."""
    places = asyncio.Semaphore(case.at_once)
    ended: list[Played] = []

    async def one(answer: Answer) -> None:
        async with places:
            options = RunOptions(report_drafts=answer.events is not None)
            generation = engine.agenerate(
                prompts[answer.text], case.texts[answer.text].params, answer.schedule, options
            )
            async with generation:
                ended.append(await _consume(generation, answer))

    async with asyncio.TaskGroup() as group:
        for answer in case.answers:
            group.create_task(one(answer))
    return ended


async def _consume(generation: AsyncGeneration, answer: Answer) -> Played:
    passes: dict[str, int] = {}
    number = 0
    async for event in generation.events():
        number += 1
        _count(passes, event)
        if number == answer.events:
            if answer.closed:
                break
            generation.cancel()  # what has been committed by then is still handed out
    return Played(answer, generation.completion, passes)


def _count(passes: dict[str, int], event: Committed | Drafted) -> None:
    if isinstance(event, Committed) and not event.round.prompt:
        key = f"{len(event.round.judged)}/{event.round.accepted}"
        passes[key] = passes.get(key, 0) + 1
