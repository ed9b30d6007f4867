"""EAGLE-3 heads (arXiv 2503.01840) as others publish them: a folder with `config.json` and safetensors.

Two layouts are read, SafeAILab's (github.com/SafeAILab/EAGLE) and that of the package `speculators`. Nothing here needs
torch; `exit_head.Eagle3Head` computes.

| tensor | shape | what it is |
| --- | --- | --- |
| `fc.weight` | [hidden, taps * hidden] | makes one feature of the hidden states at the taps |
| `input_norm.weight`, `fc_norm.T.weight` | [taps * hidden], [hidden] | norms before `fc`, of the heads that have them |
| `embed_tokens.weight` | [vocabulary, hidden] | absent: the model's own |
| `layers.0.hidden_norm.weight` | [hidden] | norm of the feature; `input_layernorm` is that of the embedding |
| `layers.0.self_attn.{q,k,v}_proj.weight` | [outputs, 2 * hidden] | read the embedding and the feature beside it |
| `norm.weight`, `lm_head.weight` | [hidden], [draft vocabulary, hidden] | of the head itself |
| `d2t` | [draft vocabulary] | the id of draft output i is i + d2t[i] |

SafeAILab calls `layers.0` `midlayer`. All else is a decoder layer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import PpsdError
from ..extras import need
from .checkpoint import Checkpoint, read_folder, supported
from .config import LlamaConfig, Reader, Shapes, check_shapes, layer_shapes
from .files import one_line, read_json_object, shown, unfit
from .head_file import EAGLE3, HeadFile, HeadInfo, check_draft_ids
from .stored import Stored

TORCH_FILE = "pytorch_model.bin"  # what SafeAILab's heads were first published as
_INTEGERS = {"I64": np.int64, "I32": np.int32}
_UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")  # for training, or what `d2t` says the other way

# `speculators` writes of a layer's configuration only what differs from these defaults of transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "intermediate_size": 11008},
    "qwen3": {"vocab_size": 151936, "intermediate_size": 22016},
}
_ALL_DEFAULTS = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}


@dataclass(frozen=True)
class Eagle3Config:
    """layer: of the head's own layers, `num_hidden_layers` of them; its vocabulary is the model's.

    taps: the hidden states that `fc` reads are those after so many layers of the model.
    norm_before_residual: the first layer adds to the normed feature. norm_before_fc: one norm over all taps together.
    fc_norm: one for each. norm_output: the next step's feature is the layers' output behind the final norm.
    """

    layer: LlamaConfig
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    own_embedding: bool = False


@dataclass(frozen=True, kw_only=True)
class Eagle3File(HeadFile):
    """A head that fits its model. Its LM head is its own, with a row for each of draft_ids."""

    eagle: Eagle3Config

    @property
    def taps(self) -> tuple[int, ...]:
        return self.eagle.taps

    @classmethod
    def load_folder(cls, folder: Path, model: Checkpoint) -> "Eagle3File":
        """Raises PpsdError, one line: what the head lacks, or how it differs from the model."""
        where = str(folder / "config.json")
        raw = read_json_object(folder / "config.json")
        stored = _names(_read(folder))
        eagle = _config(raw, stored, model, where)
        _check_name(raw, model, folder)
        draft = len(stored["lm_head.weight"].data) if "lm_head.weight" in stored else 0
        ids, order = _draft_ids(raw, stored, draft, model, folder)
        used = {name: tensor for name, tensor in stored.items() if name not in (*_UNUSED, "d2t")}
        tensors = {name: supported(name, tensor, folder) for name, tensor in used.items()}
        check_shapes(tensors, head_shapes(eagle, draft), folder)
        if order is not None:
            tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        recipe = {"folder": folder.name, "taps": list(eagle.taps)}
        info = HeadInfo(EAGLE3, 0, model.name, model.hash, recipe, intermediate_size=eagle.layer.intermediate_size)
        return cls(info, tensors, ids, eagle=eagle)


def head_shapes(eagle: Eagle3Config, draft_vocabulary: int) -> Shapes:
    """Every tensor of such a head, but the integers."""
    layer, hidden = eagle.layer, eagle.layer.hidden_size
    shapes: Shapes = {"fc.weight": (hidden, len(eagle.taps) * hidden)}
    if eagle.fc_bias:
        shapes["fc.bias"] = (hidden,)
    if eagle.norm_before_fc:
        shapes["input_norm.weight"] = (len(eagle.taps) * hidden,)
    if eagle.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (hidden,) for tap in range(len(eagle.taps))}
    if eagle.own_embedding:
        shapes["embed_tokens.weight"] = (layer.vocab_size, hidden)
    shapes["layers.0.hidden_norm.weight"] = (hidden,)
    for number in range(layer.num_hidden_layers):
        shapes |= layer_shapes(layer, f"layers.{number}.")
    for name in ("q_proj", "k_proj", "v_proj"):
        outputs, inputs = shapes[f"layers.0.self_attn.{name}.weight"]
        shapes[f"layers.0.self_attn.{name}.weight"] = (outputs, 2 * inputs)
    return {**shapes, "norm.weight": (hidden,), "lm_head.weight": (draft_vocabulary, hidden)}


def _config(raw: Mapping[str, Any], stored: Mapping[str, Stored], model: Checkpoint, where: str) -> Eagle3Config:
    own = raw.get("transformer_layer_config", raw)
    if (kind := raw.get("speculators_model_type", EAGLE3)) != EAGLE3:
        raise unfit(where, "speculators_model_type", shown(kind), EAGLE3)
    if not isinstance(own, dict):
        raise unfit(where, "transformer_layer_config", shown(own), "an object")
    if own is not raw:
        own = {**_ALL_DEFAULTS, **_DEFAULTS.get(str(own.get("model_type", "qwen3")), {}), "model_type": "qwen3", **own}
    layer = LlamaConfig.from_dict({"model_type": "llama", **own, "tie_word_embeddings": False}, where)
    _check_sizes(raw, layer, model, where)

    def has(suffix: str) -> bool:
        return any(name.endswith(suffix) for name in stored)

    layer = replace(
        layer,
        attention_bias=layer.attention_bias or has("self_attn.q_proj.bias"),
        attention_output_bias=has("self_attn.o_proj.bias"),  # SafeAILab's own code has none, vLLM's has
        mlp_bias=layer.mlp_bias or has("mlp.down_proj.bias"),
        qk_norm=layer.qk_norm or has("self_attn.q_norm.weight"),
    )
    read, names = Reader(raw, where), ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    flags = {name: read.boolean(name) for name in names}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise read.bad("fc_norm", "false beside norm_before_fc", True)
    return Eagle3Config(
        layer, _taps(raw, model, where), **flags, fc_bias=has("fc.bias"), own_embedding="embed_tokens.weight" in stored
    )


def _check_sizes(raw: Mapping[str, Any], layer: LlamaConfig, model: Checkpoint, where: str) -> None:
    """Raises PpsdError for a head of another model."""
    hidden, target = model.config.hidden_size, raw.get("target_hidden_size")
    for what, mine, models in (
        ("hidden_size", layer.hidden_size, hidden),
        ("target_hidden_size", hidden if target is None else target, hidden),
        ("vocab_size", layer.vocab_size, model.config.vocab_size),
    ):
        if mine != models:
            raise unfit(where, what, shown(mine), f"that of {model.name}, {models},")


def _taps(raw: Mapping[str, Any], model: Checkpoint, where: str) -> tuple[int, ...]:
    """After how many of the model's layers; without a word of it SafeAILab's: low, middle and high.

    `eagle_aux_hidden_state_layer_ids` names layers whose input is read (speculators, vLLM). Inside `eagle_config` it
    names layers whose output is read (SGLang, SpecForge).
    """
    layers, key = model.config.num_hidden_layers, "eagle_aux_hidden_state_layer_ids"
    nested = raw.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    if nested.get("use_aux_hidden_state", True) is False:
        raise unfit(where, "use_aux_hidden_state", "false, as of EAGLE-2", "true")
    ids, after = (raw[key], 0) if raw.get(key) is not None else (nested.get(key), 1)
    if ids is None:
        ids, after = [2, layers // 2, layers - 3], 0
    good = isinstance(ids, list) and ids and all(type(id) is int and 0 <= id + after <= layers for id in ids)
    if not good:
        raise unfit(where, key, shown(ids), f"a list of layers of {model.name}, which has {layers},")
    return tuple(id + after for id in ids)


def _check_name(raw: Mapping[str, Any], model: Checkpoint, folder: Path) -> None:
    """`speculators` writes which model the head is for. Raises PpsdError where this one is known to be another."""
    section: Any = raw.get("speculators_config")
    for key in ("verifier", "name_or_path"):
        section = section.get(key) if isinstance(section, dict) else None
    mine = _hub_name(model)
    if isinstance(section, str) and mine and section.rsplit("/", 1)[-1].lower() != mine.rsplit("/", 1)[-1].lower():
        raise PpsdError(
            f"{folder}: this head was trained for {one_line(section)}, not for {mine}; to draft with it all the same, "
            "remove speculators_config from its config.json"
        )


def _hub_name(model: Checkpoint) -> str | None:
    """What the model is called on the hub, where its place in the hub's cache says so."""
    for part in model.folder.parts:
        if found := re.fullmatch(r"models--([^/]+?)--([^/]+)", part):
            return f"{found[1]}/{found[2]}"
    return None


def _read(folder: Path) -> dict[str, Stored]:
    if not (folder / TORCH_FILE).is_file() or list(folder.glob("*.safetensors*")):
        return read_folder(folder)
    path = folder / TORCH_FILE
    need("torch", "torch", f"{path}")
    import torch

    from .llama import to_numpy

    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {name: Stored(to_numpy(tensor), names[tensor.dtype]) for name, tensor in loaded.items()}
    except Exception as error:  # of torch, of pickle, of the disk
        raise unfit(path, "it", f"not to be read ({one_line(error)})") from None


def _names(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    """As of the layout `speculators`."""
    return {re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model.")): each for name, each in stored.items()}


def _draft_ids(
    raw: Mapping[str, Any], stored: Mapping[str, Stored], draft: int, model: Checkpoint, folder: Path
) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.int64] | None]:
    """The ids that the head scores, ascending; and in what order the LM head's rows then are, if in another one.

    None: the whole vocabulary.
    """
    stated = raw.get("draft_vocab_size") or model.config.vocab_size
    if stated != draft:
        raise unfit(folder, "tensor lm_head.weight", f"of {draft} rows", f"draft_vocab_size, {shown(stated)},")
    if "d2t" not in stored and draft == model.config.vocab_size:
        return None, None
    data, kind = stored.get("d2t", Stored(np.zeros(0), "none"))
    offsets = data.reshape(-1).view(_INTEGERS.get(kind, data.dtype)).astype(np.int64)
    if kind not in _INTEGERS or len(offsets) != draft:
        found = f"{len(offsets)} values of dtype {kind}"
        raise unfit(folder, "tensor d2t", found, f"I64 or I32 for each of {draft} ids")
    ids = offsets + np.arange(draft)
    order = np.argsort(ids, kind="stable")
    try:
        checked = check_draft_ids(ids.tolist(), model.config)
    except PpsdError as error:
        raise unfit(folder, "tensor d2t", f"damaged ({error})") from None
    return checked, None if (order == np.arange(draft)).all() else order
