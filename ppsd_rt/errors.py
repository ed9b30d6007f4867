"""Errors that a user can mend."""


class PpsdError(Exception):
    """Something that the user can put right: one line that says what is wrong and how to mend it.

    The command line prints the line and exits with status 1, without a traceback. Raise it wherever bad input, a bad
    file or a missing resource is found; let every other exception be a bug.
    """


class UsageError(PpsdError):
    """A request that can never work as asked (an option out of range, an empty prompt): exit status 2."""
