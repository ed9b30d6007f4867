"""A rank that verifies: waits for passes, works on them, sends what comes of it on. It ends when rank 0 says so.

The last one, which chooses the tokens, is told of an answer's grammar before its first pass comes: over the control
link, in one message with a number, which the pass has too (csrc/stages/pass.h). It compiles the grammar, and answers
with what is wrong, if anything is. One that gives up in the middle is told with a verdict. When the answer has ended,
its grammar is forgotten.
"""

import signal
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any

from .. import _native
from ..errors import PpsdError
from ..models.checkpoint import Checkpoint
from ..models.tokenizer import load_tokenizer
from ..sampling.grammar import Grammar, Grammars, Masks, TokenMask
from .control import Control, Kind
from .links import PASSES, VERDICTS, LinkLost, Receiver, Sender
from .threads import start

MOST_SPANS = 40_000  # of a timeline, the newest
DEPTH = 24  # receives posted in advance: more than passes of a window of drafts


def serve(
    groups: dict[int, Any],
    control: Control,
    station: _native.Station,
    words: int,
    grammars: Callable[[], Grammars],
    link_delay: float,
) -> None:
    """words: of the longest message. grammars: makes those of the model, once they are needed. link_delay: as of
    RankOptions.

    Raises PpsdError when the pipeline ends otherwise than by rank 0's word.
    """
    rank, last = control.world.rank, control.world.rank == control.world.last
    to, tag = (0, VERDICTS) if last else (rank + 1, PASSES)
    sender = Sender(groups[tag], to, tag, words)
    traces = SimpleQueue[None]()
    control.on(Kind.SPANS, traces.put)
    if last:
        station.use_masks(AnswerGrammars(control, grammars).mask)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides whether an answer or the whole run is to end
    signal.signal(signal.SIGTERM, lambda *_: control.told_to_end())
    receiver = Receiver(groups[PASSES], rank - 1, PASSES, words, DEPTH, station.post, control.lost, link_delay)
    _native.precise_waits()
    station.pin()
    control.busy = station.busy_seconds
    start(receiver)
    control.tell(0, Kind.READY, station.blocks)
    try:
        while not control.failed.is_set():
            if written := station.work(sender.buffer(), 50):
                sender.send(written)
            elif not traces.empty():  # not while a pass goes on, which would be missing
                control.tell(0, Kind.SPANS, station.spans()[-MOST_SPANS:])
                traces.get()
    except (RuntimeError, MemoryError) as error:
        if not control.stopping.is_set():
            _explain(control, to, error)
    if not control.stopping.is_set():
        control.failed.wait()
        control.check()


def _explain(control: Control, to: int, error: Exception) -> None:
    if isinstance(error, MemoryError):
        remedy = "raise its --kv-memory, or lower --max-tokens"
        control.fail(f"rank {control.world.rank} has no memory for a KV cache so long: {remedy}")
    elif isinstance(error, LinkLost):
        control.lost(to, error)
    else:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        control.fail(f"rank {control.world.rank}: {lines[0]}")


def grammars_of(checkpoint: Checkpoint) -> Grammars:
    """The last rank's, as the engine of rank 0 makes them. PpsdError without llguidance."""
    from ..engine import with_end

    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.config.vocab_size, checkpoint.gguf)
    config = with_end(checkpoint.config, tokenizer)
    return Grammars(tokenizer, config.vocab_size, sorted(config.eos_token_ids))


class AnswerGrammars:
    """The last rank's, of answers that have not ended. make: called for the first one."""

    def __init__(self, control: Control, make: Callable[[], Grammars]) -> None:
        self._control, self._make = control, make
        self._grammars: Grammars | None = None
        self._masks: dict[int, Masks] = {}
        # Compiling takes up to seconds, in which this rank hears signs of life.
        control.on(Kind.GRAMMAR, lambda value: start(Thread(target=self._compile, args=value, daemon=True)))
        control.on(Kind.FORGET, lambda number: self._masks.pop(number, None))

    def mask(self, number: int) -> TokenMask | None:
        """The mask of an answer that begins; None: it has ended, and all that comes of it is void."""
        masks = self._masks.get(number)
        return masks() if masks is not None else None

    def _compile(self, number: int, kind: str, text: str) -> None:
        wrong = ""
        try:
            if self._grammars is None:
                self._grammars = self._make()
            self._masks[number] = self._grammars.masks(Grammar(kind, text))
        except PpsdError as error:
            wrong = str(error)
        except Exception as error:
            self._control.fail(f"rank {self._control.world.rank} cannot compile a grammar: {error}")
            return
        self._control.tell(0, Kind.GRAMMAR, [number, wrong])
