"""An EAGLE-3 head in torch: the readable twin. What its file says, and where each tensor's shape is told: eagle3.py.

Row i of the head has the token at position i + 1 and the feature of the token at position i; it foresees the token at
position i + 2. The feature is `fc` of what the model's layers made of the token, once the model has verified it, and
until then what the head's own row i - 1 came to.
"""

import torch
from torch import Tensor, nn

from ..errors import PpsdError
from .eagle3 import Eagle3Config, Eagle3File
from .head_file import HeadInfo
from .llama import Attend, DecoderLayer, Linear, RMSNorm, from_numpy


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
    """Its attribute names are the keys of its file. draft_ids: as of ExitHead."""

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
