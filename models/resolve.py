"""From what the user calls a model to a local model folder or .gguf file.

Models of the Hugging Face hub are fetched by `huggingface_hub` into its own cache folder (`HF_HOME`).
"""

import os
import re
import sys
from collections.abc import Sequence
from glob import escape
from pathlib import Path

from ..errors import PpsdError
from ..extras import need
from .default_model import NAME as DEFAULT_NAME
from .default_model import default_model
from .eagle3 import TORCH_FILE
from .files import one_line

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?", re.ASCII)
_FORMS = f"a model folder, a .gguf file, {DEFAULT_NAME}, or a hub name (org/name, org/name:Q4_K_M)"

_FILES = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
_OF_HEADS = ["config.json", "*.safetensors*", TORCH_FILE]
_DOUBLES = ["*/*.json", "*/*.safetensors*", "consolidated*"]  # the same once more, for other programs
_USUAL_TAG = "Q4_K_M"
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # what lies beside models in .gguf files
_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)


def resolve_model(name: str) -> Path:
    """The local Hugging-Face-style folder of a model, or its .gguf file; fetched first if need be.

    `name` is `smollm2-135m` (or `default`), else the path of a folder with a config.json, else the path of a .gguf
    file, else `org/name` on the Hugging Face hub, of which `:Q4_K_M` names one .gguf file.
    Raises PpsdError, one line that says what is wrong with the name or with the model behind it.
    """
    if name in (DEFAULT_NAME, "default"):
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
        return _hub_model(name)
    raise PpsdError(f"{name!r} is not a model: give {_FORMS}")


def resolve_head(name: str) -> Path:
    """An exit head's file or folder; `org/name` that is neither is fetched from the Hugging Face hub."""
    path = Path(os.path.expanduser(name))
    if not _HUB_NAME.fullmatch(name) or name.endswith(".safetensors") or path.exists():
        return path
    return _hub_model(name, head=True)


def _model_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    inside = sorted(folder.glob("*.gguf"))
    mend = f"name the file {inside[0]}" if inside else "a Hugging Face model folder has one"
    raise PpsdError(f"{folder} holds no config.json: {mend}")


def _looks_like_a_path(name: str) -> bool:
    before = name.partition(":")[0]  # of the tag of a hub's .gguf file
    return name.startswith((".", "/", "~")) or before.endswith((".gguf", "/")) or name.count("/") > 1 or "\\" in name


def _hub_model(name: str, *, head: bool = False) -> Path:
    """The folder of the model `name`, with the files that this runtime uses and no others. head: it is an exit head.

    `org/name:TAG`, or a repository without safetensors: one .gguf file, by its quantisation (case does not matter) or
    its whole name; without a tag Q4_K_M or else the first one, as llama.cpp's `-hf` does. Of a split one all parts are
    fetched, and the first is given.

    Raises PpsdError: no such model, a gated one, one without weights that can be read, no network, no room.
    """
    need("huggingface_hub", "hub", f"there is no folder {name} here, and the hub")
    from huggingface_hub import constants, errors, utils

    if sys.stderr is None or not sys.stderr.isatty():
        utils.disable_progress_bars()
    repository, _, tag = name.partition(":")
    try:
        return _fetched(repository, tag, head)
    except errors.GatedRepoError:
        raise PpsdError(f"{name} is gated: accept its terms on the hub, then log in with `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise PpsdError(f"there is no folder {name} here and no model {name} on the hub (or it is private)") from None
    except errors.LocalEntryNotFoundError:
        offline = "HF_HUB_OFFLINE=1 forbids asking it: unset it"
        why = offline if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        raise PpsdError(f"{name} is neither a folder here nor in the hub's cache, and {why}") from None
    except PpsdError:
        raise
    except Exception as error:  # the hub, its HTTP library, the disk: a long and changing list
        reason = one_line(error) or type(error).__name__
        raise PpsdError(f"{name} could not be fetched from the hub: {reason}; try again") from None


def _fetched(repository: str, tag: str, head: bool) -> Path:
    from huggingface_hub import constants, errors, model_info, snapshot_download

    try:
        files = sorted(file.rfilename for file in model_info(repository).siblings or ())
    except (errors.GatedRepoError, errors.RepositoryNotFoundError, errors.HFValidationError):
        raise
    except Exception as error:  # out of reach: the cache may have it
        snapshots = Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "snapshots")
        found = [path.relative_to(snapshots).parts[1:] for path in snapshots.rglob("*") if path.is_file()]
        if not found:
            raise errors.LocalEntryNotFoundError(str(error)) from error
        files = sorted("/".join(parts) for parts in found)
    weights = (".safetensors", ".bin") if head else (".safetensors",)
    whole = "config.json" in files and any(file.endswith(weights) and "/" not in file for file in files)
    models = [file for file in files if file.lower().endswith(".gguf") and not _NO_MODEL.search(file)]
    if not head and (tag or (models and not whole)):
        parts = _gguf_parts(repository, models, tag)
        return Path(snapshot_download(repository, allow_patterns=[escape(part) for part in parts])) / parts[0]
    if not whole:
        raise PpsdError(f"{repository} on the hub has neither config.json with *.safetensors nor a .gguf file")
    patterns = _OF_HEADS if head else _FILES
    return Path(snapshot_download(repository, allow_patterns=patterns, ignore_patterns=_DOUBLES))


def _gguf_parts(repository: str, models: Sequence[str], tag: str) -> list[str]:
    """The .gguf file of this tag, or all parts of it. PpsdError, with what there is, where there is none."""
    wanted = re.compile(rf"(^|[-._/]){re.escape(tag or _USUAL_TAG)}($|[-._/])", re.IGNORECASE)
    found = [file for file in models if tag == file] or [file for file in models if wanted.search(file)]
    found = sorted(found, key=len) or ([] if tag else list(models))  # shortest: others have a variant's name besides
    if not found:
        here = ", ".join(models) or "none"
        raise PpsdError(f"{repository} on the hub has no .gguf file for {tag!r}; its .gguf files are: {one_line(here)}")
    return [file for file in models if _PART.sub("", file) == _PART.sub("", found[0])]
