"""Checkpoints in, memory-mapped; and the hash that tells one model from another.

Tensors of a safetensors folder are numpy arrays on the mapped file. numpy has no bfloat16: such tensors are arrays of
uint16, their bits. Those of a .gguf file are decoded to float32 when they are looked up (gguf_tensors.py).
Nothing here needs torch; `llama.LlamaForCausalLM.from_checkpoint` and the C++ backend build their models from this.
"""

import hashlib
import json
import math
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from ..errors import PpsdError
from .config import LlamaConfig
from .files import drop_pages, is_gguf, one_line, parse_json, read_json_object
from .gguf_blocks import Blocks
from .shapes import check_shapes, model_shapes

if TYPE_CHECKING:
    from .gguf_tensors import GgufTensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Array = npt.NDArray[Any]
_FLOATS: dict[str, type] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_NAMES = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}

# Buffers that some checkpoints carry although they follow from the configuration.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


class Checkpoint:
    """A model, opened: configuration, mapped tensors, hash. Every backend builds its model from this.

    folder: a Hugging Face folder, or a .gguf file. tensors: to look up one at a time, where memory matters.
    blocks: matrices that are stored in blocks, as they lie in the file; the C++ backend reads these.
    """

    tensors: Mapping[str, Array]
    blocks: Mapping[str, Blocks] = MappingProxyType({})
    _opened: "GgufTensors | None" = None

    def __init__(self, folder: Path) -> None:
        """Raises PpsdError that names the file (missing, corrupt) or the tensor (missing, extra, shape, dtype)."""
        self.folder = folder
        if is_gguf(folder):
            from .gguf_tensors import open_tensors  # it takes packages that models in folders do without

            self.config, opened = open_tensors(folder)
            self.tensors, self.blocks, self._opened = opened, opened.blocks(), opened
            self.stored_as = sorted(opened.kinds)
            return
        self.config = LlamaConfig.from_folder(folder)
        tensors = self.tensors = _without_derived(read_tensors(folder), self.config)
        check_shapes(tensors, model_shapes(self.config), str(folder))
        self.stored_as = sorted({_NAMES[str(tensor.dtype)] for tensor in tensors.values()})

    @property
    def name(self) -> str:
        """For people."""
        return self.folder.name.removesuffix(".gguf")

    @property
    def parameters(self) -> int:
        """How many weights the model has; a tied LM head counts once."""
        return sum(math.prod(shape) for shape in model_shapes(self.config).values())

    @cached_property
    def hash(self) -> str:
        """Sixteen hex digits that name the weights: an exit head fits exactly one model.

        Reading all weights would cost more than loading them, so each tensor gives its name, its shape and 16 of its
        values, spread evenly and rounded to bfloat16: any other training run differs in nearly all of them, and a copy
        saved as bfloat16 does not.
        """
        digest = hashlib.sha256()
        for name, shape in sorted(model_shapes(self.config).items()):
            places = np.arange(16) * (math.prod(shape) - 1) // 15
            values = self._values_at(name, places)
            digest.update(json.dumps([name, list(shape)]).encode() + _bf16_bits(values).tobytes())
        return digest.hexdigest()[:16]

    def _values_at(self, name: str, places: npt.NDArray[np.int64]) -> Array:
        if self._opened is not None:
            return self._opened.values_at(name, places)
        values = self.tensors[name].reshape(-1)[places]
        drop_pages(self.tensors[name])
        return values


def as_float32(tensor: Array) -> npt.NDArray[np.float32]:
    """A copy in float32, whatever the tensor is stored as."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)


def _bf16_bits(values: Array) -> npt.NDArray[np.uint16]:
    """To bfloat16, to nearest even."""
    bits = as_float32(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def read_tensors(folder: Path) -> dict[str, Array]:
    """All tensors of a folder: one `model.safetensors`, or the shards that its index names."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise PpsdError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: fetch or convert the weights")
        return read_file(folder / SINGLE_FILE)

    weight_map = read_json_object(index, unique=True).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise PpsdError(f"{index} has no weight_map of tensor names to file names; fetch the file again")
    tensors: dict[str, Array] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise PpsdError(f"{index} names the shard {shard!r}, which is not a plain file name")
        if not (folder / shard).exists():
            raise PpsdError(f"{folder} lacks the shard {shard} that {INDEX_FILE} names; fetch it again")
        for name, tensor in read_file(folder / shard).items():
            if weight_map.get(name) != shard:
                raise PpsdError(f"{index} says that {name} is in {weight_map.get(name)}, but it is in {shard}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise PpsdError(f"{index} says that {name} is in {shard}, but it is not there")
    return tensors


def read_file(path: Path, *, integers: bool = False) -> dict[str, Array]:
    """Everything in one safetensors file: floats of 16 or 32 bits and, if asked for, int8 and int32."""
    supported: dict[str, type] = {**_FLOATS, "I8": np.int8, "I32": np.int32} if integers else _FLOATS
    with _readable(path):
        header, start = _read_header(path)
        data = np.memmap(path, np.uint8, "c", offset=start) if path.stat().st_size > start else np.zeros(0, "u1")
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in supported:
                known = ", ".join(supported)
                raise PpsdError(f"{path}: tensor {name} has dtype {entry['dtype']}; supported are {known}")
            begin, end = entry["data_offsets"]
            tensors[name] = data[begin:end].view(supported[entry["dtype"]]).reshape(entry["shape"])
        return tensors


def read_metadata(path: Path) -> dict[str, str]:
    """The free-form string pairs in the header of a safetensors file."""
    with _readable(path):
        return _read_header(path)[0].get("__metadata__") or {}


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header's entries, and where the data begins."""
    with safe_open(path, framework="np") as file:  # the library checks the header: offsets, sizes, overlaps
        file.keys()
    with open(path, "rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        return parse_json(raw.read(length), unique=True), 8 + length  # of a key that is there twice it takes the last


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """One clear line for whatever is wrong with a safetensors file."""
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise PpsdError(f"{path} is a folder, not a safetensors file")
        if not stat.S_ISREG(kind):  # to open a pipe would wait for ever
            raise PpsdError(f"{path} is not a regular file: name a safetensors file")
        yield
    except PpsdError:
        raise
    except FileNotFoundError:
        raise PpsdError(f"{path} does not exist") from None
    except PermissionError:
        raise PpsdError(f"{path} may not be read: change its permissions") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = one_line(error) or type(error).__name__
        raise PpsdError(f"{path} is truncated or corrupt ({reason}); fetch the file again") from None


def _without_derived(tensors: dict[str, Array], config: LlamaConfig) -> dict[str, Array]:
    """Drop what follows from the rest: old rotary buffers, and a tied LM head that repeats the embedding."""
    kept = {name: t for name, t in tensors.items() if not name.endswith(_DERIVED_SUFFIXES)}
    head, embedding = kept.get("lm_head.weight"), kept.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and head is not None and embedding is not None and np.array_equal(head, embedding):
        del kept["lm_head.weight"]
    return kept


def save(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a (small) safetensors file whole or not at all; uint16 arrays are written as bfloat16."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(_serialize(tensors, metadata))
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise PpsdError(f"cannot write {path}: {error}") from None


def _serialize(tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> bytes:
    dense = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    written = serialize(dense, dict(metadata))
    # The library's numpy front end does not know bfloat16; in the file it is another name for the same two bytes.
    length = int.from_bytes(written[:8], "little")
    header = json.loads(written[8 : 8 + length])
    for name, tensor in dense.items():
        if tensor.dtype == np.uint16:
            header[name]["dtype"] = "BF16"
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + written[8 + length :]
