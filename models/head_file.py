"""An exit head's file: safetensors with metadata. See exit_head.py for the kinds of heads. Nothing here needs torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PpsdError, UsageError
from .checkpoint import Array, Checkpoint, read_file, read_metadata, save
from .config import LlamaConfig
from .files import one_line, parse_json
from .shapes import Shapes, check_shapes, layer_shapes

FORMAT = "ppsd-exit-head-1"
LAYERS = {"norm": 0, "adapter": 1, "layer": 1, "two-layer": 2, "feedback": 1}  # of the body
KINDS = tuple(LAYERS)
DISTANCES = 6  # rows after the newest verified one to which its last hidden state is of use


@dataclass(frozen=True)
class HeadInfo:
    """What a head's file says of itself."""

    kind: str
    exit_layer: int  # how many layers the draft runs; 0: the head reads the embeddings
    model: str  # name, for people
    model_hash: str  # Checkpoint.hash of the one model that it fits
    recipe: dict[str, Any] = field(default_factory=dict)  # how it was trained
    acceptance: dict[str, Any] = field(default_factory=dict)  # measured on held-out text

    @property
    def hears(self) -> bool:
        """Whether last hidden states of verified tokens reach it."""
        return self.kind == "feedback"

    def check(self, config: LlamaConfig) -> None:
        if self.kind not in KINDS:
            raise PpsdError(f"exit head kind {self.kind!r} is unknown; kinds are {', '.join(KINDS)}")
        first = 1 if self.kind == "norm" else 0  # an LM head alone makes nothing of embeddings
        if not first <= self.exit_layer < config.num_hidden_layers:
            raise PpsdError(
                f"exit layer {self.exit_layer} is out of range: with this model, a head of kind {self.kind} takes exit "
                f"layers {first} to {config.num_hidden_layers - 1}"
            )


@dataclass(frozen=True)
class HeadFile:
    """A head that fits its model. draft_ids: [draft vocabulary] int32, ascending; None: the whole vocabulary."""

    info: HeadInfo
    tensors: Mapping[str, Array]
    draft_ids: npt.NDArray[np.int32] | None

    @classmethod
    def load(cls, path: Path, model: Checkpoint) -> "HeadFile":
        """Raises PpsdError when the file is damaged, or belongs to another model."""
        info = read_info(path)
        if info.model_hash != model.hash:
            raise PpsdError(
                f"{path} was trained for {info.model} (hash {info.model_hash}), not for this model "
                f"(hash {model.hash}); train one with `ppsd-run distill`"
            )
        info.check(model.config)
        tensors = read_file(path, integers=True)
        draft_ids = tensors.pop("draft_ids", None)
        check_shapes(tensors, head_shapes(info, model.config), str(path))
        return cls(info, tensors, None if draft_ids is None else check_draft_ids(draft_ids.tolist(), model.config))

    def check_grows(self, kind: str, config: LlamaConfig) -> None:
        """Raises UsageError when a head of this kind has no place for some of its tensors."""
        for name in sorted(set(self.tensors) - set(head_shapes(replace(self.info, kind=kind), config))):
            kinds = f"a head of kind {kind} cannot begin as one of kind {self.info.kind}"
            raise UsageError(f"{kinds}: it has no place for {name}")

    @classmethod
    def norm(cls, exit_layer: int, model: Checkpoint, vocabulary: int | None = None) -> "HeadFile":
        """The model's own final norm and LM head, applied early; of the latter the first `vocabulary` rows."""
        info = HeadInfo("norm", exit_layer, model.name, model.hash)
        info.check(model.config)
        most = model.config.vocab_size
        if vocabulary is not None and not 1 <= vocabulary <= most:  # before a set of them is made
            raise PpsdError(f"a draft vocabulary of {vocabulary} ids is out of range: this model has {most}")
        draft_ids = None if vocabulary is None else check_draft_ids(range(vocabulary), model.config)
        return cls(info, {"norm.weight": model.tensors["model.norm.weight"]}, draft_ids)


def head_shapes(info: HeadInfo, config: LlamaConfig) -> Shapes:
    """The tensors of such a head, draft_ids aside."""
    shapes: Shapes = {}
    for number in range(LAYERS[info.kind]):
        shapes |= layer_shapes(config, f"layers.{number}.", mlp=info.kind != "adapter")
    if info.hears:
        shapes["feedback.norm.weight"] = (config.hidden_size,)
        for distance in range(1, DISTANCES + 1):
            shapes[f"feedback.{distance}.weight"] = (config.hidden_size, config.hidden_size)
    return {**shapes, "norm.weight": (config.hidden_size,)}


def save_head(
    path: Path, info: HeadInfo, tensors: Mapping[str, Array], draft_ids: npt.NDArray[np.int32] | None
) -> None:
    metadata = {
        "format": FORMAT,
        "kind": info.kind,
        "exit_layer": str(info.exit_layer),
        "model": info.model,
        "model_hash": info.model_hash,
        "draft_vocabulary": str(0 if draft_ids is None else len(draft_ids)),
        "recipe": json.dumps(info.recipe),
        "acceptance": json.dumps(info.acceptance),
    }
    save(path, tensors if draft_ids is None else {**tensors, "draft_ids": draft_ids}, metadata)


def read_info(path: Path) -> HeadInfo:
    """The metadata of a head's file. Raises PpsdError when it is not one."""
    raw = read_metadata(path)
    if raw.get("format") != FORMAT:
        raise PpsdError(f"{path} is not an exit head of this version (format {raw.get('format')!r}, not {FORMAT!r})")
    try:
        recipe, acceptance = parse_json(raw["recipe"]), parse_json(raw["acceptance"])
        if not (isinstance(recipe, dict) and isinstance(acceptance, dict)):
            raise ValueError("recipe and acceptance are JSON objects")
        return HeadInfo(
            kind=raw["kind"],
            exit_layer=int(raw["exit_layer"]),
            model=raw["model"],
            model_hash=raw["model_hash"],
            recipe=recipe,
            acceptance=acceptance,
        )
    except (KeyError, ValueError) as error:
        raise PpsdError(
            f"{path}: the exit head's metadata is damaged ({one_line(error)}); fetch or train it again"
        ) from None


def find_shipped(model_hash: str) -> Path | None:
    """The head that comes with the project for the model with this hash, if there is one."""
    for path in sorted((Path(__file__).parent / "heads").glob("*.safetensors")):
        if read_info(path).model_hash == model_hash:
            return path
    return None


def check_draft_ids(ids: Sequence[int], config: LlamaConfig) -> npt.NDArray[np.int32]:
    ordered = sorted(set(ids))
    if len(ordered) != len(ids) or not ordered or ordered[0] < 0 or ordered[-1] >= config.vocab_size:
        raise PpsdError(f"a draft vocabulary needs distinct ids from 0 to {config.vocab_size - 1}")
    return np.array(ordered, dtype=np.int32)
