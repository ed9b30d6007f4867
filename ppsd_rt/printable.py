"""Text that somebody else chose, as messages and tables show it."""

_MOST_QUOTED = 60  # characters


def printable(text: str) -> str:
    """The text on one line: what does not print (line ends, escape sequences, lone surrogates) is written as escapes.

    A terminal obeys control characters, and scripts take every line for a message of its own.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int) -> str:
    """The text itself, or its first and last characters, `most` in all."""
    if len(text) <= most:
        return text
    end = (most - 1) // 2
    return f"{text[: most - 1 - end]}…{text[-end:]}"


def quoted(value: object) -> str:
    """A value that was given, for a message of why it is not taken: its `repr`, shortened."""
    try:
        return shortened(repr(value), _MOST_QUOTED)
    except ValueError:  # Python writes out no number of more than 4300 digits
        return f"a very long {type(value).__name__}"
