"""Which tensors a model or an exit head consists of, by the keys of its checkpoint."""

from collections.abc import Mapping
from typing import Any

from .config import LlamaConfig
from .files import unfit

Shapes = dict[str, tuple[int, ...]]


def model_shapes(config: LlamaConfig) -> Shapes:
    """Every tensor of a checkpoint, in the order of use; a tied LM head is not there."""
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for layer in range(config.num_hidden_layers):
        shapes |= layer_shapes(config, f"model.layers.{layer}.")
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def layer_shapes(config: LlamaConfig, prefix: str, *, mlp: bool = True) -> Shapes:
    """A decoder layer, or without the MLP the attention block of one."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes: Shapes = {"input_layernorm.weight": (hidden,)}
    for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        shapes[f"self_attn.{name}.weight"] = (outputs, hidden)
        if config.attention_bias:
            shapes[f"self_attn.{name}.bias"] = (outputs,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    shapes["self_attn.o_proj.weight"] = (hidden, queries)
    if config.attention_output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if mlp:
        shapes["post_attention_layernorm.weight"] = (hidden,)
        shapes |= {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)}
        shapes["mlp.down_proj.weight"] = (hidden, inner)
        if config.mlp_bias:
            shapes |= {"mlp.gate_proj.bias": (inner,), "mlp.up_proj.bias": (inner,), "mlp.down_proj.bias": (hidden,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def check_shapes(found: Mapping[str, Any], expected: Shapes, where: object) -> None:
    """Raises PpsdError that names the first tensor that is missing, of the wrong shape, or too many."""
    for name in {**expected, **found}:
        shape = tuple(found[name].shape) if name in found else "missing"
        if shape != expected.get(name):
            raise unfit(where, f"tensor {name}", shape, f"by its model's settings {expected.get(name, 'none')}")
