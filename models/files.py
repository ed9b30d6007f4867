"""Reading the small files of a model folder; whatever is wrong with one is one line."""

import json
from pathlib import Path
from typing import Any

from ..errors import PpsdError

_LONGEST_REASON = 300


def one_line(error: object) -> str:
    """The text of an error (or of anything) on one line of bounded length."""
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 1] + "…"


def read_json_object(path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
    """The JSON object in the file `path`; an empty one where there is no such file and there need not be one.

    Raises PpsdError when the file is missing, cannot be read, is not JSON, holds lone surrogates, or holds no object.
    """
    try:
        value = json.loads(path.read_bytes())
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is good JSON, but no text
    except FileNotFoundError:
        if missing_ok:
            return {}
        raise PpsdError(f"{path.parent} has no {path.name}: it is not a whole model folder") from None
    except OSError as error:
        raise PpsdError(f"cannot read {path}: {error.strerror or one_line(error)}") from None
    except (ValueError, RecursionError) as error:
        raise PpsdError(f"{path} is not valid JSON ({one_line(error)}): mend it or fetch it again") from None
    if not isinstance(value, dict):
        raise PpsdError(f"{path} must hold a JSON object, not {type(value).__name__}: mend it or fetch it again")
    return value
