"""Several answers of one engine, side by side, in one iteration."""

from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Self

from .generation import Committed, Completion, Generation, Token
from .pipeline.rounds import Drafted

_Item = tuple[int, Committed | Drafted | BaseException | None]


class Generations:
    """Answers in the making, numbered in the order in which they were asked for.

    Iterate over it for (number, token) as tokens come, or over `events()`; or `run()` it for a list. Once only.
    `with engine.generate_many(...) as generations:` closes it at the end.
    """

    def __init__(self, generations: Sequence[Generation], at_once: int) -> None:
        self._generations, self._at_once = tuple(generations), at_once
        self._events = self._play()

    def __len__(self) -> int:
        return len(self._generations)

    def __iter__(self) -> Iterator[tuple[int, Token]]:
        for number, event in self._events:
            if isinstance(event, Committed):
                for token in event.tokens:
                    yield number, token

    def events(self) -> Iterator[tuple[int, Committed | Drafted]]:
        """(number, event): rounds as they are committed, and draft tokens, as of `Generation.events`."""
        return self._events

    def run(self) -> list[Completion]:
        """Decode all to their ends, and give them in order. Raises what one of them raises; then all are ended."""
        for _ in self._events:
            pass
        return self.completions

    @property
    def completions(self) -> list[Completion]:
        """The answers so far, in order."""
        return [generation.completion for generation in self._generations]

    def completion(self, number: int) -> Completion:
        """The answer of this number so far."""
        return self._generations[number].completion

    def close(self) -> None:
        """End those that have not ended; returns when nothing works on any of them."""
        self._events.close()
        for generation in self._generations:
            generation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _play(self) -> Generator[tuple[int, Committed | Drafted], None, None]:
        generations = self._generations
        items: SimpleQueue[_Item] = SimpleQueue()
        pool = ThreadPoolExecutor(max(1, min(self._at_once, len(generations))), "ppsd-rt answer")
        try:
            for number, generation in enumerate(generations):
                pool.submit(_tell_events, generation, number, items)
            left = len(generations)
            while left:
                number, item = items.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield number, item
        finally:
            for generation in generations:
                generation.cancel()
            pool.shutdown(cancel_futures=True)


def _tell_events(generation: Generation, number: int, items: SimpleQueue[_Item]) -> None:
    try:
        for event in generation.events():
            items.put((number, event))
    except BaseException as error:  # whoever iterates sees it
        items.put((number, error))
    items.put((number, None))
