"""From what the user calls a model to a local model folder or .gguf file."""

import difflib
import os
import re
from pathlib import Path

from ..errors import PpsdError
from .default_model import NAME as DEFAULT_NAME
from .default_model import default_model
from .hub import hub_model

_DEFAULT_NAMES = (DEFAULT_NAME, "default")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?", re.ASCII)
_FORMS = f"a model folder, a .gguf file, {DEFAULT_NAME}, or a hub name (org/name, org/name:Q4_K_M)"


def resolve_model(name: str) -> Path:
    """The local Hugging-Face-style folder of a model, or its .gguf file; fetched first if need be.

    `name` is `smollm2-135m` (or `default`), else the path of a folder with a config.json, else the path of a .gguf
    file, else `org/name` on the Hugging Face hub, of which `:Q4_K_M` names one .gguf file.
    Raises PpsdError, one line that says what is wrong with the name or with the model behind it.
    """
    if name in _DEFAULT_NAMES:
        return default_model()
    path = Path(os.path.expanduser(name))
    try:
        if name and path.is_dir():
            return _model_folder(path)
        if path.is_file():
            if path.suffix.lower() != ".gguf":
                raise PpsdError(f"{path} is a file, but not a .gguf file: give {_FORMS}")
            return path
        if name and path.exists():
            raise PpsdError(f"{name} is neither a folder nor a regular file: give {_FORMS}")
    except OSError as error:
        raise PpsdError(f"{name} cannot be read: {error.strerror or error}") from None
    if _looks_like_a_path(name):
        raise PpsdError(f"{name} does not exist")
    if _HUB_NAME.fullmatch(name):
        return hub_model(name)
    raise PpsdError(f"{name!r} is not a model: {_suggestion(name)}give {_FORMS}")


def resolve_head(name: str) -> Path:
    """An exit head's file or folder; `org/name` that is neither is fetched from the Hugging Face hub."""
    path = Path(os.path.expanduser(name))
    if not _HUB_NAME.fullmatch(name) or name.endswith(".safetensors") or path.exists():
        return path
    return hub_model(name, head=True)


def _model_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    inside = sorted(folder.glob("*.gguf"))
    mend = f"name the file {inside[0]}" if inside else "a Hugging Face model folder has one"
    raise PpsdError(f"{folder} holds no config.json: {mend}")


def _looks_like_a_path(name: str) -> bool:
    before = name.partition(":")[0]  # of the tag of a hub's .gguf file
    return name.startswith((".", "/", "~")) or before.endswith((".gguf", "/")) or name.count("/") > 1 or "\\" in name


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), _DEFAULT_NAMES, n=1, cutoff=0.5)
    return f"did you mean {close[0]}? Otherwise " if close else ""
