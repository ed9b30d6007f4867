"""How much an error in each input of each matrix matters: int4 rounds weights so that the errors that matter are small.

It takes one pass of a short text through the layers (the mean square of every input: llama.cpp calls it the importance
matrix), once for each model; it is kept in the cache.
"""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from . import _native
from .models.cache import cache_dir
from .models.checkpoint import Checkpoint
from .models.rotary import inverse_frequencies
from .models.tokenizer import load_tokenizer

ROWS = 512  # of the text; twice as many changed nothing
_MEASURE = 1  # how it is measured: to be raised with every change of that, or of the text
_TEXT = Path(__file__).parent / "data" / "starters.json"  # beginnings of texts of many kinds, in several languages

Importance = npt.NDArray[np.float32]


def importance_for(dtype: str, checkpoint: Checkpoint, shape: _native.ModelShape, threads: int) -> Importance | None:
    """[layers, inputs of QKV, of the output, of gate and up, of down, one after the other]; None: `dtype` needs none.

    Raises RuntimeError, one line, where weights are not finite, and PpsdError where the model's tokenizer is damaged.
    """
    if dtype != "int4":
        return None
    config = checkpoint.config
    path = cache_dir() / "importance" / f"{checkpoint.hash}-{_MEASURE}.npy"
    width = 2 * config.hidden_size + config.num_attention_heads * config.head_dim + config.intermediate_size
    known = _known(path)
    if known is not None and known.shape == (config.num_hidden_layers, width):
        return known
    frequencies = inverse_frequencies(config).tolist()
    measured = _native.importance(shape, checkpoint.tensors, frequencies, _text(checkpoint), threads)
    _keep(path, measured)
    return measured


def _text(checkpoint: Checkpoint) -> list[int]:
    spec = json.loads(_TEXT.read_text(encoding="utf-8"))
    parts = [*spec["system"], *(text for family in spec["families"].values() for text in family["starters"])]
    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.config.vocab_size)
    ids = tokenizer.encode(" ".join([*parts, *spec["text"]["starters"]]))
    return ids[: min(ROWS, checkpoint.config.max_position_embeddings)]


def _known(path: Path) -> Importance | None:
    """None where the file is not there or not whole."""
    try:
        known = np.load(path, allow_pickle=False)
        return known if known.dtype == np.float32 and np.isfinite(known).all() else None
    except (OSError, ValueError, EOFError):
        return None


def _keep(path: Path, importance: Importance) -> None:
    """For later runs. A cache that cannot be written only means measuring again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, unfinished = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            np.save(file, importance)
        os.replace(unfinished, path)
    except OSError:
        pass
