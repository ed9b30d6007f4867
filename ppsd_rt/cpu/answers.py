"""The answers of a backend in the making: all in one loop, but for one alone that drafts while it verifies."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import RLock
from typing import Any, Protocol, TypeAlias

from .. import _native
from ..backend import Cancellation, one_at_a_time
from ..pipeline.rounds import Drafted, Limits, Round

MOST_ANSWERS = 48  # that the loop works on at once; below the 64 rows of a pass, so that prompts join
PROMPT_ROWS = 16  # of a round, at the least


class Lone(Protocol):
    """An answer that has the stages to itself. text, seconds: of what is committed, once it has stopped."""

    @property
    def text(self) -> Sequence[int]: ...
    @property
    def seconds(self) -> float: ...
    def __iter__(self) -> Iterator[Round | Drafted]: ...
    def cancel(self) -> None: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def spans(self) -> list[tuple[str, int, int, float, float]]: ...


Stream: TypeAlias = Lone | _native.LoopAnswer


class Answer:
    """An answer, wherever it is decoded.

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
        self.streams: list[Stream] = []  # its events are those of all, in this order
        self.ended = False  # by what needs the engine for itself

    @property
    def stream(self) -> Stream:
        """Where it is decoded now."""
        return self.streams[-1]

    def use(self, stream: Stream) -> None:
        """It goes on there; the events that its consumer has not had from the one before remain to be had first."""
        self.streams.append(stream)
        self.cancellation.source = stream if isinstance(stream, _native.LoopAnswer) else None
        self.cancellation.tells(stream.cancel)

    def whole(self, text: Sequence[int]) -> bool:
        """Does the answer end with this text, prompt included?"""
        begun = len(text) > len(self.prompt)
        return begun and (len(text) >= self.limits.end or text[-1] in self.limits.stop_ids)


class Answers:
    """Where answers are decoded: in the loop. One alone whose schedule overlaps has the stages to itself, a thread or a
    rank for each; when another one comes, both go on in the loop.
    """

    def __init__(self, make_loop: Callable[[], _native.Loop], keep_rows: Callable[[_native.Loop], None]) -> None:
        """keep_rows: gives the loop what a lone answer has computed, once that has stopped."""
        self._make_loop, self._keep_rows = make_loop, keep_rows
        self.lock = RLock()
        self._loop: _native.Loop | None = None
        self._lone: Answer | None = None
        self._many: set[Answer] = set()
        self._dropped: deque[Answer] = deque()  # where nobody could wait for their end
        self.last: Stream | None = None  # for its timeline

    @property
    def loop(self) -> _native.Loop:
        if self._loop is None:
            self._loop = self._make_loop()
        return self._loop

    def begin(
        self,
        answer: Answer,
        session: Callable[[], Lone | None],
        planner: Callable[[bool], _native.Planner | None],
    ) -> None:
        """session: begins one for this answer, if its stages are to overlap.

        planner: gives the one of `auto`; told whether nothing else is decoded now, so that it may measure.
        """
        self._leave_dropped()
        with self.lock:
            alone = self._lone is None and not self._many
            if alone and (by_itself := session()) is not None:
                self._lone = answer
                self.last = by_itself
                answer.use(by_itself)
                return
            self._move_lone()
            steering = planner(alone)
            self.last = self.loop.add(answer.prompt, masks=answer.masks(), planner=steering, **answer.request)
            answer.use(self.last)
            self._many.add(answer)

    def events(self, answer: Answer) -> Iterator[Round | Drafted]:
        """Raises PpsdError if the answer is ended on the way, and what the extension raises."""
        whole, number = False, 0
        while stream := self._stream(answer, number):
            number += 1
            for event in stream:
                if isinstance(event, Round):
                    whole = answer.limits.reached_by(event)
                yield event
                one_at_a_time(whole or not answer.ended, answer.cancellation)
            if not whole and not answer.ended and not answer.cancellation.asked:
                with self.lock:  # its session had no memory for more
                    if self._lone is answer:
                        self._move_lone()
        one_at_a_time(whole or not answer.ended, answer.cancellation)

    def _stream(self, answer: Answer, number: int) -> Stream | None:
        with self.lock:  # so that it has moved, if it is about to
            return answer.streams[number] if number < len(answer.streams) else None

    def leave(self, answer: Answer) -> None:
        """Its consumer wants no more of it. Returns when nothing works on it.

        In a thread that decodes it does not wait: there garbage collection has found the answer, in a mask's Python, so
        it would wait for itself.
        """
        if _native.in_callback():
            self._dropped.append(answer)
            if answer.streams:
                answer.stream.cancel()
            return
        with self.lock:
            self._many.discard(answer)
            if self._lone is answer:
                self._lone = None
                answer.stream.close()  # before another one may have the engine
        if answer.streams:
            answer.stream.close()  # in the loop, at the end of the round

    def _leave_dropped(self) -> None:
        with suppress(IndexError):
            while True:
                self.leave(self._dropped.popleft())

    def end_all(self) -> None:
        """Nothing works on any answer when this returns."""
        self._leave_dropped()
        with self.lock:
            answers = [*self._many, *([self._lone] if self._lone else [])]
            for answer in answers:
                answer.ended = True  # before its consumer sees it end
                answer.stream.cancel()
            for answer in answers:
                self.leave(answer)

    def forget_loop(self) -> None:
        """The next one is made anew: of another exit head, or in another process."""
        self.end_all()
        self._loop = None

    def forked(self) -> None:
        self.lock = RLock()
        self._loop = self._lone = self.last = None
        self._many, self._dropped = set(), deque()

    def _move_lone(self) -> None:
        answer = self._lone
        if answer is None:
            return
        loop = self.loop  # which there may be no memory for: then it goes on
        if self._lone is not answer:  # garbage collection has found it meanwhile
            return
        self._lone = None
        session = answer.stream
        assert not isinstance(session, _native.LoopAnswer)
        session.stop()
        text = session.text
        if answer.cancellation.asked or answer.whole(text):
            return
        self._keep_rows(loop)
        committed = len(text) - len(answer.prompt)
        answer.use(loop.add(text, committed=committed, seconds=session.seconds, masks=answer.masks(), **answer.request))
        self._many.add(answer)
