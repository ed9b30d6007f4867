"""Checkpoints in, memory-mapped; and the hash that tells one model from another.

Tensors of a safetensors folder are numpy arrays on the mapped file. numpy has no bfloat16: such tensors are arrays of
uint16, their bits. Those of a .gguf file are decoded to float32 when they are looked up (gguf_model.py).
Nothing here needs torch; `llama.LlamaForCausalLM.from_checkpoint` and the C++ backend build their models from this.
"""

import base64
import hashlib
import json
import logging
import math
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from ..errors import PpsdError
from ..files import read_cached, write_cached
from .cache import cache_dir
from .config import LlamaConfig, Shapes, check_shapes, model_shapes
from .files import drop_pages, is_gguf, one_line, parse_json, read_json_object, shown, unfit
from .quantised import QuantisedTensors, read_scheme
from .stored import FOUR_BITS, Array, Blocks, Stored, Uniform, as_float32, bfloat16_bits

if TYPE_CHECKING:
    from .gguf_model import GgufModel, GgufTensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LARGE = 16 << 20  # bytes

_FLOATS: dict[str, type] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_DTYPES: dict[str, type] = {**_FLOATS, "I8": np.int8, "I32": np.int32, "F8_E4M3": np.uint8}
_CODES = {np.dtype(kind): name for name, kind in _DTYPES.items() if name != "F8_E4M3"}
_LOG = logging.getLogger(__name__)
_NAMES = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}


class Checkpoint:
    """A model, opened: configuration, mapped tensors, hash. Every backend builds its model from this.

    folder: a Hugging Face folder, or a .gguf file. tensors: to look up one at a time, where memory matters.
    blocks: matrices that are stored in blocks, as they lie in the file; the C++ backend reads these.
    gguf: what else the .gguf file says; None of a folder.
    """

    tensors: Mapping[str, Array]
    blocks: Mapping[str, Blocks] = MappingProxyType({})
    gguf: "GgufModel | None" = None
    _opened: "GgufTensors | QuantisedTensors | None" = None  # they decode

    def __init__(self, folder: Path) -> None:
        """Raises PpsdError that names the file (missing, corrupt) or the tensor (missing, extra, shape, dtype)."""
        self.folder = folder
        if is_gguf(folder):
            from .gguf_model import open_tensors  # it takes packages that models in folders do without

            self.tensors = self._opened = opened = open_tensors(folder)
            self.gguf, self.blocks, self.stored_as = opened.model, opened.blocks(), sorted(opened.kinds)
            self.config = opened.model.config
            return
        raw, stored = read_json_object(folder / "config.json"), _with_prefix(read_folder(folder))
        self.config = _heads(LlamaConfig.from_folder(folder), stored)
        shapes = model_shapes(self.config)
        used, scheme = set(shapes), None
        if not _is_plain(raw, stored, shapes, folder):
            scheme = read_scheme(raw, str(folder / "config.json"))
        if scheme is not None:
            self.tensors = self._opened = quantised = QuantisedTensors(stored, shapes, scheme, folder)
            self.stored_as, used = sorted(quantised.kinds), quantised.used
            shapes = {name: shape for name, shape in shapes.items() if name not in quantised.quantised}
        plain = {name: supported(name, stored[name], folder) for name in shapes if name in stored}
        if scheme is None:
            self.tensors, self.stored_as = plain, sorted({_NAMES[str(tensor.dtype)] for tensor in plain.values()})
            lacking = [name for name in shapes if name.endswith(".bias") and name not in plain]
            plain |= {name: np.zeros(shapes[name], np.float32) for name in lacking}
            if lacking:
                _LOG.info("%s: biases that config.json names and the file lacks are zero, as in transformers", folder)
        check_shapes(plain, shapes, folder)
        if unused := sorted(stored.keys() - used):
            _LOG.info("%s: %d left out that this model has no use for: tensor %s", folder, len(unused), unused[0])

    def quantised(self, name: str) -> Uniform | None:
        """A matrix of a quantised folder as it is quantised there; None where it is not, or not uniformly."""
        return self._opened.uniform(name) if isinstance(self._opened, QuantisedTensors) else None

    @cached_property
    def in_four_bits(self) -> frozenset[str]:
        """The matrices that are stored in four bits at even distances, with scales for 32 inputs or a multiple: in
        `blocks`, or such that `quantised` gives them."""
        if isinstance(self._opened, QuantisedTensors):
            kept, of = self._opened.in_four_bits, len(self._opened.four_bits)
            if len(kept) < of:
                _LOG.info(
                    "%s: %d of %d four-bit matrices have scales in an order of their own (act-order) or for fewer than "
                    "32 inputs, so int4 cannot hold them as they are; with --dtype auto they become int8",
                    *(self.folder, of - len(kept), of),
                )
            return kept
        return frozenset(name for name, matrix in self.blocks.items() if matrix.kind in FOUR_BITS)

    @property
    def files(self) -> list[Path]:
        """All that the weights follow from."""
        if self.gguf is not None:
            return sorted({weight.tensor.path for weight in self.gguf.weights})
        return sorted(path for path in self.folder.iterdir() if path.suffix in (".json", ".safetensors"))

    @property
    def name(self) -> str:
        """For people."""
        return self.folder.name.removesuffix(".gguf")

    @property
    def parameters(self) -> int:
        """How many weights the model has; a tied LM head counts once."""
        return sum(math.prod(shape) for shape in model_shapes(self.config).values())

    @cached_property
    def _values(self) -> npt.NDArray[np.uint16]:
        """[tensors, 16] bfloat16 bits: values of each tensor, in order of names, spread evenly.

        Of a large model they are kept in the cache, after their hash: the places are all over the files.
        """
        shapes = sorted(model_shapes(self.config).items())
        stamps = [
            (str(path.resolve()), found.st_size, found.st_mtime_ns) for path in self.files if (found := path.stat())
        ]
        kept = cache_dir() / "hashes" / f"{hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]}.hash"
        known = read_cached(kept, 16 + 32 * len(shapes))
        if len(known) == 16 + 32 * len(shapes):
            values = np.frombuffer(known, np.uint16, offset=16).reshape(-1, 16)
            if self._hash(values).encode() == known[:16]:
                return values
        rows = []
        for name, shape in shapes:
            places = np.arange(16) * (math.prod(shape) - 1) // 15
            if self._opened is not None:
                read = self._opened.values_at(name, places)
            else:
                read = self.tensors[name].reshape(-1)[places]
                drop_pages(self.tensors[name])
            rows.append(bfloat16_bits(as_float32(read)))
        values = np.stack(rows)
        if sum(size for _, size, _ in stamps) >= _LARGE:
            write_cached(kept, self._hash(values).encode() + values.tobytes())
        return values

    def _hash(self, values: npt.NDArray[np.uint16]) -> str:
        digest = hashlib.sha256()
        for (name, shape), row in zip(sorted(model_shapes(self.config).items()), values, strict=True):
            digest.update(json.dumps([name, list(shape)]).encode() + row.tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def hash(self) -> str:
        """Sixteen hex digits that name the weights.

        Reading all of them would cost more than loading them, so each tensor gives its name, its shape and 16 of its
        values as bfloat16: any other training run differs in nearly all of them, and a copy saved as bfloat16 does not.
        """
        return self._hash(self._values)

    @cached_property
    def sample(self) -> str:
        """What tells a relative of the model, see `likeness`: a digest of shapes and rotation, and the values of `hash`
        that are of matrices, in base64."""
        how = [[*model_shapes(self.config).items()], self.config.rope_theta, self.config.rope_scaling]
        digest = hashlib.sha256(repr([*how, self.config.layer_attention]).encode()).hexdigest()[:16]
        matrices = [len(shape) == 2 for _, shape in sorted(model_shapes(self.config).items())]
        return f"{digest} {base64.b64encode(self._values[matrices].tobytes()).decode()}"


def likeness(one: str, other: str) -> float:
    """How alike two models are, by their `sample`: the correlation of their matrices' values, each matrix weighing the
    same; 0 where shapes or rotation differ. Another quantisation, or noise of a tenth: above 0.99. Strangers: near 0.

    The bound for a relative, 0.7, has room on both sides: benchmarks/results/2026-11-29-intel-xeon-relatives.json.
    """
    (shapes, _, first), (others, _, second) = one.partition(" "), other.partition(" ")
    if not first or shapes != others or len(first) != len(second):
        return 0.0
    try:
        a, b = (
            as_float32(np.frombuffer(base64.b64decode(text), np.uint16).reshape(-1, 16)) for text in (first, second)
        )
    except ValueError:  # a damaged file
        return 0.0
    sizes = [np.linalg.norm(values, axis=1, keepdims=True) for values in (a, b)]
    a, b = (np.divide(x, size, out=np.zeros_like(x), where=size > 0) for x, size in zip((a, b), sizes, strict=True))
    return float(np.vdot(a, b) / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-30))


def read_folder(folder: Path) -> dict[str, Stored]:
    """Everything in `model.safetensors` or, where there is none, what its index names in the shards.

    Of tensors that several shards have, the index decides. One that is not where the index says, but in another shard,
    is taken from there.
    """
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).exists():
        return _read_stored(folder / SINGLE_FILE)
    if not index.exists():
        raise PpsdError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: fetch or convert the weights")
    weight_map: Any = read_json_object(index, unique=True).get("weight_map")
    if not isinstance(weight_map, dict):
        raise unfit(index, "weight_map", shown(weight_map), "an object of tensors' to files' names")
    there, named = sorted(folder.glob("*.safetensors")), set(map(str, weight_map.values()))
    shards = [path for path in there if path.name in named]
    tensors: dict[str, Stored] = {}
    for path in shards if len(shards) == len(named) else there:  # an older copy's weights lie in other files, perhaps
        found = _read_stored(path)
        tensors = found | tensors | {name: found[name] for name in found if weight_map.get(name) == path.name}
    for name, shard in weight_map.items():
        if name not in tensors and shard not in {path.name for path in shards}:
            raise unfit(index, one_line(shard), "missing")
    return {name: tensor for name, tensor in tensors.items() if name in weight_map}


def _with_prefix(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """A model that was saved without its LM head has names without `model.`; transformers takes either."""
    ours = {name if name.startswith(("model.", "lm_head.")) else f"model.{name}": name for name in tensors}
    return {ours_name: tensors[name] for ours_name, name in ours.items()}


def read_file(path: Path, *, integers: bool = False) -> dict[str, Array]:
    """Everything in one safetensors file: floats of 16 or 32 bits and, if asked for, int8 and int32."""
    dtypes = {*_FLOATS, "I8", "I32"} if integers else {*_FLOATS}
    return {name: supported(name, stored, path, dtypes) for name, stored in _read_stored(path).items()}


def supported(name: str, stored: Stored, where: Path, dtypes: Collection[str] = _FLOATS) -> Array:
    if stored.dtype not in dtypes:
        raise unfit(where, f"tensor {name}", f"of dtype {stored.dtype}", " or ".join(dtypes))
    return stored.data


def _read_stored(path: Path) -> dict[str, Stored]:
    with _readable(path):
        header, start = _read_header(path)
        data = np.memmap(path, np.uint8, "c", offset=start) if path.stat().st_size > start else np.zeros(0, "u1")
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            dtype, shape = _DTYPES.get(entry["dtype"]), entry["shape"]
            raw = data[begin:end]
            tensors[name] = Stored(raw if dtype is None else raw.view(dtype).reshape(shape), entry["dtype"])
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
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would wait for ever
            raise OSError("no regular file")
        yield
    except FileNotFoundError:
        raise PpsdError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise unfit(path, "it", f"not to be read ({one_line(error) or type(error).__name__})") from None


def _is_plain(raw: Mapping[str, Any], stored: Mapping[str, Stored], shapes: Shapes, folder: Path) -> bool:
    """Are all matrices there as floats, whatever config.json says? Copies that were dequantised keep its old words."""
    matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
    plain = all(name in stored and stored[name].dtype in _FLOATS for name in matrices)
    plain = plain and all(stored[name].data.shape == shape for name, shape in matrices.items())
    if plain and (raw.get("quantization_config") or raw.get("compression_config")):
        _LOG.info("%s: the weights are not quantised, so the quantization_config of config.json is left out", folder)
    return plain


def _heads(config: LlamaConfig, tensors: dict[str, Stored]) -> LlamaConfig:
    """The configuration as the weights have it: a model that is tied may hold its matrix under the name of the LM head,
    or twice, which makes one of them, or an LM head that was trained apart."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if not config.tie_word_embeddings or head not in tensors:
        return config
    if embedding not in tensors:
        tensors[embedding] = tensors.pop(head)
    elif tensors[head].dtype == tensors[embedding].dtype and np.array_equal(
        tensors[head].data, tensors[embedding].data
    ):
        del tensors[head]
    else:
        return replace(config, tie_word_embeddings=False)
    return config


def save(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str]) -> None:
    """Write a (small) safetensors file whole or not at all; uint16 arrays are written as bfloat16."""
    unfinished, end = path.with_name(path.name + ".unfinished"), 0
    # The widest numbers first, so that all are aligned.
    parts = dict(sorted(tensors.items(), key=lambda part: (-part[1].itemsize, part[0])))
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    for name, part in parts.items():
        place = [end, end := end + part.nbytes]
        table[name] = {"dtype": _CODES[part.dtype], "shape": list(part.shape), "data_offsets": place}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
    data = [np.ascontiguousarray(part).tobytes() for part in parts.values()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *data]))
        unfinished.replace(path)
    except OSError as error:
        raise PpsdError(f"cannot write {path}: {error}") from None
