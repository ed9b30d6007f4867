"""The Llama module tree. Attribute names are the keys of the checkpoint: there is no mapping table.

Every module maps rows to rows and knows nothing of caches. What a row attends to is decided by the caller, who passes
`attend`: the batched causal attention of `forward_batch` (training, scoring) or passes with their KV cache
(`ppsd_rt/reference/passes.py`, decoding).
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checkpoint import Checkpoint
from .config import LayerAttention, LlamaConfig
from .rope import Rope
from .stored import Array

# attend(q [..., rows, heads, head_dim], k and v [..., rows, kv heads, head_dim], how) -> [..., rows, heads, head_dim]
# q and k are not rotated yet: the callee knows the positions.
Attend = Callable[[Tensor, Tensor, Tensor, LayerAttention], Tensor]

FP32_CPU_ROWS = 4


class Linear(nn.Module):
    """y = x W^T (+ b), W [outputs, inputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:  # [..., inputs] -> [..., outputs]
        if x.dim() == 2 and len(x) == FP32_CPU_ROWS and x.dtype == torch.float32 and x.device.type == "cpu":
            # Four fp32 columns cost the BLAS what one costs in this order, and twice as much in the other
            # (25 against 45 ms for all the matrices of the default model).
            y = torch.mm(self.weight, x.t()).t()
            return y if self.bias is None else y + self.bias
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * w, with the mean in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., size] -> [..., size]
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention; rotation, cache and mask are the business of `attend`."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        """layer: whose way of attending it has; negative ones count from the last layer."""
        super().__init__()
        self.head_dim = config.head_dim
        self.how = config.attention(layer)
        queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, queries, config.attention_bias)
        self.k_proj = Linear(config.hidden_size, keys, config.attention_bias)
        self.v_proj = Linear(config.hidden_size, keys, config.attention_bias)
        self.o_proj = Linear(queries, config.hidden_size, config.attention_output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def qkv(self, x: Tensor, heard: tuple[Tensor | int, Tensor | int] = (0, 0)) -> tuple[Tensor, Tensor, Tensor]:
        """[..., rows, hidden] -> queries, keys and values [..., rows, heads, head_dim], before any rotation.

        heard: what is added to keys and values, [..., rows, kv heads * head_dim].
        """
        projected = self.q_proj(x), self.k_proj(x) + heard[0], self.v_proj(x) + heard[1]
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def forward(self, x: Tensor, attend: Attend) -> Tensor:  # [..., rows, hidden] -> [..., rows, hidden]
        q, k, v = self.qkv(x)
        return self.o_proj(attend(q, k, v, self.how).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, config.mlp_bias)
        self.up_proj = Linear(hidden, inner, config.mlp_bias)
        self.down_proj = Linear(inner, hidden, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:  # [..., hidden] -> [..., hidden]
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:  # [..., rows, hidden] -> [..., rows, hidden]
        x = x + self.self_attn(self.input_layernorm(x), attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class LlamaModel(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LlamaForCausalLM(nn.Module):
    """The whole model. With tied embeddings `lm_head.weight` *is* `model.embed_tokens.weight`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = LlamaModel(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.tie()

    @classmethod
    def from_checkpoint(
        cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> "LlamaForCausalLM":
        """The module tree with a checkpoint's weights. Those whose dtype is already right stay mapped from the file."""
        with torch.device("meta"):
            model = cls(checkpoint.config)
        state = {name: from_numpy(tensor).to(device, dtype) for name, tensor in checkpoint.tensors.items()}
        model.load_state_dict(state, strict=False, assign=True)  # strict but for a tied LM head: Checkpoint has checked
        model.tie()
        return model.eval().requires_grad_(False)

    def tie(self) -> None:
        """Share the embedding with the LM head where the configuration says so (again after loading)."""
        if self.config.tie_word_embeddings:
            weight = self.model.embed_tokens.weight
            assert isinstance(weight, nn.Parameter)  # which torch's annotation does not say
            self.lm_head.weight = weight

    def forward_batch(self, ids: Tensor, rope: Rope, keep: Iterable[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Whole sequences at once, causally: the ordinary forward pass, for training, scoring and tests.

        ids: [batch, length]. Returns the hidden states after the final norm [batch, length, hidden] (apply `lm_head`
        to the rows you need) and, for each `layer` in `keep`, the hidden states after the first `layer` layers.
        Not row-invariant: decoding uses passes (ppsd_rt/reference/passes.py).
        """
        attend = causal_attention(rope.of_text(ids.shape[-1]))
        wanted = set(keep)
        x = self.model.embed_tokens(ids)
        kept = {0: x} if 0 in wanted else {}
        for number, layer in enumerate(self.model.layers, start=1):
            x = layer(x, attend)
            if number in wanted:
                kept[number] = x
        return self.model.norm(x), kept


def from_numpy(array: Array) -> Tensor:
    """A tensor on the same memory; uint16 are the bits of bfloat16."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def to_numpy(tensor: Tensor) -> Array:
    """An array on the same memory, bfloat16 as uint16."""
    return tensor.contiguous().view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def causal_attention(rope: Rope, keep: Callable[[Tensor, Tensor], None] | None = None) -> Attend:
    """attend() over whole sequences [batch, length, heads, head_dim] that begin at position 0.

    keep: hears of the rotated keys and of the values, [batch, kv heads, length, head_dim].
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, how: LayerAttention) -> Tensor:
        length = q.shape[-3]
        if how.rotary:
            q, k = rope.rotate(q, slice(0, length)), rope.rotate(k, slice(0, length))
        q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
        if keep is not None:
            keep(k, v)
        seen = None
        if how.window is not None and how.window < length:
            seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - how.window)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=True)
        return mixed.transpose(-3, -2)

    return attend
