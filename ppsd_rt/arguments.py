"""What callers may give for a number (Python's own and numpy's, no truth values, no digits as text) and for a text."""

from numbers import Real
from operator import index
from typing import Any

from .errors import UsageError
from .printable import quoted


def whole_number(name: str, value: Any) -> int:
    """`value` as an int. UsageError, which begins with `name`, for all that is none, truth values among them."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:  # numpy's truth values refuse by themselves
        pass
    raise UsageError(f"{name} must be a whole number, not {quoted(value)}")


def real_number(name: str, value: Any) -> float:
    """`value` as a float, NaN and infinities included. UsageError for all that is no number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise UsageError(f"{name} must be a number, not {quoted(value)}")
    try:
        return float(value)
    except OverflowError:
        raise UsageError(f"{name} is too large: {quoted(value)}") from None


def check_unicode(text: str, name: str = "the text") -> None:
    """UsageError, which begins with `name`, for a text with a lone surrogate: half a character, or an unread byte."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} is not valid Unicode: character {error.start + 1} is a lone surrogate "
            f"(U+{ord(text[error.start]):04X}); give it as UTF-8"
        ) from None
