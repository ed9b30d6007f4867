"""Exit heads by the names that users give them."""

import os
import re

from .errors import PpsdError, UsageError
from .models.checkpoint import Checkpoint
from .models.eagle3 import Eagle3File
from .models.files import read_json_object, shown
from .models.head_file import HeadFile, find_shipped
from .models.resolve import resolve_head


def find_head(name: str, checkpoint: Checkpoint) -> HeadFile | None:
    """A head's file; the folder or the hub name of an EAGLE-3 head; `auto`: the one that ships for this model, or the
    exit it was trained with, if there is one; `norm:E`, `norm:E:V`; `none`.
    """
    if name == "auto":
        path = find_shipped(checkpoint)
        return HeadFile.load(path, checkpoint) if path else _trained_exit(checkpoint)
    if name in ("none", "None"):
        return None
    if name.startswith("norm:") and not os.path.exists(name):
        words = re.fullmatch(r"norm:(\d{1,18})(?::(\d{1,18}))?", name, re.ASCII)
        if words is None:
            raise UsageError(f"exit head {shown(name)} is not understood; write norm:LAYER, as in norm:6")
        return HeadFile.norm(int(words[1]), checkpoint, int(words[2]) if words[2] else None)
    if not name:
        raise UsageError("the exit head's name is empty; write a file, a folder, auto, norm:LAYER or none")
    path = resolve_head(name)
    return Eagle3File.load_folder(path, checkpoint) if os.path.isdir(path) else HeadFile.load(path, checkpoint)


def _trained_exit(checkpoint: Checkpoint) -> HeadFile | None:
    """Of a model that was trained to exit early (LayerSkip): `assistant_early_exit`, as transformers calls it."""
    path = checkpoint.folder / "generation_config.json"
    layer = read_json_object(path).get("assistant_early_exit") if path.is_file() else None
    if layer is None:
        return None
    if type(layer) is not int:
        raise PpsdError(f"{path}: assistant_early_exit must be a layer, not {shown(layer)}")
    return HeadFile.norm(layer, checkpoint)
