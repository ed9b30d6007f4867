"""The answers of a backend in the making: all in one loop."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any

from .. import _native
from ..backend import Cancellation, one_at_a_time
from ..pipeline.rounds import Drafted, Limits, Round

MOST_ANSWERS = 48  # that the loop works on at once; below the 64 rows of a pass, so that prompts join
PROMPT_ROWS = 16  # of a round, at the least


class Answer:
    """An answer of the loop.

    request: what the loop must know of it, see `_native.Loop.add`; masks: makes those of its grammar, if it has one.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        limits: Limits,
        cancellation: Cancellation,
        request: dict[str, Any],
        masks: Callable[[], tuple[Any, Any] | None],
    ) -> None:
        self.prompt, self.limits, self.cancellation = list(prompt), limits, cancellation
        self.request, self.masks = request, masks
        self.stream: _native.LoopAnswer | None = None  # once it has begun
        self.ended = False  # by what needs the engine for itself


class Answers:
    """Those that the loop decodes."""

    def __init__(self, make_loop: Callable[[], _native.Loop]) -> None:
        self._make_loop = make_loop
        self.lock = RLock()
        self._loop: _native.Loop | None = None
        self._decoded: set[Answer] = set()
        self._dropped: deque[Answer] = deque()  # where nobody could wait for their end
        self.last: _native.LoopAnswer | None = None  # for its timeline

    @property
    def loop(self) -> _native.Loop:
        if self._loop is None:
            self._loop = self._make_loop()
        return self._loop

    def begin(self, answer: Answer, planner: Callable[[bool], _native.Planner | None]) -> _native.LoopAnswer:
        """planner: gives the one of `auto`; told whether nothing else is decoded now, so that it may measure."""
        self._leave_dropped()
        with self.lock:
            steering = planner(not self._decoded)
            stream = self.loop.add(answer.prompt, masks=answer.masks(), planner=steering, **answer.request)
            self.last = answer.stream = answer.cancellation.source = stream
            answer.cancellation.tells(stream.cancel)
            self._decoded.add(answer)
            return stream

    def events(self, answer: Answer) -> Iterator[Round | Drafted]:
        """Raises PpsdError if the answer is ended on the way, and what the extension raises."""
        assert answer.stream is not None
        whole = False
        for event in answer.stream:
            if isinstance(event, Round):
                whole = answer.limits.reached_by(event)
            yield event
            one_at_a_time(whole or not answer.ended, answer.cancellation)
        one_at_a_time(whole or not answer.ended, answer.cancellation)

    def leave(self, answer: Answer) -> None:
        """Its consumer wants no more of it. Returns when nothing works on it.

        In a thread that decodes it does not wait: there garbage collection has found the answer, in a mask's Python, so
        it would wait for itself.
        """
        if _native.in_callback():
            self._dropped.append(answer)
            if answer.stream:
                answer.stream.cancel()
            return
        with self.lock:
            self._decoded.discard(answer)
        if answer.stream:
            answer.stream.close()  # at the end of the round

    def _leave_dropped(self) -> None:
        with suppress(IndexError):
            while True:
                self.leave(self._dropped.popleft())

    def end_all(self) -> None:
        """Nothing works on any answer when this returns."""
        self._leave_dropped()
        with self.lock:
            answers = [*self._decoded]
            for answer in answers:
                answer.ended = True  # before its consumer sees it end
                assert answer.stream is not None
                answer.stream.cancel()
            for answer in answers:
                self.leave(answer)

    def end(self) -> None:
        """As `end_all`, for good."""
        self.end_all()
        if self._loop is not None:
            self._loop.end()

    def forget_loop(self) -> None:
        """The next one is made anew: of another exit head, or in another process."""
        self.end_all()
        self._loop = self.last = None  # an answer holds its loop

    def forked(self) -> None:
        self.lock = RLock()
        self._loop = self.last = None
        self._decoded, self._dropped = set(), deque()
