"""An exit head's file: safetensors with metadata. See exit_head.py for the kinds of heads. Nothing here needs torch."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PpsdError, UsageError
from .checkpoint import Checkpoint, likeness, read_file, read_metadata, save
from .config import LlamaConfig, Shapes, check_shapes, layer_shapes
from .files import one_line, parse_json, shown, unfit
from .stored import Array, as_float32

_LOG = logging.getLogger(__name__)

FORMAT = "ppsd-exit-head-1"
LAYERS = {"norm": 0, "adapter": 1, "layer": 1, "two-layer": 2, "feedback": 1}  # of the body
KINDS = tuple(LAYERS)
NGRAM = "ngram"  # no head at all: what usually follows in the model's own text
EAGLE3 = "eagle3"  # others train these: eagle3.py
MOST_TEXT_IDS = 512  # the newest of a text, drafted beside those that a file lists: kMost of draft_vocabulary.h
DISTANCES = 6  # rows after the newest verified one to which its last hidden state is of use
RELATIVE = 0.7  # a model at least so alike is a relative of the one that a head was trained for
BLOCK = 32  # weights of a row of an int8 matrix that share a scale, as in the CPU's int8 format
SCALES = ".scales"  # after the matrix's name: float16 [rows, columns / BLOCK]


@dataclass(frozen=True)
class HeadInfo:
    """What a head's file says of itself."""

    kind: str
    exit_layer: int  # how many layers the draft runs; 0: the head reads the embeddings
    model: str  # name, for people
    model_hash: str  # Checkpoint.hash of the model that it was trained for
    recipe: dict[str, Any] = field(default_factory=dict)  # how it was trained
    acceptance: dict[str, Any] = field(default_factory=dict)  # measured on held-out text
    intermediate_size: int = 0  # of its MLP; 0: the model's
    feedback_rank: int = 0  # of each matrix of `feedback`, which then is a product of two; 0: they are whole
    sample: str = ""  # Checkpoint.sample of that model; heads of before 2026-11-29 have none
    tap: int = 0  # after so many of the model's layers it hears verified rows too; 0: it does not

    @property
    def hears(self) -> bool:
        """Whether last hidden states of verified tokens reach it."""
        return self.kind == "feedback"

    @property
    def told(self) -> str:
        heard = f", hears layer {self.tap}" if self.tap else ""
        return f"{self.kind} after layer {self.exit_layer}{heard}"

    def states(self, last: int) -> tuple[int, ...]:
        """After so many of the model's `last` layers training wants hidden states; embeddings nobody keeps."""
        return tuple(sorted({self.exit_layer, self.tap, last} - {0}))

    def check_swap(self, used: "HeadInfo | None") -> None:
        """PpsdError where this head cannot take the place of the one in use between two answers: the layers are cut
        after that one, and what its drafts cost has been measured."""
        ours, theirs = (
            None if one is None else (one.kind, one.exit_layer, one.intermediate_size, one.feedback_rank, one.tap)
            for one in (self, used)
        )
        if ours != theirs:
            said = "none" if used is None else used.told
            raise PpsdError(
                f"an exit head of kind {self.told} in the place of {said}: it has other sizes than this engine's: give "
                "both the same --exit-head"
            )

    def check(self, config: LlamaConfig) -> None:
        if self.kind == NGRAM:
            return
        first, last = int(self.kind == "norm"), config.num_hidden_layers - 1  # an LM head alone needs a layer
        hears = self.hears and self.exit_layer < self.tap <= last

        def whole(size: int, most: int) -> tuple[int, bool, str]:
            return size, 0 <= size <= most and size % BLOCK == 0, f"multiples of {BLOCK} up to {most}, or 0 for all"

        for what, value, fits, takes in (
            ("kind", self.kind, self.kind in KINDS, ", ".join((*KINDS, NGRAM))),
            ("exit layer", self.exit_layer, first <= self.exit_layer <= last, f"{first} to {last}"),
            ("tap", self.tap, not self.tap or hears, f"{self.exit_layer + 1} to {last}, if of kind feedback"),
            ("MLP size", *whole(self.intermediate_size, config.intermediate_size)),
            ("feedback rank", *whole(self.feedback_rank, config.hidden_size)),
        ):
            if not fits:
                raise PpsdError(f"an exit head of kind {self.kind} with the {what} {value}: this model takes {takes}")


@dataclass(frozen=True)
class HeadFile:
    """A head that fits its model. draft_ids: [draft vocabulary] int32, ascending; None: the whole vocabulary.

    successors: [rows, 4] int32, what usually follows in the model's own text: the token before the last (-1: any), the
    last, what follows, and how sure that is, from 0 to 7.
    """

    info: HeadInfo
    tensors: Mapping[str, Array]
    draft_ids: npt.NDArray[np.int32] | None
    successors: npt.NDArray[np.int32] | None = None
    path: Path | None = None  # that it was loaded from

    @property
    def taps(self) -> tuple[int, ...]:
        """After so many of the model's layers verification keeps what it reads."""
        return (self.info.tap,) if self.info.tap else ()

    @property
    def drafts(self) -> bool:
        """Is there an exit head? (A file of kind `ngram` has successors alone.)"""
        return self.info.kind != NGRAM

    @cached_property
    def whole(self) -> Mapping[str, Array]:
        """The tensors with each matrix of `feedback` in one piece [hidden, hidden], as the kernels take it.

        One of them is read for a draft, and even whole it is small beside the layer and the LM head. Those of the tap
        lie beside keys and values of the layer: [kv outputs, 2 * hidden].
        """
        tensors = dict(self.tensors)
        if self.info.feedback_rank:
            down = as_float32(tensors.pop("feedback.down.weight"))
            for distance in range(1, DISTANCES + 1):
                name = f"feedback.{distance}.weight"
                tensors[name] = as_float32(tensors[name]) @ down
        if self.info.tap:
            for name, own in (("k_proj", "keys"), ("v_proj", "values")):
                sides = tensors[f"layers.0.self_attn.{name}.weight"], tensors.pop(f"tap.{own}.weight")
                tensors[f"tap.{name}.weight"] = np.hstack([as_float32(side) for side in sides])
        return tensors

    @classmethod
    def load(cls, path: Path, model: Checkpoint) -> "HeadFile":
        """Raises PpsdError when the file is damaged, or its shapes are not this model's.

        A head cannot change an answer, so one that was trained for another model is taken too; the log says so.
        """
        info = read_info(path)
        if info.model_hash != model.hash:
            alike = likeness(info.sample, model.sample)
            kin = (
                f"a relative of this model ({alike:.0%} alike)" if alike >= RELATIVE else "another model: seldom right"
            )
            _LOG.info("drafting with the exit head of %s, %s", info.model, kin)
        info.check(model.config)
        tensors = read_file(path, integers=True)
        draft_ids = tensors.pop("draft_ids", None)
        successors = tensors.pop("successors", None)
        tensors = _floats(tensors, path)
        check_shapes(tensors, head_shapes(info, model.config), path)
        bounds = [*[model.config.vocab_size] * 3, 8]
        if successors is not None and (
            (successors.dtype, successors.shape[1:]) != (np.int32, (4,))
            or ((successors < [-1, 0, 0, 0]) | (successors >= bounds)).any()
        ):
            raise unfit(path, "tensor successors", "no table of tokens of this model")
        ids = None if draft_ids is None else check_draft_ids(draft_ids.tolist(), model.config)
        return cls(info, tensors, ids, successors, path)

    def check_grows(self, info: HeadInfo, config: LlamaConfig) -> None:
        """Raises UsageError when such a head has no place for some of its tensors."""
        if self.info.tap not in (0, info.tap):
            raise UsageError(f"a head with --tap {info.tap} cannot begin as one that hears layer {self.info.tap}")
        shapes = head_shapes(info, config)
        for name, tensor in sorted(self.tensors.items()):
            if shapes.get(name) != tensor.shape:
                what = f"such a head of kind {info.kind} cannot begin as this one of kind {self.info.kind}"
                raise UsageError(f"{what}: it has no place for {name} {tensor.shape}")

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


def refuse_eagle3(info: HeadInfo | None, where: str) -> None:
    """Raises PpsdError for a head of that kind, which `where` cannot draft with."""
    if info is not None and info.kind == EAGLE3:
        raise PpsdError(f"an EAGLE-3 head does not draft {where}: use --backend cpu")


def body_config(info: HeadInfo, config: LlamaConfig) -> LlamaConfig:
    """Of the head's own layers: the model's, but for the width of the MLP."""
    return replace(config, intermediate_size=info.intermediate_size or config.intermediate_size)


def head_shapes(info: HeadInfo, config: LlamaConfig) -> Shapes:
    """The tensors of such a head, draft_ids and successors aside."""
    if info.kind == NGRAM:
        return {}
    shapes: Shapes = {}
    for number in range(LAYERS[info.kind]):
        shapes |= layer_shapes(body_config(info, config), f"layers.{number}.", mlp=info.kind != "adapter")
    if info.hears:
        hidden, rank = config.hidden_size, info.feedback_rank
        shapes["feedback.norm.weight"] = (hidden,)
        if rank:
            shapes["feedback.down.weight"] = (rank, hidden)
        for distance in range(1, DISTANCES + 1):
            shapes[f"feedback.{distance}.weight"] = (hidden, rank or hidden)
        if info.tap:
            outputs = config.num_key_value_heads * config.head_dim
            shapes |= {"tap.norm.weight": (hidden,), "tap.norm.bias": (hidden,)}
            shapes |= {"tap.keys.weight": (outputs, hidden), "tap.values.weight": (outputs, hidden)}
            shapes["tap.feedback.weight"] = (hidden, hidden)
    return {**shapes, "norm.weight": (config.hidden_size,)}


def save_head(
    path: Path,
    info: HeadInfo,
    tensors: Mapping[str, Array],
    draft_ids: npt.NDArray[np.int32] | None,
    *,
    int8: bool = False,
    successors: npt.NDArray[np.int32] | None = None,
) -> None:
    """int8: matrices as the CPU's int8 format rounds them, at half the size of bfloat16. successors: as of HeadFile."""
    metadata = {"format": FORMAT, "draft_vocabulary": str(0 if draft_ids is None else len(draft_ids))}
    metadata |= {name: value if isinstance(value, str) else json.dumps(value) for name, value in vars(info).items()}
    if int8:
        tensors = _int8(tensors)
    integers = {"draft_ids": draft_ids, "successors": successors}
    save(path, {**tensors, **{name: array for name, array in integers.items() if array is not None}}, metadata)


def read_info(path: Path) -> HeadInfo:
    """The metadata of a head's file. Raises PpsdError when it is not one."""
    raw = read_metadata(path)
    if raw.get("format") != FORMAT:
        raise unfit(path, "its format", shown(raw.get("format")), FORMAT)
    try:
        told: dict[str, Any] = {name: dict(parse_json(raw[name])) for name in ("recipe", "acceptance")}
        told |= {name: int(raw.get(name, "0")) for name in ("intermediate_size", "feedback_rank", "tap")}
        texts = raw["model"], raw["model_hash"]
        return HeadInfo(raw["kind"], int(raw["exit_layer"]), *texts, **told, sample=raw.get("sample", ""))
    except (KeyError, TypeError, ValueError) as error:
        raise unfit(path, "its metadata", f"not an exit head's ({one_line(error)})") from None


def _int8(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Matrices in blocks of a row that share a scale; what has no whole blocks stays as it is."""
    out: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or tensor.shape[1] % BLOCK:
            out[name] = tensor
            continue
        blocks = as_float32(tensor).reshape(len(tensor), -1, BLOCK)
        scales = (np.abs(blocks).max(-1) / 127).astype(np.float16)
        wide = scales.astype(np.float32)[..., None]
        whole = np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide > 0)
        out[name] = np.clip(np.rint(whole), -127, 127).astype(np.int8).reshape(tensor.shape)
        out[name + SCALES] = scales
    return out


def _floats(tensors: Mapping[str, Array], path: Path) -> dict[str, Array]:
    """What _int8 has made, as float32 again."""
    out: dict[str, Array] = {}
    for name, tensor in tensors.items():
        if tensor.dtype != np.int8:
            if not name.endswith(SCALES):
                out[name] = tensor
            continue
        scales = tensors.get(name + SCALES)
        if scales is None or tensor.ndim != 2 or scales.shape != (len(tensor), tensor.shape[1] // BLOCK):
            raise unfit(path, f"tensor {name + SCALES}", "missing or of another shape")
        blocks = tensor.reshape(len(tensor), -1, BLOCK).astype(np.float32)
        out[name] = (blocks * scales.astype(np.float32)[..., None]).reshape(tensor.shape)
    return out


def find_shipped(model: Checkpoint) -> Path | None:
    """The head that comes with the project for this model or, if there is none, for its nearest relative."""
    infos = {path: read_info(path) for path in sorted((Path(__file__).parent / "heads").glob("*.safetensors"))}
    fits = {path: 1.0 for path, info in infos.items() if info.model_hash == model.hash}
    fits = fits or {path: likeness(info.sample, model.sample) for path, info in infos.items()}
    best = max(fits, key=lambda path: fits[path], default=None)
    return best if best and fits[best] >= RELATIVE else None


def check_draft_ids(ids: Sequence[int], config: LlamaConfig) -> npt.NDArray[np.int32]:
    ordered = sorted(set(ids))
    if len(ordered) != len(ids) or not ordered or ordered[0] < 0 or ordered[-1] >= config.vocab_size:
        raise PpsdError(f"a draft vocabulary needs distinct ids from 0 to {config.vocab_size - 1}")
    return np.array(ordered, dtype=np.int32)
