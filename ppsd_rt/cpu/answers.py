"""The answers of a backend in the making: all in one loop."""

import atexit
import os
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from time import monotonic
from typing import ParamSpec, TypeVar
from weakref import WeakMethod, WeakSet

from .. import _native
from ..backend import ENDED, Cancellation, Request, RunOptions
from ..errors import GrammarFailed, PpsdError
from ..pipeline import learned
from ..pipeline.rounds import Drafted, Limits, Round
from ..pipeline.schedule import Auto, Schedule, copying
from .machine import no_memory

MOST_ANSWERS = 48  # that the loop works on at once; below the 64 rows of a pass, so that prompts join
KEPT_AFTER = 10.0  # seconds between two times at which what the policy has learned is kept
PROMPT_ROWS = 16  # of a round, at the least

_living: WeakSet["Answers"] = WeakSet()


@atexit.register
def _end_answers() -> None:
    """The thread of a loop may ask a grammar, or passes, which need Python."""
    for answers in list(_living):
        answers.end()


_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def weakly(method: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """The method, without keeping its object alive: so that dropping a backend frees its memory at once."""
    found = WeakMethod(method)

    def call(*args: _Args.args, **named: _Args.kwargs) -> _Result:
        living = found()
        assert living is not None  # it is what calls
        return living(*args, **named)

    return call


@dataclass(eq=False)
class Answer:
    """An answer of the loop."""

    limits: Limits
    cancellation: Cancellation
    stream: _native.LoopAnswer | None = None  # once it has begun
    ended: bool = False  # by what needs the engine for itself


class Answers:
    """Those that the loop decodes."""

    def __init__(self, make_loop: Callable[[], _native.Loop]) -> None:
        self._make_loop, self._process = make_loop, os.getpid()
        self.learned_at: Path | None = None  # the file that keeps what the loop's policy has learned
        self._kept = -KEPT_AFTER
        self.lock = RLock()
        self._loop: _native.Loop | None = None
        self._decoded: set[Answer] = set()
        self._dropped: deque[Answer] = deque()  # where nobody could wait for their end
        self.last: _native.LoopAnswer | None = None  # for its timeline

    def decode(
        self,
        request: Request,
        ngrams: _native.Ngrams,
        grammar: int = 0,
    ) -> Generator[Round | Drafted, None, None]:
        """As `Backend.rounds`. ngrams: of all owners. grammar: its number, over ranks."""
        *_, limits, options, cancellation = request
        _living.add(self)
        answer = Answer(limits, cancellation)
        try:
            stream = self._begin(answer, request, ngrams, grammar)
            if options.prompt_progress:
                _tell_of_prompt(stream, options.prompt_progress)
            yield from self._events(answer)
        except _native.NoThread:
            raise
        except MemoryError:
            raise no_memory(limits.end) from None
        except _native.MaskFailed as error:
            raise GrammarFailed(str(error)) from None
        except RuntimeError as error:  # of a stage
            raise PpsdError(str(error)) from None
        finally:
            self._leave(answer)

    @property
    def loop(self) -> _native.Loop:
        if self._loop is None:
            self._loop = self._make_loop()
        return self._loop

    def _begin(
        self,
        answer: Answer,
        request: Request,
        ngrams: _native.Ngrams,
        grammar: int,
    ) -> _native.LoopAnswer:
        prompt, params, schedule, limits, options, cancellation = request
        self._leave_dropped()
        with self.lock:
            stream = self.loop.add(
                list(prompt),
                params,
                _of_auto(schedule, options) if isinstance(schedule, Auto) else schedule,
                limits,
                automatic=isinstance(schedule, Auto),
                report_drafts=options.report_drafts,
                # A text of its own: one for drafts, one for verification.
                masks=(options.masks(), options.masks()) if options.masks else None,
                ngrams=ngrams.of(options.copied_by),
                oracle=options.oracle,
                trace=options.trace,
                grammar=grammar,
                kept=options.kept,
            )
            self.last = answer.stream = cancellation.source = stream
            cancellation.tells(stream.cancel)
            self._decoded.add(answer)
            return stream

    def _events(self, answer: Answer) -> Iterator[Round | Drafted]:
        """Raises PpsdError if the answer is ended on the way, and what the extension raises."""
        assert answer.stream is not None
        whole = False
        for event in answer.stream:
            if isinstance(event, Round):
                whole = answer.limits.reached_by(event)
            yield event
            if answer.ended:
                break
        if answer.ended and not whole and not answer.cancellation.asked:
            raise PpsdError(ENDED)

    def _leave(self, answer: Answer) -> None:
        """Its consumer wants no more of it. Returns when nothing works on it.

        In a thread that decodes it does not wait: there garbage collection has found the answer, in a mask's Python, so
        it would wait for itself. After a fork nothing is done: a thread that is not here may have the lock.
        """
        if self._process != os.getpid():
            return
        if _native.in_callback():
            self._dropped.append(answer)
            if answer.stream:
                answer.stream.cancel()
            return
        with self.lock:
            self._decoded.discard(answer)
        if answer.stream:
            answer.stream.close()  # at the end of the round
            self.keep_learned()

    def _leave_dropped(self) -> None:
        with suppress(IndexError):
            while True:
                self._leave(self._dropped.popleft())

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
                self._leave(answer)

    def end(self) -> None:
        """As `end_all`, for good."""
        if self._process != os.getpid():
            return
        self.end_all()
        self.keep_learned(at_once=True)
        if self._loop is not None:
            self._loop.end()

    def keep_learned(self, at_once: bool = False) -> None:
        """In the cache folder, for the next process; now and then."""
        if self._loop is None or self.learned_at is None or not (at_once or monotonic() > self._kept + KEPT_AFTER):
            return
        self._kept = monotonic()
        learned.write(self.learned_at, self._loop.learned())

    def explain(self) -> str:
        """What the policy of the loop believes; empty while no answer has ended."""
        return self._loop.explain() if self._loop is not None else ""

    def forget_loop(self) -> None:
        """The next one is made anew: of another exit head."""
        self.end_all()
        self.keep_learned(at_once=True)
        self._loop = self.last = None  # an answer holds its loop


def _of_auto(schedule: Auto, options: RunOptions) -> Schedule:
    """What the policy is told of it: an oracle copies nothing."""
    return copying(schedule if options.oracle is None else replace(schedule, lookup=0, recycle=False))


def _tell_of_prompt(stream: _native.LoopAnswer, tell: Callable[[int, int], None]) -> None:
    """Until the first event of the answer is there."""
    try:
        while not stream.ready(50):
            tell(*stream.prompt_rows())
    finally:
        total = stream.prompt_rows()[1]
        tell(total, total)
