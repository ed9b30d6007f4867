"""From what the user calls a model to a local model folder."""

import difflib
import hashlib
import os
import re
from pathlib import Path

from ..errors import PpsdError
from ..extras import need
from .cache import cache_dir, converted_folder
from .default_model import NAME as DEFAULT_NAME
from .default_model import default_model
from .files import one_line

_DEFAULT_NAMES = (DEFAULT_NAME, "default")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_HUB_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_HUB_DOUBLES = ["*/*", "consolidated*"]  # the same weights once more, in other formats or under other names
_FORMS = f"a model folder, a .gguf file, {DEFAULT_NAME}, or a hub name (org/name)"


def resolve_model(name: str, *, offline: bool = False) -> Path:
    """The local Hugging-Face-style folder of a model, which is fetched or converted first if need be.

    `name` is `smollm2-135m` (or `default`), else the path of a folder with a config.json, else the path of a .gguf file
    (converted once, into the cache), else `org/name` on the Hugging Face hub. With `offline`, nothing is downloaded.
    Raises PpsdError, one line that says what is wrong with the name or with the model behind it.
    """
    if name in _DEFAULT_NAMES:
        return default_model(offline=offline)
    path = Path(os.path.expanduser(name))
    try:
        if name and path.is_dir():
            return _model_folder(path)
        if path.is_file():
            return _converted(path)
        if name and path.exists():
            raise PpsdError(f"{name} is neither a folder nor a regular file: give {_FORMS}")
    except OSError as error:
        raise PpsdError(f"{name} cannot be read: {error.strerror or error}") from None
    if _looks_like_a_path(name):
        raise PpsdError(f"{name} does not exist")
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name, offline)
    raise PpsdError(f"{name!r} is not a model: {_suggestion(name)}give {_FORMS}")


def _model_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    inside = sorted(folder.glob("*.gguf"))
    mend = f"name the file {inside[0]}" if inside else "a Hugging Face model folder has one"
    raise PpsdError(f"{folder} holds no config.json: {mend}")


def _converted(path: Path) -> Path:
    """The cached conversion of a .gguf file; a file that was changed since is another one."""
    if path.suffix.lower() != ".gguf":
        raise PpsdError(f"{path} is a file, but not a .gguf file: give {_FORMS}")
    path = path.resolve()
    status = path.stat()
    source = hashlib.sha256(os.fsencode(f"{path}\0{status.st_size}\0{status.st_mtime_ns}")).hexdigest()
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)[:80]
    return converted_folder(cache_dir() / "gguf" / f"{stem}-{source[:16]}", source, path.name, lambda work: path)


def _looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith((".gguf", "/")) or name.count("/") > 1 or "\\" in name


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), _DEFAULT_NAMES, n=1, cutoff=0.5)
    return f"did you mean {close[0]}? Otherwise " if close else ""


def _from_hub(name: str, offline: bool) -> Path:
    """A snapshot in the hub's own cache, without the files that this runtime cannot use."""
    need("huggingface_hub", "hub", f"there is no folder {name} here, and the hub")
    import huggingface_hub
    from huggingface_hub import errors

    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_DOUBLES, local_files_only=offline
            )
        )
    except errors.GatedRepoError:
        raise PpsdError(f"{name} is gated: accept its terms on the hub, then log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise PpsdError(f"there is no folder {name} here and no model {name} on the hub (or it is private)") from None
    except errors.LocalEntryNotFoundError:
        why = "nothing may be downloaded" if offline else "the hub cannot be reached"
        raise PpsdError(f"{name} is neither a folder here nor in the hub's cache, and {why}") from None
    except Exception as error:  # the hub, its HTTP library, the disk: a long and changing list
        raise PpsdError(
            f"{name} could not be fetched from the hub: {one_line(error) or type(error).__name__}"
        ) from None
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise PpsdError(f"{name} on the hub lacks config.json or *.safetensors: only such models can be loaded")
    return folder
