"""An answer in the making, and what is made of it."""

import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import GEN_RUNNING, getgeneratorstate
from threading import RLock
from time import perf_counter
from typing import Self

from .backend import Backend, Cancellation, RunOptions, one_at_a_time
from .errors import PpsdError
from .models.config import LlamaConfig
from .models.tokenizer import Tokenizer
from .pipeline.rounds import Draft, Drafted, Limits, Logprob, Round
from .pipeline.schedule import Auto, Schedule, describe
from .sampling.params import SamplingParams
from .statistics import Statistics
from .text import StopStrings
from .turns import Turn, Turns

Prompt = str | Iterable[Mapping[str, str]] | Iterable[int]


@dataclass(frozen=True)
class Token:
    """A committed token and the text that it made certain (text may lag behind: split characters, stop strings).

    origin: `accepted`; `copied` (accepted, and copied from before); `corrected`; `sibling` (the same, and the draft's
    sibling); `bonus` (after a fully accepted chunk, or a sibling); or `plain` (nothing was drafted).
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
    stop: the stop string that ended it.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    finish_reason: str
    statistics: Statistics
    logprobs: tuple[Logprob, ...] = ()
    seed: int | None = None
    stop: str | None = None


class Generation:
    """An answer in the making: an iterator of committed `Token`s, or of `events()`; then `completion`.

    `with engine.generate(...) as generation:` closes it at the end.
    """

    def __init__(
        self,
        backend: Backend,
        config: LlamaConfig,
        tokenizer: Tokenizer,
        turns: Turns,
        prompt_ids: list[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        options: RunOptions,
    ) -> None:
        self.prompt_ids, self.params = prompt_ids, params.seeded()
        self._eos = frozenset() if params.ignore_eos else frozenset(config.eos_token_ids)
        self._context = config.max_position_embeddings
        self._end = min(len(prompt_ids) + params.max_tokens, self._context)
        limits = Limits(self._end, self._eos | frozenset(params.stop_token_ids))
        self._backend, self._head = backend, backend.head
        self._cancellation = Cancellation()
        taken = self.params.for_backend(prompt_ids)
        self._rounds = backend.rounds(prompt_ids, taken, schedule, limits, options, self._cancellation)
        self._events = self._play(turns)
        self._place = Turn()
        self._turn = RLock()  # of the thread that is in `_events`
        self._process = os.getpid()
        decoder = tokenizer.stream(skip_special_tokens=params.skip_special_tokens)
        for id in prompt_ids:  # what the prompt's end means for the first characters is the decoder's to know
            decoder.push(id)
        self._text = StopStrings(decoder, params.stop, params.min_tokens)
        self._ids: list[int] = []
        self._logprobs: list[Logprob] = []
        self._pieces: list[str] = []
        self._reason = "cancelled"
        self._rest = ""
        self.statistics = Statistics(
            describe(schedule), backend.name, backend.dtype, backend.threads, prompt_tokens=len(prompt_ids)
        )

    def __iter__(self) -> Iterator[Token]:
        """Every token as soon as it is committed, several at once where drafts were right; goes on where it stopped.

        Raises PpsdError when the answer cannot go on: another one has begun on this engine, a rank was lost, or it was
        begun before a fork.
        """
        for event in self.events():
            if isinstance(event, Committed):
                yield from event.tokens

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
                if getgeneratorstate(self._events) != GEN_RUNNING:
                    self._events.close()
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
        if os.getpid() != self._process:  # `_turn` may be held by a thread that is not here
            raise PpsdError("this answer was begun before a fork: begin it again in this process")
        with self._turn:
            self._place.go_on()
            if self._place.ended and self._reason == "cancelled" and not self._cancellation.asked:
                self._events.close()
                one_at_a_time(False, self._cancellation)
            return next(self._events, None)

    def _play(self, turns: Turns) -> Generator[Committed | Drafted, None, None]:
        worked = 0.0
        try:
            self._cancellation.tells(self._place.wake)
            turns.take(self._place, lambda: self._cancellation.asked)
            if self._cancellation.asked:
                return
            spent, begun = 0.0, perf_counter()  # the caller's time between events does not count
            if self._backend.head is not self._head:  # the schedule was checked against the one that was there
                raise PpsdError("the exit head was changed after this answer was asked for: ask again")
            for event in self._rounds:
                if self._cancellation.asked:
                    break
                spent += perf_counter() - begun
                if isinstance(event, Round):
                    committed = self._commit(event)
                    if event.seconds is not None:  # this backend works on in the caller's time: its own clock counts
                        spent, worked = event.seconds - worked, event.seconds
                    self.statistics.add(committed.round, spent)
                    spent = 0.0
                    yield committed
                    if self._text.found or self._cancellation.asked:
                        break
                else:
                    yield event
                begun = perf_counter()
        finally:
            self._rounds.close()
            turns.give(self._place)
            if self._reason == "cancelled":
                self._rest = self._text.flush()
                self._pieces.append(self._rest)

    @property
    def completion(self) -> Completion:
        """The answer so far; whole once the iteration has ended."""
        ids, text = tuple(self._ids), "".join(self._pieces)
        logprobs, seed, stop = tuple(self._logprobs), self.params.seed, self._text.stop
        return Completion(tuple(self.prompt_ids), ids, text, self._reason, self.statistics, logprobs, seed, stop)

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
            return "eos"
        if self._text.found or id in self.params.stop_token_ids:
            return "stop"
        if len(self.prompt_ids) + len(self._ids) < self._end:
            return "cancelled"
        return "length" if len(self._ids) == self.params.max_tokens else "context"


def _origin(round: Round, place: int) -> str:
    if place < round.accepted:
        return "copied" if round.judged[place].copied else "accepted"
    if not round.judged:
        return "plain"
    if place == len(round.judged):
        return "bonus"
    return "sibling" if round.rescued else "corrected"


def _cut(round: Round, count: int) -> Round:
    """The round without what it committed after a stop string."""
    judged: tuple[Draft, ...] = round.judged[:count]
    return replace(
        round,
        committed=round.committed[:count],
        judged=judged,
        accepted=min(round.accepted, count),
        rescued=round.rescued and count > len(judged),
        logprobs=round.logprobs[:count],
        dropped=round.dropped + len(round.judged) - len(judged),
    )
