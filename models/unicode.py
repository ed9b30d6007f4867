"""Texts that are no Unicode."""

from ..errors import UsageError


def check_unicode(text: str, name: str = "the text") -> None:
    """UsageError, which begins with `name`, for a text with a lone surrogate: half a character, or an unread byte."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{name} is not valid Unicode: character {error.start + 1} is a lone surrogate "
            f"(U+{ord(text[error.start]):04X}); give it as UTF-8"
        ) from None
