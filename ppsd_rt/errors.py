"""Errors that a user can mend."""

from .printable import printable, shortened

_LONGEST = 1000  # characters of a message: what was given may be of any length


class PpsdError(Exception):
    """Something that the user can put right: one line that says what is wrong and how to mend it.

    The command line prints the line and exits with status 1, without a traceback. Raise it wherever bad input, a bad
    file or a missing resource is found; let every other exception be a bug. The message is one line whatever it quotes.
    code: the kind of error, for programs; a kind of its own is a class of its own.
    """

    code = "error"

    def __init__(self, message: str) -> None:
        super().__init__(shortened(printable(message), _LONGEST))


class UsageError(PpsdError):
    """A request that can never work as asked (an option out of range, an empty prompt): exit status 2."""

    code = "invalid_value"


class ContextFull(UsageError):
    """A prompt leaves no room for an answer in the model's context."""

    code = "context_length_exceeded"


class GrammarFailed(PpsdError):
    """A grammar gives up in the middle of an answer: it is too costly for what was asked."""

    code = "grammar_failed"
