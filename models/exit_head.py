"""Exit heads: what maps the hidden state after layer E to a draft token.

| kind      | body                                  | after                       |
| --------- | ------------------------------------- | --------------------------- |
| `norm`    | none: the model's own norm, early     | LayerSkip, arXiv 2404.16710 |
| `adapter` | one attention block with its norm     | Kangaroo, arXiv 2404.18911  |
| `layer`   | one decoder layer, starts as the last | EESD, arXiv 2406.03853      |

All end in a norm of their own (`norm`: the model's) and share the model's LM head, whole or, with a draft vocabulary,
only the rows of the ids in `draft_ids`. A head is a file of its own: safetensors with metadata.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PpsdError
from .checkpoint import assign, read_file, read_metadata, save
from .config import LlamaConfig
from .llama import Attend, Attention, DecoderLayer, Linear, LlamaForCausalLM, RMSNorm

FORMAT = "ppsd-exit-head-1"
KINDS = ("norm", "adapter", "layer")


@dataclass(frozen=True)
class HeadInfo:
    """What a head's file says of itself."""

    kind: str
    exit_layer: int
    model: str  # name, for people
    model_hash: str  # Checkpoint.hash of the one model that it fits
    recipe: dict[str, Any] = field(default_factory=dict)  # how it was trained
    acceptance: dict[str, Any] = field(default_factory=dict)  # measured on held-out text


class AdapterLayer(nn.Module):
    """x + attention(norm(x)): a decoder layer without the MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:  # [..., rows, hidden] -> [..., rows, hidden]
        return x + self.self_attn(self.input_layernorm(x), attend)


class ExitHead(nn.Module):
    """`layers` over the exit hidden states, `norm`, and the LM head over the draft vocabulary.

    `draft_ids` is [draft vocabulary] int64, ascending, or None for the whole vocabulary.
    """

    def __init__(self, config: LlamaConfig, info: HeadInfo, draft_ids: Tensor | None = None) -> None:
        super().__init__()
        if info.kind not in KINDS:
            raise PpsdError(f"exit head kind {info.kind!r} is unknown; kinds are {', '.join(KINDS)}")
        if not 1 <= info.exit_layer < config.num_hidden_layers:
            last = config.num_hidden_layers - 1
            raise PpsdError(f"exit layer {info.exit_layer} is out of range: this model's exits are layers 1 to {last}")
        body = {"norm": None, "adapter": AdapterLayer, "layer": DecoderLayer}[info.kind]
        self.info = info
        self.layers = nn.ModuleList([body(config)] if body else [])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.draft_ids = draft_ids
        self._lm_head: list[Linear] = []  # in a list because it is the model's: not a submodule, not saved, not trained

    @classmethod
    def from_model(cls, model: LlamaForCausalLM, info: HeadInfo, draft_ids: Sequence[int] | None = None) -> "ExitHead":
        """A head before training: its body starts as (part of) the model's last layer, its norm as the final norm."""
        head = cls(model.config, info, _check_ids(draft_ids, model.config))
        last, norm = model.model.layers[-1].state_dict(), model.model.norm.weight
        for layer in head.layers:
            layer.load_state_dict({name: last[name] for name in layer.state_dict()})
        head.norm.load_state_dict({"weight": norm})
        head.to(device=norm.device, dtype=norm.dtype)
        head.share(model)
        return head.eval().requires_grad_(False)

    @classmethod
    def load(cls, path: Path, model: LlamaForCausalLM, model_hash: str) -> "ExitHead":
        """Read a head's file for `model`; refused when it was trained for another one."""
        info = read_info(path)
        if info.model_hash != model_hash:
            raise PpsdError(
                f"{path} was trained for {info.model} (hash {info.model_hash}), not for this model "
                f"(hash {model_hash}); train one with `ppsd-run distill`"
            )
        tensors = dict(read_file(path, integers=True))
        draft_ids = tensors.pop("draft_ids", None)
        with torch.device("meta"):
            head = cls(model.config, info)
        head.draft_ids = _check_ids(None if draft_ids is None else draft_ids.tolist(), model.config)
        like = model.model.norm.weight
        assign(head, tensors, str(path), like.dtype, like.device)
        head.share(model)
        return head.eval().requires_grad_(False)

    def share(self, model: LlamaForCausalLM) -> None:
        """Take the rows of the model's LM head that belong to the draft vocabulary (a copy, so that they lie dense)."""
        if self.draft_ids is None:
            self._lm_head = [model.lm_head]
            return
        self.draft_ids = self.draft_ids.to(model.lm_head.weight.device)
        with torch.device("meta"):
            lm_head = Linear(model.config.hidden_size, len(self.draft_ids))
        lm_head.weight = nn.Parameter(model.lm_head.weight[self.draft_ids], requires_grad=False)
        self._lm_head = [lm_head]

    def hidden(self, x: Tensor, attend: Attend) -> Tensor:
        """Exit hidden states [..., rows, hidden] -> what the LM head reads, [..., rows, hidden]."""
        for layer in self.layers:
            x = layer(x, attend)
        return self.norm(x)

    def lm_head(self, x: Tensor) -> Tensor:  # [..., hidden] -> [..., draft vocabulary]
        return self._lm_head[0](x)

    def save(self, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        tensors = {name: p.detach().to("cpu", dtype) for name, p in self.named_parameters()}
        if self.draft_ids is not None:
            tensors["draft_ids"] = self.draft_ids.to("cpu", torch.int32)
        info = self.info
        save(
            path,
            tensors,
            {
                "format": FORMAT,
                "kind": info.kind,
                "exit_layer": str(info.exit_layer),
                "model": info.model,
                "model_hash": info.model_hash,
                "draft_vocabulary": str(0 if self.draft_ids is None else len(self.draft_ids)),
                "recipe": json.dumps(info.recipe),
                "acceptance": json.dumps(info.acceptance),
            },
        )


def read_info(path: Path) -> HeadInfo:
    """The metadata of a head's file. Raises PpsdError when it is not one."""
    raw = read_metadata(path)
    if raw.get("format") != FORMAT:
        raise PpsdError(f"{path} is not an exit head of this version (format {raw.get('format')!r}, not {FORMAT!r})")
    try:
        return HeadInfo(
            kind=raw["kind"],
            exit_layer=int(raw["exit_layer"]),
            model=raw["model"],
            model_hash=raw["model_hash"],
            recipe=json.loads(raw["recipe"]),
            acceptance=json.loads(raw["acceptance"]),
        )
    except (KeyError, ValueError) as error:
        raise PpsdError(f"{path}: the exit head's metadata is damaged ({error}); fetch or train it again") from None


def find_shipped(model_hash: str) -> Path | None:
    """The head that comes with the project for the model with this hash, if there is one."""
    for path in sorted((Path(__file__).parent / "heads").glob("*.safetensors")):
        if read_info(path).model_hash == model_hash:
            return path
    return None


def _check_ids(ids: Sequence[int] | None, config: LlamaConfig) -> Tensor | None:
    if ids is None:
        return None
    ordered = sorted(set(ids))
    if len(ordered) != len(ids) or not ordered or ordered[0] < 0 or ordered[-1] >= config.vocab_size:
        raise PpsdError(f"a draft vocabulary needs distinct ids from 0 to {config.vocab_size - 1}")
    return torch.tensor(ordered, dtype=torch.int64)
