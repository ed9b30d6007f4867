"""The stages of a model, for a loop of your own: draft, verify, commit, roll back. `examples/own_loop.py` is one."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from .arguments import whole_number
from .backend import Backend
from .errors import PpsdError, UsageError
from .generation import Prompt
from .models.config import LlamaConfig
from .pipeline.rounds import Draft
from .printable import quoted
from .processes import not_after_fork
from .sampling.params import SamplingParams

if TYPE_CHECKING:
    from . import _native


class Stages:
    """One text on its way through a model, made by `engine.stages(params)`.

    A row is a token at its position, counted from 0, the prompt included. Always committed <= verified <= drafted:
    rows [0, drafted) have passed the layers before the exit, rows [0, verified) all layers, and rows [0, committed) are
    the text that stays. The newest token of the text has no row yet: hand it to `draft` or `verify` first.

    Sampled tokens are drawn by noise that depends on `params`, prompt, position and id alone. So a loop that commits
    what `verify` says decodes the ids of `engine.generate(..., "plain")`, however many rows it verifies at once. The
    prompt is what `prefill` was given; a text that begins without it has an empty one.

    Every method raises UsageError for rows that do not fit (ids outside the vocabulary, beyond the context, other than
    those that were drafted), and PpsdError while another thread is in one of them, after a fork, or without memory. The
    committed text stays as it was, but for `prefill`, which has dropped it.
    """

    def __init__(
        self,
        backend: Backend,
        config: LlamaConfig,
        encode: Callable[[Prompt], list[int]],
        name: str,
        params: SamplingParams,
    ) -> None:
        """encode: a prompt to its ids. name: of the model, for messages."""
        make: Callable[[SamplingParams], _native.Stages] | None = getattr(backend, "stages", None)
        if make is None:
            raise UsageError(f"the {backend.name} backend gives no stages: use --backend cpu or torch")
        others = [name for name in ("logprobs", "grammar", "min_tokens") if name in params.extras()]
        if others:
            raise UsageError(f"stages have no {others[0]}: leave it out")
        self.params = params.seeded()  # with the seed that was drawn, where none was given
        self._config, self._encode, self._name = config, encode, name
        self._drafts = backend.head is not None
        self._stages = make(self.params.for_backend(()))
        self._capacity = self.committed = self.verified = 0
        self._tokens: list[int] = []  # of the drafted rows
        self._turn = Lock()
        self._process = os.getpid()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The ids of the drafted rows."""
        return tuple(self._tokens)

    @property
    def drafted(self) -> int:
        return len(self._tokens)

    def prefill(self, prompt: Prompt) -> int:
        """Begin a text: all rows of the prompt through all layers, committed -> the first token of the answer.

        prompt: as for `Engine.generate`.
        """
        ids = self._encode(prompt)
        with self._alone():
            self._void(0)
            self._stages.begin(len(ids), self.params.for_backend(ids).seed or 0)
            self._run(ids)
            first = self._verify(ids, last=1)[0]
            self._commit(len(ids))
            return first

    def draft(self, ids: Iterable[int] = ()) -> Draft:
        """Run the rows `ids` at positions drafted.. through the early layers -> a draft token for after the last one.

        Draft.confidence is the exit head's own probability of it. Without ids: after the last row that there is. The
        row of the draft token itself is not run: hand it to the next `draft`, or to `verify`.
        """
        with self._alone():
            if not self._drafts:
                raise PpsdError(f"{self._name} has no exit head to draft with: give --exit-head")
            rows = self._checked(ids, len(self._tokens))
            if not rows and not self._tokens:
                raise UsageError("there is no row to draft after: prefill a prompt first")
            drawn = self._run(rows, draw=True)
            assert drawn is not None
            return Draft(*drawn)

    def verify(self, ids: Iterable[int]) -> list[int]:
        """Run the rows `ids` at positions verified.. through all layers -> the model's own id after each of them.

        Rows that have been drafted skip the early layers; their ids must be those that they were drafted with.
        ids[i + 1] is right if it is own id i; own ids after the first wrong row belong to a text that does not stay.
        """
        with self._alone():
            rows = self._checked(ids, self.verified)
            if not rows:
                raise UsageError("verify takes at least one row")
            held = self._tokens[self.verified :]
            for position, (given, drafted) in enumerate(zip(rows, held, strict=False), self.verified):
                if given != drafted:
                    raise UsageError(f"row {position} was drafted as id {drafted}, not {given}: roll_back({position})")
            if len(rows) > len(held):
                self._run(rows[len(held) :])
            return self._verify(rows, last=len(rows))

    def commit(self, count: int) -> None:
        """The first `count` verified rows that are not committed yet are. If more wait, all rows after them are void.

        Exit heads of the kind `feedback` receive the last one's hidden state in the drafts that follow.
        """
        with self._alone():
            waiting = self.verified - self.committed
            if not 1 <= whole_number("count", count) <= waiting:
                raise UsageError(f"{waiting} verified rows wait to be committed, not {count}")
            self._commit(count)
            if count < waiting:
                self._void(self.committed)

    def roll_back(self, to: int) -> None:
        """Rows from position `to` on are void, committed ones too. This writes a length and copies nothing."""
        with self._alone():
            if not 0 <= whole_number("to", to) <= len(self._tokens):
                raise UsageError(f"there are {len(self._tokens)} rows; none to roll back to at {to}")
            self._void(to)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        not_after_fork(self._process)
        if not self._turn.acquire(blocking=False):
            raise PpsdError("another thread uses these stages: make others for it, with engine.stages()")
        try:
            yield
        except MemoryError:
            raise PpsdError("no memory for the KV caches of so many rows: free some, or give a shorter text") from None
        except RuntimeError as error:  # of a stage
            raise PpsdError(str(error)) from None
        finally:
            self._turn.release()

    def _checked(self, ids: Iterable[int], start: int) -> list[int]:
        """The ids of rows from `start` on."""
        if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Iterable):
            raise UsageError(f"rows must be a list of token ids, not {quoted(ids)}")
        rows = [whole_number("a token id", id) for id in ids]
        if not all(0 <= id < self._config.vocab_size for id in rows):
            raise UsageError(f"token ids are 0 to {self._config.vocab_size - 1}")
        context = self._config.max_position_embeddings
        if start + len(rows) > context:
            raise UsageError(f"{len(rows)} rows from position {start} on reach beyond the context of {context}")
        return rows

    def _run(self, ids: Sequence[int], draw: bool = False) -> tuple[int, float] | None:
        start, end = len(self._tokens), len(self._tokens) + len(ids)
        if end > self._capacity:
            capacity = min(max(end, 2 * self._capacity, 256), self._config.max_position_embeddings)
            self._stages.reserve(capacity)
            self._capacity = capacity
        drawn = self._stages.draft(start, ids, draw)
        self._tokens += ids
        return drawn

    def _verify(self, ids: Sequence[int], last: int) -> list[int]:
        own = self._stages.verify(self.verified, ids, last)
        self.verified += len(ids)
        return own

    def _commit(self, count: int) -> None:
        self.committed += count
        self._stages.learn(self.committed - 1)

    def _void(self, start: int) -> None:
        del self._tokens[start:]
        self.verified = min(self.verified, start)
        self.committed = min(self.committed, start)
