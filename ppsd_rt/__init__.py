"""ppsd-rt: Llama-family models that draft from their own early layers, with exactly the output of plain decoding."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .engine import Completion, Engine, Generation, Token
    from .errors import PpsdError, UsageError
    from .sampling import SamplingParams
    from .schedule import Schedule

__all__ = ["Completion", "Engine", "Generation", "PpsdError", "SamplingParams", "Schedule", "Token", "UsageError"]

_HOMES = {
    "Completion": "engine",
    "Engine": "engine",
    "Generation": "engine",
    "PpsdError": "errors",
    "SamplingParams": "sampling",
    "Schedule": "schedule",
    "Token": "engine",
    "UsageError": "errors",
}


def __getattr__(name: str) -> Any:
    """Import on first use: torch takes a second, and `ppsd-run --help` does not need it."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
