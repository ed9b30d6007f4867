"""GGUF in, a Hugging Face model folder out: `config.json`, the tokenizer, and the weights as safetensors."""

import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PpsdError, UsageError
from .checkpoint import safetensors_header
from .gguf_file import GgufFile
from .gguf_model import GgufModel, GgufWeight, check_finite, open_gguf
from .gguf_tokenizer import generation_config
from .stored import bfloat16_bits

Progress = Callable[[int, int], None]

# dtype -> (bytes each, name in safetensors, largest finite value)
_DTYPES = {
    "float32": (4, "F32", 3.4028234663852886e38),
    "float16": (2, "F16", 65504.0),
    "bfloat16": (2, "BF16", 3.3895313892515355e38),
}
_ANOTHER_PLACE = "make room or choose another place (PPSD_CACHE is the cache's)"
_SHARD_BYTES = 5_000_000_000
_BLOCK_BYTES = 16 << 20  # of float32, held at a time


def convert_gguf(source: Path, target: Path, *, dtype: str = "float32", progress: Progress | None = None) -> None:
    """Write the model in `source` (.gguf) as the folder `target`, which must not exist or be empty.

    The weights are dequantised to `dtype` (float32, float16 or bfloat16, rounded to nearest even) a block of rows at a
    time; `progress(done, total)` is told the bytes written. The folder appears whole or not at all, and the same input
    gives the same bytes. Raises PpsdError, one line that names the file and what is wrong with it: damaged, of an
    architecture, a tensor type or a tokenizer that is not supported, holding what `dtype` cannot, or a full disk.
    """
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; supported are {', '.join(_DTYPES)}")
    try:
        _refuse_occupied(target)
        model = open_gguf(source)
        tokenizer = model.tokenizer()
        _refuse_full_disk(target, model.weights, dtype)

        # A sibling, so that the rename at the end stays on one file system.
        staging = target.absolute().with_name(f".{target.absolute().name}.{secrets.token_hex(4)}.tmp")
        try:
            staging.mkdir(parents=True)
            _write_json(staging / "config.json", model.config_json(dtype))
            _write_json(staging / "generation_config.json", generation_config(model.tokens))
            (staging / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
            _write_json(staging / "tokenizer_config.json", model.tokenizer_config())
            _write_weights(model, staging, dtype, progress)
            staging.rename(target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        what = f"cannot convert {source} to {target}: {error.strerror or error} ({error.filename or target})"
        raise PpsdError(f"{what}; {_ANOTHER_PLACE}") from None


def _refuse_occupied(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise PpsdError(f"{target} already exists and is not an empty folder: remove it or name another")


def _refuse_full_disk(target: Path, weights: Sequence[GgufWeight], dtype: str) -> None:
    needed = sum(_bytes_of(weight, dtype) for weight in weights)
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PpsdError(
            f"{target} needs {needed / 1e9:.1f} GB, {folder} has {free / 1e9:.1f} GB free; {_ANOTHER_PLACE}"
        )


def _write_weights(model: GgufModel, folder: Path, dtype: str, progress: Progress | None) -> None:
    """One `model.safetensors`, or shards and their index: never more than a block of one tensor in memory."""
    total = sum(_bytes_of(weight, dtype) for weight in model.weights)
    shards, code = _split_into_shards(model.weights, dtype), _DTYPES[dtype][1]
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        name = "model.safetensors" if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= {weight.key: name for weight in shard}
        with (folder / name).open("wb") as file:
            sizes = {weight.key: (code, weight.tensor.shape, _bytes_of(weight, dtype)) for weight in shard}
            file.write(safetensors_header(sizes, {"format": "pt"}))
            for weight in shard:
                for values in _blocks(model.gguf, weight):
                    done += file.write(_encode(model.gguf, weight, values, dtype))
                    if progress is not None:
                        progress(done, total)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _split_into_shards(weights: Sequence[GgufWeight], dtype: str) -> list[list[GgufWeight]]:
    shards: list[list[GgufWeight]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + _bytes_of(weight, dtype) > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += _bytes_of(weight, dtype)
    return shards


def _bytes_of(weight: GgufWeight, dtype: str) -> int:
    return math.prod(weight.tensor.shape) * _DTYPES[dtype][0]


def _blocks(gguf: GgufFile, weight: GgufWeight) -> Iterator[NDArray[np.float32]]:
    """The tensor as float32, in Hugging Face's row order, some whole rows (or, with rope, heads) at a time."""
    tensor = weight.tensor
    fitting = max(1, _BLOCK_BYTES // (4 * tensor.shape[-1]))
    step = fitting + -fitting % (weight.head_dim or 1)
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        for start in range(0, tensor.rows, step):
            count = min(step, tensor.rows - start)
            data = file.read(count * tensor.row_bytes)
            if len(data) != count * tensor.row_bytes:
                raise gguf.bad(f"the data of the tensor {tensor.name!r} ends early: the file changed while it was read")
            yield weight.decode(np.frombuffer(data, np.uint8).reshape(count, -1))


def _encode(gguf: GgufFile, weight: GgufWeight, values: NDArray[np.float32], dtype: str) -> bytes:
    largest = check_finite(gguf, weight.tensor, values)
    if largest > _DTYPES[dtype][2]:
        raise gguf.bad(f"the tensor {weight.tensor.name!r} holds {largest:g}, too large for {dtype}; use float32")
    if dtype == "float32":
        return values.astype("<f4", copy=False).tobytes()
    if dtype == "float16":
        return values.astype("<f2").tobytes()
    return bfloat16_bits(values).astype("<u2").tobytes()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
