"""JSON as every strict reader takes it: finite numbers, text that UTF-8 can hold, no deeper than readers go."""

import json
from typing import Any

from .arguments import check_unicode
from .errors import UsageError

_DEEPEST = 128
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # json.dumps would make one for each chunk
_PLAIN = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


def fault(value: Any) -> tuple[str, str] | None:
    """Where a value that was read is none of this, such as `messages[0].content`, and why; None: it is."""
    level = [("", value)]
    for _ in range(_DEEPEST):
        level = [(f"{at}{step}", one) for at, inner in level for step, one in _within(inner, bool(at))]
        if not level:
            break
    else:
        return level[0][0].partition(".")[0].partition("[")[0], f"is nested more than {_DEEPEST} deep"
    try:
        _PLAIN.encode(value).encode()
    except ValueError:
        return next(_faults("", value), ("", "is no JSON"))
    return None


def _within(value: Any, inner: bool) -> Any:
    """What in it has parts itself, with the step that leads there."""
    if isinstance(value, dict):
        return [(f".{key}" if inner else key, one) for key, one in value.items() if isinstance(one, dict | list)]
    if isinstance(value, list):
        return [(f"[{place}]", one) for place, one in enumerate(value) if isinstance(one, dict | list)]
    return []


def _faults(at: str, value: Any) -> Any:
    """Of a value that is not too deep."""
    if isinstance(value, float) and not abs(value) < float("inf"):
        yield at, f"is {value}: JSON has no such number, or a double cannot hold it"
    elif isinstance(value, str):
        try:
            check_unicode(value, "it")
        except UsageError as error:
            yield at, str(error).removeprefix("it ")
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from _faults(at, key)
            yield from _faults(f"{at}.{key}" if at else key, one)
    elif isinstance(value, list):
        for place, one in enumerate(value):
            yield from _faults(f"{at}[{place}]", one)


def written(value: Any) -> str:
    """A value as strict JSON in ASCII, whatever it holds: no number is null, half a character a question mark.

    ASCII, as clients' readers of streams end lines at U+2028, too.
    """
    try:
        text = _ENCODER.encode(value)
        if "\\ud" not in text:  # half a character is written so, but whole ones are, too
            return text
    except ValueError:
        pass
    plain = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    return _ENCODER.encode(json.loads(plain, parse_constant=lambda _: None))
