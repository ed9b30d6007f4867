"""Grammars over ranks: rank 0 tells the last one, which chooses the tokens, what the answer to come keeps to.

Rank 0 compiles the grammar for its drafts, and sends it over the control link, in one message with a number. The last
rank compiles it too, and answers with what is wrong, if anything is. Only then does the answer begin: its first pass
has the number (csrc/stages/pass.h). A grammar that gives up in the middle is told with a verdict. When the answer has
ended, rank 0 says so, and the grammar is forgotten.
"""

from collections.abc import Callable
from threading import Thread

from ..errors import PpsdError
from ..models.checkpoint import Checkpoint
from ..models.tokenizer import load_tokenizer
from ..sampling.grammar import Grammar, Grammars, Masks, TokenMask
from .control import Control, Kind
from .threads import start


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
