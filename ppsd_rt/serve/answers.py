"""The answers to one request: begun together, run side by side, ended together."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.types import Receive

from ..backend import RunOptions
from ..errors import PpsdError
from ..generation import Committed, Completion
from ..pipeline.rounds import Drafted, Logprob
from ..sampling.params import SamplingParams
from .admission import Slots
from .errors import ApiError, from_engine
from .service import Service

Event = Committed | Drafted | Completion  # the last one, when an answer has ended by itself
Emit = Callable[[int, Sequence[Event]], Awaitable[None]]
FINISH = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}  # as OpenAI calls them
ParsedRequest = tuple[Sequence[list[int]], Sequence[SamplingParams]]  # prompts, and how each is answered

_UNREAD = 45.0  # seconds for which a client may read nothing
_LAST_WORDS = 5.0  # seconds to send the end of an answer in, to a client that reads slowly
_GONE = 499  # as nginx logs it; nobody is there to read it


class Answers:
    """One for each prompt and each of its sampling parameters, in this order."""

    def __init__(
        self,
        service: Service,
        asked: Callable[[], Awaitable[ParsedRequest]],
        count: int,
        options: RunOptions,
        echo: int | None = None,
        held_by: str = "response_format",
    ) -> None:
        """asked: gives what is asked, once there is room for so many answers. echo: before an answer, log-probabilities
        of its prompt, and of so many of the most probable ids.

        held_by: the field of the request that a grammar comes from.
        """
        self._service, self._options = service, options
        self._asked, self._count = asked, count
        self._wanted: list[tuple[list[int], SamplingParams]] = []
        self._prompt_tokens = 0
        self._generations: list[Any] = []
        self._ended: ApiError | None = None
        self._sending = self._sent = 0  # bursts of events
        self._held_by = held_by
        self._echo, self.echoed = echo, dict[tuple[int, ...], Sequence[Logprob | None]]()
        self._preparing: asyncio.Task[None] | None = None
        self.completions: list[Completion] = []
        self.unheld: list[dict[str, str]] = []  # places in the answer's schema, and why what stands there is not held

    async def run(self, emit: Emit | None, receive: Receive, noted: dict[str, object]) -> None:
        """Until all have ended; then `completions` has them. `emit` gets an answer's number and what has come of it.

        receive: of the request, whose body has been read: what comes then is that the client has gone.
        noted: gets what the log says of the request.
        Raises ApiError where the server has no room or has ended the answers.
        """
        with self._service.running(self.end, self._count) as slots:
            work = asyncio.current_task()
            assert work is not None
            watching = self._watch_client(receive), self._watch_time(work), self._watch_reader(work)
            watchers = [asyncio.create_task(one) for one in watching]
            try:
                await self._prepared()
                for prompt, params in self._wanted:
                    self._generations.append(self._service.begin(prompt, params, self._options))
                await self._run_all(emit, slots)
            except PpsdError as error:
                raise from_engine(error) from error
            finally:
                for watcher in watchers:
                    watcher.cancel()
                for generation in self._generations:
                    generation.cancel()
                self.completions = [generation.completion for generation in self._generations]
                if self._wanted:
                    self._note(noted)
        if self._ended is not None:
            raise self._ended

    @property
    def prompts(self) -> list[list[int]]:
        """Of each answer."""
        return [prompt for prompt, _ in self._wanted]

    def end(self, reason: ApiError) -> None:
        """With the round at hand; `run` raises `reason` then."""
        if self._ended is None:
            self._ended = reason
            if self._preparing is not None:
                self._preparing.cancel()
            for generation in self._generations:
                generation.cancel()

    def usage(self) -> dict[str, Any]:
        """As OpenAI tells it. Each prompt counts once, however many answers it has. While they run: so far."""
        completions = self.completions or [generation.completion for generation in self._generations]
        drafts = [self._service.owners.counts(completion) for completion in completions]
        tokens = sum(len(completion.ids) for completion in completions)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": sum(accepted for accepted, _ in drafts),
                "rejected_prediction_tokens": sum(rejected for _, rejected in drafts),
            },
        }

    async def _prepared(self) -> None:
        self._preparing = asyncio.create_task(self._prepare())
        try:
            await asyncio.wait([self._preparing])
        finally:
            self._preparing.cancel()
        if self._ended is not None:
            raise self._ended
        self._preparing.result()

    async def _prepare(self) -> None:
        prompts, params = await self._asked()
        answered: Counter[tuple[int, ...]] = Counter()  # prompts that are the same are several answers to one
        for prompt in prompts:
            same = tuple(prompt)
            for one in params:
                self._wanted.append((prompt, replace(one, index=answered[same])))
                answered[same] += 1
        self._prompt_tokens = sum(map(len, prompts))
        grammar = self._wanted[0][1].grammar
        if grammar is not None:
            self.unheld = await self._service.compile(grammar, self._held_by)
        if self._echo is not None:
            for same in {tuple(prompt) for prompt in self.prompts}:
                self.echoed[same] = await self._service.prompt_logprobs(same, self._echo)

    async def _run_all(self, emit: Emit | None, slots: Slots) -> None:
        runs = [asyncio.create_task(self._run_one(i, emit, slots)) for i in range(len(self._generations))]
        try:
            await asyncio.gather(*runs)
        finally:
            for run in runs:
                run.cancel()
            await asyncio.wait(runs)

    async def _run_one(self, index: int, emit: Emit | None, slots: Slots) -> None:
        clock, metrics = self._service.settings.clock, self._service.metrics
        before, first = clock(), True
        generation = self._generations[index]
        async with generation:
            async for events in generation.bursts():
                if any(isinstance(event, Committed) for event in events):
                    now = clock()
                    if first:
                        slots.began(now - before)
                        metrics.first.observe(now - before)
                    else:
                        metrics.between.observe(now - before)
                    before, first = now, False
                if emit is not None:
                    self._sending += 1
                    await emit(index, events)
                    self._sending, self._sent = self._sending - 1, self._sent + 1
        if emit is not None and generation.completion.finish_reason in FINISH:
            await emit(index, [generation.completion])

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ApiError(_GONE, "the client has gone"))

    async def _watch_time(self, work: "asyncio.Task[Any]") -> None:
        settings = self._service.settings
        await settings.sleep(settings.timeout)
        self.end(ApiError(504, f"the answer took longer than {settings.timeout:g} s (--timeout)", "timeout"))
        await settings.sleep(_LAST_WORDS)
        work.cancel()

    async def _watch_reader(self, work: "asyncio.Task[Any]") -> None:
        """What a client does not read is held in memory: events of its answers, which go on meanwhile."""
        settings, sent = self._service.settings, -1
        while not (self._sending and self._sent == sent):
            sent = self._sent
            await settings.sleep(_UNREAD)
        self.end(ApiError(_GONE, f"the client has read nothing for {_UNREAD:g} s"))
        work.cancel()

    def _note(self, noted: dict[str, object]) -> None:
        for completion in self.completions:
            self._service.metrics.ended(completion)
        usage, drafts = self.usage(), [completion.statistics for completion in self.completions]
        accepted = sum(s.accepted + s.copied_accepted for s in drafts)
        noted |= {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "accepted": accepted,  # of all drafts: the log is the operator's
            "rejected": sum(s.judged + s.copied_judged + s.dropped for s in drafts) - accepted,
            "finish": ",".join(completion.finish_reason for completion in self.completions),
        }
