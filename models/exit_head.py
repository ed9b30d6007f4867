"""Exit heads in torch: what maps the hidden state after layer E to a draft token; E = 0: the token's embedding.

| kind        | body                                   | after                               |
| ----------- | -------------------------------------- | ----------------------------------- |
| `norm`      | none: the model's own norm, early      | LayerSkip, arXiv 2404.16710         |
| `adapter`   | one attention block with its norm      | Kangaroo, arXiv 2404.18911          |
| `layer`     | one decoder layer, starts as the last  | EESD, arXiv 2406.03853              |
| `two-layer` | two of them, start as the last two     |                                     |
| `feedback`  | `layer`, and what deep layers said     | the idea: EAGLE-3, arXiv 2503.01840 |
|             | with a tap: one in the middle too      |                                     |

All end in a norm of their own (`norm`: the model's) and share the model's LM head, whole or, with a draft vocabulary,
only the rows of the ids in `draft_ids`. At E = 0, `feedback` reads what EAGLE's head does (arXiv 2401.15077).
EAGLE-3 heads of others stand at the end.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PpsdError
from .config import LayerAttention, LlamaConfig
from .eagle3 import Eagle3Config, Eagle3File
from .head_file import DISTANCES, LAYERS, HeadFile, HeadInfo, body_config, check_draft_ids, save_head
from .llama import Attend, Attention, DecoderLayer, Linear, LlamaForCausalLM, RMSNorm, from_numpy, to_numpy
from .rope import Rope


class AdapterLayer(nn.Module):
    """x + attention(norm(x)): a decoder layer without the MLP."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:  # [..., rows, hidden] -> [..., rows, hidden]
        return x + self.self_attn(self.input_layernorm(x), attend)


class Tap(nn.Module):
    """What a head hears of verified rows after a layer in the middle: t. z = norm(t), whose elements vary alike.

    Keys and values of a verified row are made anew, K + A_k z and V + A_v z, of exit state and feedback as it was
    drafted with; and feedback reads M z of the newest one beside its last hidden state.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, outputs = config.hidden_size, config.num_key_value_heads * config.head_dim
        self.norm = Standardised(hidden, config.rms_norm_eps)
        self.keys, self.values = Linear(hidden, outputs), Linear(hidden, outputs)
        self.feedback = Linear(hidden, hidden)


class Standardised(nn.Module):
    """norm(t) * weight + bias: elements that are large all along would drown their neighbours, and their mean says
    nothing. Both are measured, not trained."""

    LOUDNESS = 0.2  # the deviation of every element of z: the steps of Adam are one size for all

    weight: Tensor
    bias: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(size))
        self.register_buffer("bias", torch.empty(size))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Standardised":
        for name, buffer in self.named_buffers():  # float32 they stay: means are large beside deviations
            setattr(self, name, buffer.to(fn(buffer).device, torch.float32))
        return self

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        return (F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps) + self.bias).to(x.dtype)

    def measure(self, x: Tensor) -> None:
        """x: [rows, size] to take means and deviations of."""
        normed = F.rms_norm(x.float(), x.shape[-1:], None, self.eps)
        self.weight = self.LOUDNESS / normed.std(0).clamp_min(1e-3)
        self.bias = -self.weight * normed.mean(0)


class Feedback(nn.Module):
    """x + W_d norm(h), h: what the last layer made of the newest verified row, d rows back; W_d: a matrix per distance.

    Verification has computed h anyway, and nothing waits for it: the next drafts take what is there, from however far
    back; beyond DISTANCES rows they do without. Unlike EAGLE's, the head never stands in for h with its own output.
    """

    def __init__(self, config: LlamaConfig, rank: int = 0) -> None:
        """rank: of every W_d, which is then a product of two matrices, the second of which all share; 0: whole."""
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.down = Linear(config.hidden_size, rank) if rank else None
        for distance in range(1, DISTANCES + 1):
            self.add_module(str(distance), Linear(rank or config.hidden_size, config.hidden_size))

    def _said(self, verified: Tensor, tapped: Tensor | int) -> Tensor:  # [..., hidden] -> [..., rank or hidden]
        normed: Tensor = self.norm(verified) + tapped
        return normed if self.down is None else self.down(normed)

    def forward(self, x: Tensor, verified: Tensor, distance: int, tapped: Tensor | int = 0) -> Tensor:
        """x, verified [..., hidden]: the exit hidden state, and h of `distance` rows before, from 1 to DISTANCES.

        tapped: of that row what a Tap adds to norm(h).
        """
        return x + self.get_submodule(str(distance))(self._said(verified, tapped))

    def along(self, x: Tensor, last: Tensor, distances: Tensor, tapped: Tensor | None = None) -> Tensor:
        """x, last [batch, rows, hidden]: whole texts, `last` after the last layer; distances [batch, rows] int64.

        A row whose distance is 0 or beyond DISTANCES receives nothing. distances are on the CPU, wherever the others
        are: a GPU would have to be waited for.
        """
        places = torch.arange(x.shape[1])
        steps = range(1, DISTANCES + 1)
        found = [((distances == step) & (places >= step)).flatten().nonzero()[:, 0] for step in steps]
        rows = torch.cat(found).to(x.device, non_blocking=True).split([len(some) for some in found])
        heard, last = torch.zeros_like(x).flatten(0, 1), last.flatten(0, 1)
        for step, some in zip(steps, rows, strict=True):
            beside = 0 if tapped is None else tapped.flatten(0, 1)[some - step]
            heard[some] = self.get_submodule(str(step))(self._said(last[some - step], beside)).to(x.dtype)
        return x + heard.view_as(x)


class ExitHead(nn.Module):
    """`layers` over the exit hidden states, `norm`, and the LM head over the draft vocabulary.

    `draft_ids` is [draft vocabulary] int64, ascending, or None for the whole vocabulary.
    """

    def __init__(self, config: LlamaConfig, info: HeadInfo) -> None:
        super().__init__()
        info.check(config)
        body = AdapterLayer if info.kind == "adapter" else DecoderLayer
        self.info = info
        # They begin as the model's last layers, and attend as those do.
        own = body_config(info, config)
        self.layers = nn.ModuleList(body(own, number) for number in range(-LAYERS[info.kind], 0))
        self.feedback = Feedback(config, info.feedback_rank) if info.hears else None
        self.tap = Tap(config) if info.tap else None
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.draft_ids: Tensor | None = None
        self._lm_head: list[Linear] = []  # in a list because it is the model's: not a submodule, not saved, not trained

    @classmethod
    def from_model(
        cls,
        model: LlamaForCausalLM,
        info: HeadInfo,
        draft_ids: Sequence[int] | None = None,
        begin: HeadFile | None = None,
    ) -> "ExitHead":
        """A head before training: its body starts as (part of) the model's last layers, its norm as the final norm.

        begin: or as this head (`begin_as`).
        """
        head = cls(model.config, info)
        norm = model.model.norm.weight
        for number, layer in enumerate(head.layers):
            model_layer = model.model.layers[number - len(head.layers)].state_dict()
            if info.intermediate_size:
                model_layer |= _loudest(model_layer, info.intermediate_size)
            layer.load_state_dict({name: model_layer[name] for name in layer.state_dict()})
        if head.feedback is not None:  # it adds nothing in the beginning
            generator = torch.Generator().manual_seed(0)
            for name, parameter in head.feedback.named_parameters():
                if name == "down.weight":  # were this zero too, no gradient would reach either
                    drawn = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
                    parameter.data.copy_(drawn)
                else:
                    parameter.data.fill_(1.0 if name == "norm.weight" else 0.0)
        if head.tap is not None:
            for part in (head.tap.keys, head.tap.values, head.tap.feedback):
                part.weight.data.zero_()
            head.tap.norm.weight.zero_()  # which says that it has not been measured
            head.tap.norm.bias.zero_()
        head.norm.load_state_dict({"weight": norm})
        head._share(model, draft_ids)
        if begin is not None:
            head.begin_as(begin)
        return head

    def begin_as(self, file: HeadFile) -> None:
        """Before training: take over another head's tensors, which must fit (HeadFile.check_grows).

        Layers that it lacks add nothing in the beginning: their ends are zero.
        """
        for name, parameter in self.state_dict().items():
            if name in file.tensors:
                parameter.copy_(from_numpy(file.tensors[name]))
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()

    @classmethod
    def from_file(cls, file: HeadFile, model: LlamaForCausalLM) -> "ExitHead":
        """The head of a file that fits the model."""
        with torch.device("meta"):
            head = cls(model.config, file.info)
        head.load_state_dict({name: from_numpy(tensor) for name, tensor in file.tensors.items()}, assign=True)
        return head._share(model, None if file.draft_ids is None else file.draft_ids.tolist())

    def _share(self, model: LlamaForCausalLM, draft_ids: Sequence[int] | None) -> "ExitHead":
        """Take dtype, device and LM head from the model: all of it, or a copy of the draft vocabulary's rows."""
        weight = model.lm_head.weight
        self.to(device=weight.device, dtype=weight.dtype).eval().requires_grad_(False)
        if draft_ids is None:
            self._lm_head = [model.lm_head]
            return self
        self.draft_ids = torch.from_numpy(check_draft_ids(draft_ids, model.config)).long().to(weight.device)
        with torch.device("meta"):
            lm_head = Linear(model.config.hidden_size, len(self.draft_ids))
        lm_head.weight = nn.Parameter(weight[self.draft_ids], requires_grad=False)
        self._lm_head = [lm_head]
        return self

    def hidden(self, x: Tensor, attend: Attend) -> Tensor:
        """Exit hidden states [..., rows, hidden] -> what the LM head reads, [..., rows, hidden]."""
        for layer in self.layers:
            x = layer(x, attend)
        return self.norm(x)

    def verified(self, x: Tensor, tapped: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values in the head's layer of verified rows, before any rotation: [..., rows, kv heads, head_dim].

        x, tapped [..., rows, hidden]: exit hidden states with the feedback they were drafted with; what they are at the
        tap.
        """
        layer, tap = self.layers[0], self.tap
        assert isinstance(layer, DecoderLayer)
        assert tap is not None
        z = tap.norm(tapped)
        _, k, v = layer.self_attn.qkv(layer.input_layernorm(x), (tap.keys(z), tap.values(z)))
        return k, v

    def lm_head(self, x: Tensor) -> Tensor:  # [..., hidden] -> [..., draft vocabulary]
        return self._lm_head[0](x)

    def save(
        self,
        path: Path,
        dtype: torch.dtype = torch.bfloat16,
        draft_ids: Sequence[int] | None = None,
        successors: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """dtype: float32, float16, bfloat16, or int8 for the matrices (save_head).

        `draft_ids`: a smaller draft vocabulary than the head's own, which is the default. successors: as of HeadFile.
        """
        int8 = dtype == torch.int8
        wide = torch.float32 if int8 else dtype
        tensors = {name: to_numpy(p.detach().to("cpu", wide)) for name, p in self.state_dict().items()}
        if draft_ids is None and self.draft_ids is not None:
            draft_ids = self.draft_ids.tolist()
        ids = None if draft_ids is None else np.array(draft_ids, dtype=np.int32)
        save_head(path, self.info, tensors, ids, int8=int8, successors=successors)


def chunked_attention(rope: Rope, keys: Tensor, values: Tensor, distances: Tensor) -> Attend:
    """As causal_attention. But a row sees its own chunk as it was drafted; of the rows before, `keys` and `values`, as
    ExitHead.verified has them.

    distances: [batch, rows], see Feedback.along. In texts that have none, rows see nothing but what was drafted.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, how: LayerAttention) -> Tensor:
        length = q.shape[-3]
        row = torch.arange(length, device=q.device)
        behind = row[:, None] - row
        seen = behind >= 0 if how.window is None else (behind >= 0) & (behind < how.window)
        away = distances.to(q.device)
        verified = row < torch.where(away > 0, row + 1 - away, 0)[..., None]
        mask = torch.cat((seen & verified, seen & ~verified), -1)[:, None]
        if how.rotary:
            q, k, old = (rope.rotate(each, slice(0, length)) for each in (q, k, keys))
        else:
            old = keys
        q, k, v = (
            each.transpose(-3, -2) for each in (q, torch.cat((old.to(k), k), -3), torch.cat((values.to(v), v), -3))
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(-3, -2)

    return attend


def _loudest(layer: Mapping[str, Tensor], neurons: int) -> dict[str, Tensor]:
    """Of a layer's MLP the neurons with the largest weights, which are there to begin with: their rows and columns."""
    gate, up, down = (layer[f"mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down"))
    loudness = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept = loudness.topk(neurons).indices.sort().values
    parts = {"gate": gate[kept], "up": up[kept], "down": down[:, kept]}
    loudest = {f"mlp.{name}_proj.weight": part.to(layer["mlp.up_proj.weight"].dtype) for name, part in parts.items()}
    biases = [name for name in ("mlp.gate_proj.bias", "mlp.up_proj.bias") if name in layer]
    return loudest | {name: layer[name][kept] for name in biases}


class Eagle3Layer(DecoderLayer):
    """The first of the head's layers: its attention reads the embedding and the feature."""

    def __init__(self, eagle: Eagle3Config) -> None:
        config = eagle.layer
        super().__init__(config, 0)
        self.norm_before_residual = eagle.norm_before_residual
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            setattr(self.self_attn, name, Linear(2 * config.hidden_size, outputs, config.attention_bias))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:  # [..., rows, 2 * hidden] -> [..., rows, hidden]
        embedding, feature = x.chunk(2, dim=-1)
        normed = self.hidden_norm(feature)
        x = normed if self.norm_before_residual else feature
        x = x + self.self_attn(torch.cat((self.input_layernorm(embedding), normed), dim=-1), attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """An EAGLE-3 head: the readable twin. What its file says, and where each tensor's shape is told: eagle3.py.

    Row i of the head has the token at position i + 1 and the feature of the token at position i; it foresees the token
    at position i + 2. The feature is `fc` of what the model's layers made of the token, once the model has verified it,
    and until then what the head's own row i - 1 came to.
    Its attribute names are the keys of its file. draft_ids: as of ExitHead.
    """

    def __init__(self, eagle: Eagle3Config, info: HeadInfo, draft_vocabulary: int) -> None:
        super().__init__()
        config, eps, taps = eagle.layer, eagle.layer.rms_norm_eps, len(eagle.taps)
        self.info, self.eagle = info, eagle
        self.fc = Linear(taps * config.hidden_size, config.hidden_size, eagle.fc_bias)
        self.input_norm = RMSNorm(taps * config.hidden_size, eps) if eagle.norm_before_fc else None
        norms = (RMSNorm(config.hidden_size, eps) for _ in range(taps))
        self.fc_norm = nn.ModuleList(norms) if eagle.fc_norm else None
        self.embed_tokens: nn.Module | None = None
        if eagle.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        others = (DecoderLayer(config, number) for number in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([Eagle3Layer(eagle), *others])
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = Linear(config.hidden_size, draft_vocabulary)
        self.draft_ids: Tensor | None = None

    @classmethod
    def from_file(cls, file: Eagle3File, like: Tensor) -> "Eagle3Head":
        """like: a weight of its model, whose dtype and device it has. Raises PpsdError where a weight is NaN or
        infinite."""
        with torch.device("meta"):
            head = cls(file.eagle, file.info, len(file.tensors["lm_head.weight"]))
        state = {name: from_numpy(tensor).to(like.device, like.dtype) for name, tensor in file.tensors.items()}
        for name, tensor in state.items():
            if not tensor.isfinite().all():
                raise PpsdError(
                    f"the exit head's {name} has a NaN or an infinite weight: it is damaged, fetch it again"
                )
        head.load_state_dict(state, assign=True)
        if file.draft_ids is not None:
            head.draft_ids = torch.from_numpy(file.draft_ids).long().to(like.device)
        return head.eval().requires_grad_(False)

    def feature(self, taps: Tensor) -> Tensor:
        """[..., taps * hidden], the hidden states at the taps one after the other -> [..., hidden]."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            chunks = taps.chunk(len(self.fc_norm), dim=-1)
            taps = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(taps)

    def next_feature(self, output: Tensor) -> Tensor:
        """What the layers came to [..., hidden] -> the feature of the next row, while nothing better is known."""
        return self.norm(output) if self.eagle.norm_output else output

    def logits(self, output: Tensor) -> Tensor:
        """What the layers came to [..., hidden] -> [..., draft vocabulary]"""
        return self.lm_head(self.norm(output))
