"""How much an error in each input of each matrix matters: int4 rounds weights so that the errors that matter are small.

It takes one pass of a short text through the layers (the mean square of every input: llama.cpp calls it the importance
matrix), once for each model; it is kept in the cache.
"""

import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .. import _native
from ..files import read_cached, write_cached
from ..models.cache import cache_dir
from ..models.checkpoint import Checkpoint
from ..models.tokenizer import load_tokenizer
from .formats import rotary_of
from .native import packable

ROWS = 512  # of the text; twice as many changed nothing
LARGE = 200_000  # inputs of all matrices: models of a billion weights have more, and are told that it takes a while
MEASURE = 1  # how it is measured: to be raised with every change of that, or of the text
_TEXT = Path(__file__).parents[1] / "data" / "starters.json"  # beginnings of texts of many kinds, in several languages

_LOG = logging.getLogger(__name__)

Importance = npt.NDArray[np.float32]


def importance_for(dtype: str, checkpoint: Checkpoint, threads: int) -> Importance | None:
    """[layers, inputs of QKV, of the output, of gate and up, of down, one after the other]; None: `dtype` needs none.

    Raises RuntimeError, one line, where weights are not finite, and PpsdError where the model's tokenizer is damaged.
    """
    if dtype != "int4":
        return None
    config = checkpoint.config
    path = cache_dir() / "importance" / f"{checkpoint.hash}-{MEASURE}.npy"
    inputs = (
        config.hidden_size,
        config.num_attention_heads * config.head_dim,
        config.hidden_size,
        config.intermediate_size,
    )
    known = _known(path, config.num_hidden_layers, inputs)
    if known is not None:
        return known
    if config.num_hidden_layers * sum(inputs) > LARGE:
        _LOG.info("measuring what int4 may round off: once for this model, as long as a prompt of %d tokens", ROWS)
    measured = _native.importance(config, packable(checkpoint, "int8"), rotary_of(config), _text(checkpoint), threads)
    _keep(path, measured)
    return measured


def _text(checkpoint: Checkpoint) -> list[int]:
    spec = json.loads(_TEXT.read_text(encoding="utf-8"))
    parts = [*spec["system"], *(text for family in spec["families"].values() for text in family["starters"])]
    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.config.vocab_size)
    ids = tokenizer.encode(" ".join([*parts, *spec["text"]["starters"]]))
    return ids[: min(ROWS, checkpoint.config.max_position_embeddings)]


def _known(path: Path, layers: int, inputs: Sequence[int]) -> Importance | None:
    """inputs: how many each of a layer's matrices has. None where the file is not there, is damaged, or holds what is
    never measured: inputs that matter less than a thousandth of what those of their matrix do on average."""
    shape = layers, sum(inputs)
    header = _header(shape)
    size = len(header) + 4 * layers * sum(inputs)
    content = read_cached(path, size)
    if len(content) != size or not content.startswith(header):
        return None
    known = np.frombuffer(content, "<f4", offset=len(header)).reshape(shape).astype(np.float32)
    matrices = np.split(known, np.cumsum(inputs)[:-1], axis=1)
    if not np.isfinite(known).all() or (known <= 0).any():
        return None
    if any((each.min(axis=1) < 0.9e-3 * each.mean(axis=1, dtype=np.float64)).any() for each in matrices):
        return None
    return known


def _keep(path: Path, importance: Importance) -> None:
    write_cached(path, _header(importance.shape) + importance.astype("<f4").tobytes())


def _header(shape: tuple[int, ...]) -> bytes:
    """Of a .npy file of 32-bit floats. It is compared, never read: numpy allocates what a header asks for."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return header.getvalue()
