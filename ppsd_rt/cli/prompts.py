"""A prompt from a file of prompts, whatever format the file has."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class NamedPrompt:
    """id: as the file has it, or the number of the line. messages: a conversation, with `prompt` as its last turn."""

    id: str | int
    prompt: str
    family: str = ""
    messages: tuple[dict[str, str], ...] = ()


def is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))
