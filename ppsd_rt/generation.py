"""An answer in the making, and what is made of it."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from logging import getLogger
from threading import RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self

from .backend import Backend, Cancellation, RunOptions
from .errors import PpsdError
from .models.config import LlamaConfig
from .models.tokenizer import IncrementalDecoder, Tokenizer
from .pipeline.rounds import Draft, Drafted, Limits, Logprob, Round
from .pipeline.schedule import Auto, Schedule, describe
from .processes import not_after_fork
from .sampling.params import SamplingParams
from .statistics import Statistics

if TYPE_CHECKING:
    from ._native import LoopAnswer

Prompt = str | Iterable[Mapping[str, str]] | Iterable[int]


@dataclass(frozen=True)
class Token:
    """A committed token and the text that it made certain (text may lag behind: split characters, stop strings).

    origin: `accepted`; `copied` (accepted, and copied from before); `corrected`; `bonus` (after a
    fully accepted chunk); or `plain` (nothing was drafted).
    logprob: where `SamplingParams.logprobs` asks for it.
    """

    id: int
    position: int
    text: str
    origin: str
    logprob: Logprob | None = None


@dataclass(frozen=True)
class Committed:
    """A round, and its tokens."""

    round: Round
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Completion:
    """A finished answer.

    ids: all committed ids, the end-of-sequence id included. text: without special tokens, cut before a stop string.
    finish_reason: `eos`, `stop` (a stop string or stop id), `length` (max_tokens), `context`, or `cancelled`.
    logprobs: one for each id where `SamplingParams.logprobs` asks for them; else empty.
    seed: with it as `SamplingParams.seed` the answer can be repeated; None: it is greedy, and none was given.
    stop: the stop string that ended it. message: of `Engine.chat`, the answer as a message for the next turn, with
    `tool_calls` and `reasoning_content` where there are any.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    finish_reason: str
    statistics: Statistics
    logprobs: tuple[Logprob, ...] = ()
    seed: int | None = None
    stop: str | None = None
    message: Mapping[str, Any] = field(default_factory=dict)


class StopStrings:
    """Passes text on, except what may still turn out to be the beginning of a stop string.

    `stop` becomes the stop string that is complete; the text before it has been passed on, and nothing after it.
    Of several the one that is complete first counts, and of those that end at the same character the longest: so it
    does not matter how the text is cut into tokens, or in which order the strings are given.
    """

    def __init__(self, decoder: IncrementalDecoder, stop: Sequence[str], least: int = 0) -> None:
        """least: tokens before the first that may complete a stop string."""
        self._decoder, self._stop, self._least = decoder, tuple(stop), least
        self._held, self._pushed = "", 0
        self.stop: str | None = None

    @property
    def found(self) -> bool:
        return self.stop is not None

    def push(self, id: int) -> str:
        """The text that the token `id` makes certain."""
        self._pushed += 1
        return self._pass_on(self._decoder.push(id))

    def flush(self) -> str:
        """At the end of the answer: what was held back, without a last character that is not whole."""
        text, self._held = self._held, ""
        return text

    def _pass_on(self, piece: str) -> str:
        if not self._stop:
            return piece
        text, self._held = self._held + piece, ""
        found = [(place + len(stop), place, stop) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found and self._pushed > self._least:
            _, place, self.stop = min(found)
            return text[:place]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        if keep:
            text, self._held = text[:-keep], text[-keep:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class Keeper(Protocol):
    """Keeps what is answered: see ppsd_rt/learning/."""

    def begun(self) -> None: ...
    def ended(self, answer: "Generation") -> None:
        """Called once for each `begun`; by garbage collection too, in any thread: it takes no lock."""


class Generation:
    """An answer in the making: an iterator of committed `Token`s, or of `events()`; then `completion`.

    `with engine.generate(...) as generation:` closes it at the end.
    """

    def __init__(
        self,
        backend: Backend,
        config: LlamaConfig,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        options: RunOptions,
        keeper: Keeper | None = None,
    ) -> None:
        self._keeper = keeper
        self.lacks_template = ""  # a model's name: it has a chat template, and the prompt is a text without it
        self.read: Callable[[str], Mapping[str, Any]] | None = None  # the message of a text
        self.prompt_ids, self.params, self.options = prompt_ids, params.seeded(), options
        self._eos = frozenset() if params.ignore_eos else frozenset(config.eos_token_ids)
        self._context = config.max_position_embeddings
        most = backend.longest if params.max_tokens is None else len(prompt_ids) + params.max_tokens
        self._end = max(min(most, self._context), len(prompt_ids) + 1)
        limits = Limits(self._end, self._eos | frozenset(params.stop_token_ids))
        self._backend, self._head = backend, backend.head
        self._cancellation = Cancellation()
        taken = self.params.for_backend(prompt_ids)
        self._rounds = backend.rounds(prompt_ids, taken, schedule, limits, options, self._cancellation)
        self._turn = RLock()  # of the thread that asks for an event
        self._begun = self._running = self.over = False
        self._spent = self._worked = 0.0  # seconds, since the last round; and of the backend, by its own clock
        self._tokens: deque[Token] = deque()  # of the round at hand
        self._process = os.getpid()
        decoder = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        decoder.follow(prompt_ids)
        self._text = StopStrings(decoder, params.stop, params.min_tokens)
        self._ids: list[int] = []
        self._logprobs: list[Logprob] = []
        self._pieces: list[str] = []
        self._reason = "cancelled"
        self._rest = ""
        self.statistics = Statistics(
            describe(schedule), backend.name, backend.dtype, backend.threads, prompt_tokens=len(prompt_ids)
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Token:
        """Every token as soon as it is committed, several at once where drafts were right; goes on where it stopped.

        Raises PpsdError when the answer cannot go on: the exit head is changed, a rank was lost, or after a fork.
        """
        while not self._tokens:
            event = self._next()
            if event is None:
                raise StopIteration
            if isinstance(event, Committed):
                self._tokens.extend(event.tokens)
        return self._tokens.popleft()

    def run(self) -> Completion:
        """Decode to the end, and give all of the answer. Raises as iterating does; `completion` has what there is."""
        for _ in self.events():
            pass
        return self.completion

    def events(self) -> Iterator[Committed | Drafted]:
        """Rounds as they are committed and, with `RunOptions(report_drafts=True)`, draft tokens as they are drawn."""
        while (event := self._next()) is not None:
            yield event

    def close(self) -> None:
        """End the answer here; `completion` is what there is so far.

        Any thread may call it, and a signal handler, at any time and more than once. It returns when nothing works on
        the answer any more; but where another thread waits for the next token, or what the signal interrupted does, it
        returns at once: that iteration ends with the round in progress, without it, and `completion` is whole then.
        """
        self.cancel()
        if self._turn.acquire(blocking=False):
            try:
                if not self._running:
                    self._leave()
            finally:
                self._turn.release()

    def cancel(self) -> None:
        """The answer ends with the round at hand: as `close`, but it never waits."""
        self._cancellation.ask()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rest(self) -> str:
        """The text of an answer that was ended early, after that of its tokens: held back, in case more would come."""
        return self._rest

    def _next(self) -> Committed | Drafted | None:
        not_after_fork(self._process)  # `_turn` may be held by a thread that is not here
        with self._turn:
            if self.over:
                return None
            self._running = True
            try:
                event = self._step()
            except BaseException:
                self._leave()
                raise
            finally:
                self._running = False
            if event is None:
                self._leave()
            return event

    def _step(self) -> Committed | Drafted | None:
        """The next event; None at the end. No generator: its frame would keep this answer alive when it is dropped."""
        if not self._begun:
            if self._keeper:
                self._keeper.begun()
            self._begun = True
            if not self._cancellation.asked and self._backend.head is not self._head:
                # The schedule was checked against the head that was there.
                raise PpsdError("the exit head was changed after this answer was asked for: ask again")
        if self._text.found or self._cancellation.asked:
            return None
        begun = perf_counter()  # the caller's time between events does not count
        event = next(self._rounds, None)
        if event is None or self._cancellation.asked:
            return None
        self._spent += perf_counter() - begun
        if not isinstance(event, Round):
            return event
        committed = self._commit(event)
        if event.seconds is not None:  # this backend works on in the caller's time: its own clock counts
            self._spent, self._worked = event.seconds - self._worked, event.seconds
        self.statistics.add(committed.round, self._spent)
        self._spent = 0.0
        return committed

    def _leave(self) -> None:
        """Leaves the place to others, once."""
        if self.over:
            return
        self.over = True
        try:
            self._rounds.close()
        finally:
            if self._reason == "cancelled":
                self._rest = self._text.flush()
                self._pieces.append(self._rest)
            if self._keeper and self._begun:
                self._keeper.ended(self)
            del self._backend  # an answer that is kept keeps no model in memory: nor does who is told to cancel
            self._cancellation.tells(lambda: None)
            self._cancellation.source = None

    @property
    def source(self) -> "LoopAnswer | None":
        """While it may be asked for events that are there already, without waiting; it is not once it is cancelled."""
        return None if self._cancellation.asked else self._cancellation.source

    @property
    def running(self) -> bool:
        """Has it begun, and not ended?"""
        return self._begun and not self.over

    def __del__(self) -> None:
        if "_tokens" in self.__dict__:  # all before it was made
            self._leave()

    def __repr__(self) -> str:
        state = self._reason if self.over else "in progress" if self._begun else "not begun"
        return f"<Generation: {len(self.prompt_ids)} prompt tokens, {len(self._ids)} tokens, {state}>"

    def __reduce__(self) -> NoReturn:
        raise PpsdError("an answer in the making belongs to its process: pickle its completion instead")

    @property
    def completion(self) -> Completion:
        """The answer so far; whole once the iteration has ended."""
        ids, text = tuple(self._ids), "".join(self._pieces)
        logprobs, seed, stop = tuple(self._logprobs), self.params.seed, self._text.stop
        made = Completion(tuple(self.prompt_ids), ids, text, self._reason, self.statistics, logprobs, seed, stop)
        return replace(made, message=self.read(text)) if self.read else made

    def _commit(self, round: Round) -> Committed:
        tokens: list[Token] = []
        for place, id in enumerate(round.committed):
            hidden = id in self._eos and not self.params.skip_special_tokens
            text = "" if hidden else self._text.push(id)
            self._ids.append(id)
            self._reason = self._reason_after(id)
            if self._reason != "cancelled":
                text += self._text.flush()
            self._pieces.append(text)
            logprob = round.logprobs[place] if round.logprobs else None
            if logprob is not None:
                self._logprobs.append(logprob)
            tokens.append(Token(id, round.position + place, text, _origin(round, place), logprob))
            if self._text.found:
                round = _cut(round, place + 1)
                break
        return Committed(round, tuple(tokens))

    def _reason_after(self, id: int) -> str:
        if id in self._eos:
            if self.lacks_template and len(self._ids) == 1:
                _warn_of_raw_text(self.lacks_template)
            return "eos"
        if self._text.found or id in self.params.stop_token_ids:
            return "stop"
        if len(self.prompt_ids) + len(self._ids) < self._end:
            return "cancelled"
        return "length" if len(self._ids) == self.params.max_tokens else "context"


@cache
def _warn_of_raw_text(model: str) -> None:
    """Once for a model."""
    getLogger("ppsd_rt").warning(
        "%s answered a raw text with nothing at all: generate gives a text no chat template, chat does", model
    )


def _origin(round: Round, place: int) -> str:
    if place < round.accepted:
        return "copied" if round.judged[place].copied else "accepted"
    if not round.judged:
        return "plain"
    if place == len(round.judged):
        return "bonus"
    return "corrected"


def _cut(round: Round, count: int) -> Round:
    """The round without what it committed after a stop string."""
    judged: tuple[Draft, ...] = round.judged[:count]
    return replace(
        round,
        committed=round.committed[:count],
        judged=judged,
        accepted=min(round.accepted, count),
        logprobs=round.logprobs[:count],
        dropped=round.dropped + len(round.judged) - len(judged),
    )
