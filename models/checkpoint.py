"""Safetensors checkpoints in, memory-mapped; and the hash that tells one model from another."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from ..errors import PpsdError
from .config import LlamaConfig
from .files import one_line, read_json_object
from .llama import LlamaForCausalLM

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_TYPES = ("F32", "F16", "BF16")

# Buffers that some checkpoints carry although they follow from the configuration.
_DERIVED_SUFFIXES = (".rotary_emb.inv_freq",)


class Checkpoint:
    """A model folder, opened: configuration, mapped tensors, hash. Every backend builds its model from this."""

    def __init__(self, folder: Path) -> None:
        """Raises PpsdError that names the file (missing, corrupt) or the tensor (dtype)."""
        self.folder = folder
        self.config = LlamaConfig.from_folder(folder)
        self.tensors = _without_derived(read_tensors(folder), self.config)

    @cached_property
    def hash(self) -> str:
        return _hash(self.tensors)

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> LlamaForCausalLM:
        """The module tree with these weights. Tensors whose dtype is already right stay mapped from the file.

        Raises PpsdError that names the tensor that is missing, too many, or of the wrong shape.
        """
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config)
        tied = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        assign(model, self.tensors, str(self.folder), dtype, device, tied)
        model.tie()
        return model.eval().requires_grad_(False)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, mapped: one `model.safetensors`, or the shards that its index names."""
    index = folder / INDEX_FILE
    if not index.exists():
        if not (folder / SINGLE_FILE).exists():
            raise PpsdError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}: fetch or convert the weights")
        return dict(read_file(folder / SINGLE_FILE))

    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise PpsdError(f"{index} has no weight_map of tensor names to file names; fetch the file again")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise PpsdError(f"{index} names the shard {shard!r}, which is not a plain file name")
        if not (folder / shard).exists():
            raise PpsdError(f"{folder} lacks the shard {shard} that {INDEX_FILE} names; fetch it again")
        for name, tensor in read_file(folder / shard):
            if weight_map.get(name) != shard:
                raise PpsdError(f"{index} says that {name} is in {weight_map.get(name)}, but it is in {shard}")
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise PpsdError(f"{index} says that {name} is in {shard}, but it is not there")
    return tensors


def read_file(path: Path, *, integers: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything in one safetensors file: floats of 16 or 32 bits and, if asked for, int32."""
    supported = [*FLOAT_TYPES, "I32"] if integers else [*FLOAT_TYPES]
    with _readable(path), safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (safe_open is not a mapping)
            kind = file.get_slice(name).get_dtype()
            if kind not in supported:
                raise PpsdError(f"{path}: tensor {name} has dtype {kind}; supported are {', '.join(supported)}")
            yield name, file.get_tensor(name)


def read_metadata(path: Path) -> dict[str, str]:
    """The free-form string pairs in the header of a safetensors file."""
    with _readable(path), safe_open(path, framework="pt") as file:
        return dict(file.metadata() or {})


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """One clear line for whatever is wrong with a safetensors file."""
    try:
        yield
    except PpsdError:
        raise
    except FileNotFoundError:
        raise PpsdError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        reason = one_line(error) or type(error).__name__
        raise PpsdError(f"{path} is truncated or corrupt ({reason}); fetch the file again") from None


def assign(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    where: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    tied: set[str] | frozenset[str] = frozenset(),
) -> None:
    """Put `tensors` in the place of the module's parameters of the same names, which all but `tied` must have."""
    wanted = {name: p for name, p in module.named_parameters(remove_duplicate=False) if name not in tied}
    for name, parameter in wanted.items():
        if name not in tensors:
            raise PpsdError(f"{where}: tensor {name} is missing; the checkpoint does not fit its config.json")
        found, expected = tuple(tensors[name].shape), tuple(parameter.shape)
        if found != expected:
            raise PpsdError(f"{where}: tensor {name} has shape {found}, config.json asks for {expected}")
    for name in tensors:
        if name not in wanted:
            raise PpsdError(f"{where}: tensor {name} is not part of the model that config.json describes")
    state = {name: tensors[name].to(device=device, dtype=dtype) for name in wanted}
    module.load_state_dict(state, strict=not tied, assign=True)


def _without_derived(tensors: dict[str, Tensor], config: LlamaConfig) -> dict[str, Tensor]:
    """Drop what follows from the rest: old rotary buffers, and a tied LM head that repeats the embedding."""
    kept = {name: t for name, t in tensors.items() if not name.endswith(_DERIVED_SUFFIXES)}
    head, embedding = kept.get("lm_head.weight"), kept.get("model.embed_tokens.weight")
    if config.tie_word_embeddings and head is not None and embedding is not None and torch.equal(head, embedding):
        del kept["lm_head.weight"]
    return kept


def save(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a (small) safetensors file whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(serialize({name: t.contiguous() for name, t in tensors.items()}, dict(metadata)))
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise PpsdError(f"cannot write {path}: {error}") from None


def _hash(tensors: Mapping[str, Tensor]) -> str:
    """Sixteen hex digits that name a model's weights: an exit head fits exactly one model.

    Reading all weights would cost more than loading them, so each tensor gives its name, its shape and 16 of its
    values, spread evenly and rounded to bfloat16: any other training run differs in nearly all of them, and a copy
    saved as bfloat16 does not.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.reshape(-1)
        places = torch.linspace(0, max(flat.numel() - 1, 0), 16, dtype=torch.float64).long()
        sample = flat[places].to(torch.bfloat16).float() if flat.numel() else flat.float()
        digest.update(json.dumps([name, list(tensor.shape)]).encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
