"""What the pipelines report, whichever backend runs them. See docs/design/loop.md for the words."""

from dataclasses import dataclass, field

_KINDS_OF_OTHERS = 32  # Ngrams::kKinds / 2


@dataclass(frozen=True)
class Limits:
    """Where the committed text ends: at a stop id, or before position `end` (token budget or context).

    own: of the text that decoding begins with, so many last tokens are the answer's already. It goes on with the tokens
    that it would have had: penalties, min_tokens and grammar count from where the answer began.
    """

    end: int
    stop_ids: frozenset[int] = frozenset()
    own: int = 0

    def reached_by(self, round: "Round") -> bool:
        """Is this the last round?"""
        return round.position + len(round.committed) >= self.end or round.committed[-1] in self.stop_ids


@dataclass(frozen=True)
class Draft:
    """confidence: the exit head's own probability of the token, or the chance of a copy.

    copied: 0: the exit head drew it; else it was copied, after a match of this kind (csrc/core/ngrams.h).
    """

    token: int
    confidence: float
    copied: int = 0

    @property
    def recycled(self) -> bool:
        """Copied from another text."""
        return 0 < self.copied <= _KINDS_OF_OTHERS


@dataclass(frozen=True)
class Drafted:
    """A draft token was drawn for `position`; a later Round says what became of it."""

    position: int
    token: int


@dataclass(frozen=True)
class Logprob:
    """The log-probability of a committed token, and the most probable ids with theirs, best first.

    Of the model's own distribution: the softmax of its logits at temperature 1, before bias, penalties, filters and
    grammar.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Round:
    """One verification pass and what it committed.

    position:  of the first committed token.
    rows:      rows in the pass.
    committed: ids, in order; the first `accepted` of them were draft tokens.
    judged:    the draft tokens that were compared, up to the first disagreement.
    dropped:   how many draft tokens were thrown away unjudged, because they lay after the disagreement or the end.
    prompt:    the pass over the prompt; it commits the first token and judges nothing.
    logprobs:  of the committed ids; empty: nobody asked for them.
    seconds:   of work from the beginning of the answer, where the backend works while its caller does something else;
               None: it works only while it is asked for the next event.
    """

    epoch: int
    position: int
    rows: int
    committed: tuple[int, ...]
    judged: tuple[Draft, ...] = ()
    accepted: int = 0
    dropped: int = 0
    prompt: bool = False
    logprobs: tuple[Logprob, ...] = ()
    seconds: float | None = field(default=None, compare=False)

    @property
    def corrected(self) -> bool:
        """The committed token after the accepted ones replaces a draft token."""
        return self.accepted < len(self.judged)
