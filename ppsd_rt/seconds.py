"""Seconds that were measured: every type of costs checks what it is made of, wherever that comes from."""

from itertools import pairwise

from .schedule import MAX_ROWS

LEAST, MOST = 1e-12, 3600.0  # nothing that runs is outside, and sums stay finite; csrc/cpu/calibrate.cpp has the same


def check_seconds(name: str, seconds: object, least: float = LEAST, most: float = MOST) -> None:
    """Raises ValueError unless it is a number, and one between both."""
    number = seconds if isinstance(seconds, int | float) and not isinstance(seconds, bool) else None
    if number is None or not least <= number <= most:  # NaN is not between anything
        raise ValueError(f"a cost that cannot be: {name} of {str(seconds)[:40]} s")


def check_table(name: str, seconds: tuple[object, ...], least: float = LEAST) -> None:
    """Of 1 to MAX_ROWS rows. Raises ValueError unless each is a number, and more rows never take less."""
    if len(seconds) != MAX_ROWS:
        raise ValueError(f"a cost that cannot be: {name} of {len(seconds)} numbers of rows, not {MAX_ROWS}")
    for cost in seconds:
        check_seconds(name, cost, least)
    if any(fewer > more for fewer, more in pairwise(seconds)):  # type: ignore[operator]
        raise ValueError(f"a cost that cannot be: {name} that falls with more rows")
