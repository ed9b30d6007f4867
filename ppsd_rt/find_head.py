"""Exit heads by the names that users give them."""

from pathlib import Path

from .errors import UsageError
from .models.checkpoint import Checkpoint
from .models.head_file import HeadFile, find_shipped


def find_head(name: str, checkpoint: Checkpoint) -> HeadFile | None:
    """A head's file; `auto`: the one that ships for this model, if one does; `norm:E`, `norm:E:V`; `none`."""
    if name == "auto":
        path = find_shipped(checkpoint.hash)
        return HeadFile.load(path, checkpoint) if path else None
    if name in ("none", "None"):
        return None
    if name.startswith("norm:") and not Path(name).exists():
        layer, _, vocabulary = name[5:].partition(":")
        if not layer.isdecimal() or not (vocabulary.isdecimal() or name.count(":") == 1):
            raise UsageError(f"exit head {name!r} is not understood; write norm:LAYER, as in norm:6")
        return HeadFile.norm(int(layer), checkpoint, int(vocabulary) if vocabulary else None)
    if not name:
        raise UsageError("the exit head's name is empty; write a file, auto, norm:LAYER or none")
    return HeadFile.load(Path(name), checkpoint)
