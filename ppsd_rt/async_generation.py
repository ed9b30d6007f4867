"""An answer in the making for asyncio: a thread begins it, and the event loop asks for its events."""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Self
from weakref import WeakKeyDictionary

from .generation import Committed, Completion, Generation, Token
from .pipeline.rounds import Drafted

_MOST_THREADS = 4096  # an answer that finds none waits for one


class AsyncGeneration:
    """`async for token in engine.agenerate(...)`, or `await generation.run()`; then `completion`, as of `Generation`.

    It begins when the first token is asked for, and is decoded to its end from then on, whether or not its consumer
    keeps pace. Cancelled, closed or dropped, it leaves its place to others at once. One event loop may use it.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self.prompt_ids, self.params = generation.prompt_ids, generation.params
        self.statistics = generation.statistics
        self._pump: _Pump | None = None
        self._tokens: deque[Token] = deque()  # of the round at hand

    @property
    def completion(self) -> Completion:
        """The answer so far; whole once the iteration has ended."""
        return self._generation.completion

    def rest(self) -> str:
        """As `Generation.rest`."""
        return self._generation.rest()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        """Every token as soon as it is committed. Raises PpsdError as iterating over a `Generation` does."""
        while not self._tokens:
            event = await self._next()
            if event is None:
                raise StopAsyncIteration
            if not isinstance(event, Drafted):
                self._tokens.extend(event.tokens)
        return self._tokens.popleft()

    async def events(self) -> AsyncIterator[Committed | Drafted]:
        """As `Generation.events`."""
        while (event := await self._next()) is not None:
            yield event

    async def bursts(self) -> AsyncIterator[list[Committed | Drafted]]:
        """As `events`, but all that have come since the last ones: fewer and cheaper steps for who sends them on."""
        while (event := await self._next()) is not None:
            assert self._pump is not None
            yield [event, *self._pump.more()]

    async def run(self) -> Completion:
        """Decode to the end, and give all of the answer. The answer is cancelled with the task that waits here."""
        async with self:
            while await self._next() is not None:
                pass
        return self.completion

    def cancel(self) -> None:
        """The answer ends with the round at hand; any thread may call it, and it never waits."""
        self._generation.cancel()

    async def aclose(self) -> None:
        """End the answer here; returns when nothing works on it any more."""
        self.cancel()
        if self._pump is None:
            self._generation.close()
        else:
            await self._pump.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if "_generation" in self.__dict__:
            self._generation.cancel()
            if self._pump is not None:
                self._pump.forget()

    async def _next(self) -> Committed | Drafted | None:
        if self._pump is None:
            self._pump = _Pump(self._generation)
        return await self._pump.next()


class _Pump:
    """Into the running event loop: from a thread and, as soon as nothing has to be waited for, by the loop itself.

    Holds the generation, and not who consumes it.
    """

    def __init__(self, generation: Generation) -> None:
        self._generation, self._events = generation, generation.events()
        self._loop = asyncio.get_running_loop()
        self._drain: _Drain | None = None  # once the event loop looks for the events by itself
        self._items: deque[Committed | Drafted | BaseException | None] = deque()  # None: the end, which stays
        self._news = asyncio.Event()
        self._told = False  # the event loop will look at the items
        _threads(os.getpid()).submit(self._work)

    async def next(self) -> Committed | Drafted | None:
        """None: the end. Raises what ended the answer, after the events before it."""
        await self._until(lambda: bool(self._items))
        if self._items[0] is None:
            return None
        item = self._items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item

    def more(self) -> Iterator[Committed | Drafted]:
        """Those that are there."""
        while self._items and isinstance(item := self._items[0], Committed | Drafted):
            self._items.popleft()
            yield item

    async def end(self) -> None:
        await self._until(lambda: bool(self._items) and self._items[-1] is None)

    def forget(self) -> None:
        if self._drain:
            self._drain.pumps.discard(self)

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._news.clear()
            await self._news.wait()

    def _work(self) -> None:
        """In a thread, which may wait: for the beginning, for the end of an answer that is cancelled, for a session."""
        try:
            for event in self._events:
                self._hand_over(event)
                if self._generation.source is not None and self._call(self._listen):
                    return
        except BaseException as error:  # the consumer's to see
            self._hand_over(error)
        self._hand_over(None)

    def _hand_over(self, item: "Committed | Drafted | BaseException | None") -> None:
        self._items.append(item)
        if not self._told:
            self._told = True
            self._call(self._look)

    def _call(self, step: Callable[[], None]) -> bool:
        """In the event loop; False: it is closed, and nobody waits any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(step)
            return True
        return False

    def _look(self) -> None:
        self._told = False
        self._news.set()

    def _listen(self) -> None:
        self._drain = _drains.get(self._loop) or _Drain(self._loop)
        self._drain.pumps.add(self)
        if source := self._generation.source:
            source.tell_by(self._drain.notifier)
        self.collect()

    def collect(self) -> None:
        """The events that are there."""
        try:
            while (source := self._generation.source) and source.ready(0):
                self._news.set()
                self._items.append(event := next(self._events, None))
                if event is None:
                    self.forget()
                    return
        except Exception as error:  # the consumer's to see
            self._items.extend((error, None))
            self.forget()
            return
        if self._generation.source is None:  # cancelled: its end has to be waited for
            self.forget()
            _threads(os.getpid()).submit(self._work)


class _Drain:
    """The answers whose events an event loop looks for by itself, when a descriptor tells that any of them has some.

    A thread for each would take a core from the team that decodes whenever it wakes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        from ._native import Notifier

        self.notifier, self.pumps = Notifier(), set[_Pump]()
        loop.add_reader(self.notifier.descriptor, self._look)
        _drains[loop] = self

    def _look(self) -> None:
        self.notifier.clear()
        for pump in list(self.pumps):
            pump.collect()


@cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Kept for later answers: to start one keeps the event loop waiting until it has a core."""
    return ThreadPoolExecutor(_MOST_THREADS, "ppsd-rt answer")


_drains: WeakKeyDictionary[asyncio.AbstractEventLoop, _Drain] = WeakKeyDictionary()
