"""The engine: a model, its exit head and a backend, and `generate`."""

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import GEN_RUNNING, getgeneratorstate
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import Any, Self

from .arguments import whole_number
from .backend import Backend, Cancellation, RunOptions, make_backend
from .errors import PpsdError, UsageError
from .find_head import find_head
from .models import made
from .models.checkpoint import Checkpoint
from .models.head_file import HeadInfo
from .models.resolve import resolve_model
from .models.tokenizer import Tokenizer, load_tokenizer
from .models.unicode import check_unicode
from .printable import quoted
from .protocol import Draft, Drafted, Limits, Round
from .sampling import SamplingParams
from .schedule import AUTO, PLAIN, Auto, Schedule, copying, describe, parse_schedule
from .stages import Stages
from .statistics import Statistics
from .text import StopStrings

Prompt = str | Iterable[Mapping[str, str]] | Iterable[int]


@dataclass(frozen=True)
class Token:
    """A committed token and the text that it made certain (text may lag behind: split characters, stop strings).

    origin: `accepted`; `copied` (accepted, and copied from before); `corrected`; `sibling` (the same, and the draft's
    sibling); `bonus` (after a fully accepted chunk, or a sibling); or `plain` (nothing was drafted).
    """

    id: int
    position: int
    text: str
    origin: str


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
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    finish_reason: str
    statistics: Statistics


class Engine:
    """`Engine.from_pretrained("smollm2-135m").generate("Once upon a time").run().text`"""

    def __init__(self, checkpoint: Checkpoint, tokenizer: Tokenizer, backend: Backend, name: str) -> None:
        self.checkpoint, self.tokenizer, self.backend, self.name = checkpoint, tokenizer, backend, name
        self.config = checkpoint.config

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "smollm2-135m",
        *,
        exit_head: str | Path | None = "auto",
        backend: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
        stages: int | Sequence[int] = 1,
        head_dtype: str = "auto",
        kv_dtype: str = "auto",
    ) -> "Engine":
        """Load a model by any of the names that `models.resolve` knows.

        exit_head: a head's file; `auto`, the head that ships for this model, if one does; `none`; or `norm:E`, the
        model's own norm and LM head after layer E (`norm:E:V`: of which it draws the first V ids only).
        stages: how many stages the verification layers are cut into (or at which layers), for PPSD on many cores.
        device: also `cuda:0,cuda:1`: some layers on each; `stages` then says how many (1: as is best, as measured).
        head_dtype: what the cpu backend packs the exit head as (auto: as the model); it changes drafts, never answers.
        kv_dtype: what the cpu backend keeps keys and values as: float32, bfloat16 or int8 (auto: as the weights are, of
        int4 as int8; bfloat16 where head_dim is no multiple of 32). It is part of the format: it may change answers.
        Raises PpsdError with one line that says what to do.
        """
        try:
            checkpoint, tokenizer = open_model(str(model), backend)
            made = make_backend(backend, checkpoint, dtype, device, threads, stages, head_dtype, kv_dtype)
            engine = cls(checkpoint, tokenizer, made, str(model))
            engine.use_head(exit_head)
        except MemoryError:
            raise PpsdError(f"not enough memory to load {model}: free some, or choose a smaller --dtype") from None
        return engine

    @property
    def head(self) -> HeadInfo | None:
        """Kind, exit layer and origin of the exit head that drafts; None: there is none, only copies are drafted."""
        return self.backend.head

    def use_head(self, exit_head: str | Path | None) -> None:
        """Change the exit head; `exit_head` as in `from_pretrained`. Ends the answer in the making, if there is one.

        Raises UsageError for a name that means nothing, and PpsdError for a file that is missing, damaged or was
        trained for another model.
        """
        self.backend.use_head(find_head(str(exit_head), self.checkpoint))

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of a text (special tokens as the tokenizer adds them), of chat messages (by the template), or ids.

        Raises UsageError for what is none of these, is empty, holds ids outside the vocabulary or text that is not
        Unicode, or leaves no room for an answer in the model's context; PpsdError where the model has no chat template,
        or one that refuses the messages.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif isinstance(prompt, bytes | bytearray | Mapping) or not isinstance(prompt, Iterable):
            kind = type(prompt).__name__
            raise UsageError(f"the prompt must be a text, a list of messages or a list of token ids, not {kind}")
        else:
            items: list[Any] = list(prompt)
            messages = any(isinstance(item, str | Mapping) for item in items)
            ids = self._encode_messages(items) if messages else [whole_number("a prompt id", item) for item in items]
        if not ids:
            raise UsageError("the prompt is empty")
        if not all(0 <= id < self.config.vocab_size for id in ids):
            raise UsageError(f"a prompt id is outside the vocabulary of {self.config.vocab_size}")
        context = self.config.max_position_embeddings
        if len(ids) >= context:
            raise UsageError(f"the prompt has {len(ids)} tokens; {self.name} has a context of {context}; shorten it")
        return ids

    def _encode_messages(self, messages: list[Any]) -> list[int]:
        template = self.tokenizer.chat_template
        if template is None:
            raise PpsdError(f"{self.name} has no chat template; give it plain text (--raw)")
        text = template.render(messages)
        for number, message in enumerate(messages, 1):
            check_unicode(message["content"], f"message {number}")
        return self.tokenizer.encode(text, add_special_tokens=False)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        schedule: Schedule | Auto | str = AUTO,
        options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    ) -> "Generation":
        """Start an answer: iterate over the result for its tokens, or `.run()` it to the end.

        schedule: a text as for `--schedule`. `auto` measures this machine and, where drafts do not pay, decodes
        plainly. With a repetition penalty no siblings are verified.
        One answer at a time per engine: the one before ends when this one's first token is asked for.

        Raises, before anything is decoded, what `encode` raises for the prompt; UsageError for arguments of another
        type, a schedule that is not understood or that this backend cannot run; PpsdError for a schedule that drafts
        where there is no exit head.
        """
        if isinstance(schedule, str):
            schedule = parse_schedule(schedule)
        if not isinstance(schedule, Schedule | Auto):
            raise UsageError(f"schedule must be a Schedule or a text such as 'auto', not {quoted(schedule)}")
        if params is not None and not isinstance(params, SamplingParams):
            raise UsageError(f"params must be SamplingParams(...), not {quoted(params)}")
        if isinstance(schedule, Auto) and self.head is None:
            schedule = copying(PLAIN, schedule.lookup if self.backend.copies else 0)
        if isinstance(schedule, Schedule) and schedule.lookup and not self.backend.copies:
            raise UsageError(f"the {self.backend.name} backend copies no drafts: leave lookup= out of the schedule")
        if isinstance(schedule, Schedule) and schedule.siblings and not self.backend.siblings:
            name = self.backend.name
            raise UsageError(f"the {name} backend verifies no siblings: leave siblings= out of the schedule")
        params = params or SamplingParams()
        if isinstance(schedule, Schedule) and params.repetition_penalty != 1:
            schedule = replace(schedule, siblings=0.0)  # a sibling's row would have seen another text than its pass
        if isinstance(schedule, Schedule) and schedule.drafts and self.head is None:
            raise PpsdError(
                f"schedule {describe(schedule)} drafts, but {self.name} has no exit head: give --exit-head FILE or "
                "--exit-head norm:LAYER, train one with `ppsd-run distill`, or use --schedule plain"
            )
        return Generation(self, self.encode(prompt), params, schedule, options)

    def stages(self, params: SamplingParams | None = None) -> Stages:
        """The stages for a loop of your own. They have KV caches of their own: this engine's answers go on beside it.

        params: how tokens are chosen; where the answer ends is the loop's to say. They keep the exit head of now.
        Raises UsageError on a backend that has none to give, and PpsdError where memory or threads are lacking.
        """
        return Stages(self, params)


def open_model(model: str, backend: str) -> tuple[Checkpoint, Tokenizer]:
    """A model by any of its names, for a backend; opened, not read."""
    if model.startswith(made.PREFIX):
        if backend != "cuda":
            raise UsageError(f"the weights of {model} are made on a GPU: use --backend cuda")
        return made.made_model(model)
    folder = resolve_model(model)
    checkpoint = Checkpoint(folder)
    return checkpoint, load_tokenizer(folder, checkpoint.config.vocab_size)


class Generation:
    """An answer in the making: an iterator of committed `Token`s, or of `events()`; then `completion`.

    `with engine.generate(...) as generation:` closes it at the end.
    """

    def __init__(
        self,
        engine: Engine,
        prompt_ids: list[int],
        params: SamplingParams,
        schedule: Schedule | Auto,
        options: RunOptions,
    ) -> None:
        self.prompt_ids, self.params = prompt_ids, params
        config, backend = engine.config, engine.backend
        self._eos = frozenset() if params.ignore_eos else frozenset(config.eos_token_ids)
        self._context = config.max_position_embeddings
        self._end = min(len(prompt_ids) + params.max_tokens, self._context)
        limits = Limits(self._end, self._eos | frozenset(params.stop_token_ids))
        self._backend, self._head = backend, backend.head
        self._cancellation = Cancellation()
        self._rounds = backend.rounds(prompt_ids, params, schedule, limits, options, self._cancellation)
        self._events = self._play()
        self._turn = RLock()  # of the thread that is in `_events`
        self._process = os.getpid()
        decoder = engine.tokenizer.stream()
        for id in prompt_ids:  # what the prompt's end means for the first characters is the decoder's to know
            decoder.push(id)
        self._text = StopStrings(decoder, params.stop)
        self._ids: list[int] = []
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
        self._cancellation.ask()
        if self._turn.acquire(blocking=False):
            try:
                if getgeneratorstate(self._events) != GEN_RUNNING:
                    self._events.close()
            finally:
                self._turn.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rest(self) -> str:
        """The text of an answer that was ended early behind that of its tokens: held back, in case more would come."""
        return self._rest

    def _next(self) -> Committed | Drafted | None:
        if os.getpid() != self._process:  # `_turn` may be held by a thread that is not here
            raise PpsdError("this answer was begun before a fork: begin it again in this process")
        with self._turn:
            return next(self._events, None)

    def _play(self) -> Generator[Committed | Drafted, None, None]:
        spent, begun = 0.0, perf_counter()  # the caller's time between events does not count
        worked = 0.0
        try:
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
            if self._reason == "cancelled":
                self._rest = self._text.flush()
                self._pieces.append(self._rest)

    @property
    def completion(self) -> Completion:
        """The answer so far; whole once the iteration has ended."""
        ids, text = tuple(self._ids), "".join(self._pieces)
        return Completion(tuple(self.prompt_ids), ids, text, self._reason, self.statistics)

    def _commit(self, round: Round) -> Committed:
        tokens: list[Token] = []
        for place, id in enumerate(round.committed):
            text = self._text.push(id)
            self._ids.append(id)
            self._reason = self._reason_after(id)
            if self._reason != "cancelled":
                text += self._text.flush()
            self._pieces.append(text)
            tokens.append(Token(id, round.position + place, text, _origin(round, place)))
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
    """The round without what it committed behind a stop string."""
    judged: tuple[Draft, ...] = round.judged[:count]
    return replace(
        round,
        committed=round.committed[:count],
        judged=judged,
        accepted=min(round.accepted, count),
        rescued=round.rescued and count > len(judged),
        dropped=round.dropped + len(round.judged) - len(judged),
    )
