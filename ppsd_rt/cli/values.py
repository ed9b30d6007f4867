"""Options, and what they take, for argparse: numbers, names of files."""

import json
import math
from argparse import ArgumentTypeError, _ActionsContainer
from collections.abc import Callable
from functools import partial
from typing import Any

from ..printable import quoted

_MOST_DIGITS = 100  # more than any number here has; Python itself refuses 4301 in words of its own


Add = Callable[..., None]  # `option`, into a group


def option(to: _ActionsContainer, words: str, help: str, type: Callable[[str], Any] | None = None, **more: Any) -> None:
    """words: such as `-n --max-tokens N`. Without a value (N, a type, a default, choices) it is a flag."""
    flags = [word for word in words.split() if word.startswith("-")]
    metavar = words.split()[len(flags) :]
    if metavar or type is not None:
        more |= {"type": type, "metavar": metavar[0] if metavar else None}
    elif not more:
        more["action"] = "store_true"
    to.add_argument(*flags, help=help, **more)


def group(parser: _ActionsContainer, title: str) -> Add:
    return partial(option, parser.add_argument_group(title))


def named(text: str) -> str:
    """The name of something; an empty one is an unset variable of a script, most of the time."""
    if not text:
        raise ArgumentTypeError("the name is empty")
    return text


def whole(text: str) -> int:
    """A whole number."""
    try:
        if len(text) <= _MOST_DIGITS:
            return int(text)
    except ValueError:
        pass
    raise ArgumentTypeError(
        f"{quoted(text)} is not a whole number" + " of reasonable size" * (len(text) > _MOST_DIGITS)
    )


def length(text: str) -> int | None:
    """An answer's length: a whole number; None, no limit, for -1 and `inf`."""
    return None if text in ("-1", "inf") else whole(text)


def number(text: str) -> float:
    """A number, NaN and infinities included: the range is for others to check."""
    try:
        return float(text)
    except ValueError:
        raise ArgumentTypeError(f"{quoted(text)} is not a number") from None


def _number_that(fits: Callable[[float], bool], otherwise: str) -> Callable[[str], float]:
    """A number with a range; what is none is NaN, which fits nowhere."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not fits(value):
            raise ArgumentTypeError(f"{quoted(text)} is {otherwise}")
        return value

    return parse


probability = _number_that(lambda value: 0 <= value <= 1, "not a probability from 0 to 1")
silence = _number_that(lambda value: 0.5 <= value <= 3600, "not a number of seconds from 0.5 to 3600")
seconds = _number_that(lambda value: 0 < value <= 366 * 86400, "not a number of seconds above 0")


def zero_or(least: float, most: float) -> Callable[[str], float]:
    """0, or a number that arithmetic in float64 has room for."""
    otherwise = f"neither 0 nor a number from {least:g} to {most:g}"
    return _number_that(lambda value: value == 0 or least <= value <= most, otherwise)


def positive(text: str) -> int:
    """A whole number from 1 on."""
    if (value := whole(text)) < 1:
        raise ArgumentTypeError(f"{quoted(text)} is not a number from 1")
    return value


def several(each: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """One or more with commas between them, each counted once."""
    return lambda text: tuple(dict.fromkeys(each(part.strip()) for part in text.split(",")))


def at_most(most: int) -> Callable[[str], int]:
    """A whole number from 1 to `most`."""

    def parse(text: str) -> int:
        if (value := positive(text)) > most:
            raise ArgumentTypeError(f"{quoted(text)} is more than {most}")
        return value

    return parse


def address(text: str) -> tuple[str, int]:
    """HOST:PORT; of a port alone the host is 127.0.0.1."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) < 2**16):
        raise ArgumentTypeError(f"{quoted(text)} is not HOST:PORT, such as 127.0.0.1:7000")
    return host.strip("[]") or "127.0.0.1", int(port)


def setting(text: str) -> tuple[str, Any]:
    """NAME=JSON; what is no JSON is a string."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ArgumentTypeError(f"{quoted(text)} is not of the form NAME=JSON, such as enable_thinking=false")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
