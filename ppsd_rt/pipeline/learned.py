"""What `auto` has learned of this machine and model, kept for the next process: numbers of csrc/loop/policy.h."""

import json
import math
import platform
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from .. import _native
from ..cpu.machine import cpu_name
from ..files import read_cached, write_cached
from ..models.cache import cache_dir
from ..models.head_file import HeadInfo

UNKNOWN = 0.5  # acceptance of a head whose file says nothing of it: even odds
_LARGEST = 1 << 16  # bytes of a file: more than there ever are


def learned_path(model_hash: str, head: HeadInfo | None, *what: object) -> Path:
    """One file for each machine, build, model, head, and whatever else passes take longer or shorter by."""
    build = Path(_native.__file__).stat()
    kind = (head.kind, head.exit_layer, head.intermediate_size, head.feedback_rank, head.tap) if head else ()
    machine = [platform.node(), cpu_name(), _native.usable_cores(), build.st_size, build.st_mtime_ns]
    key = json.dumps([*machine, model_hash, *kind, *map(str, what)])
    return cache_dir() / "learned" / f"{sha256(key.encode()).hexdigest()[:16]}.json"


def read(path: Path) -> list[float]:
    """Nothing where the file is not there, or holds what no run can have written."""
    try:
        numbers = json.loads(read_cached(path, _LARGEST))
        return [float(number) for number in numbers] if all(map(_is_number, numbers)) else []
    except (ValueError, TypeError, OverflowError, RecursionError):
        return []


def write(path: Path, numbers: Sequence[float]) -> None:
    if numbers:
        write_cached(path, json.dumps(list(numbers)).encode())


def prior(head: HeadInfo | None) -> float:
    """The acceptance to begin with: what the head's file says of held-out text."""
    value = head.acceptance.get("held_out_greedy", UNKNOWN) if head else UNKNOWN
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else UNKNOWN


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
