"""Random weights in well-known shapes: named like a model, drawn on the device that runs them."""

import pytest

from ppsd_rt import Engine, PpsdError, UsageError
from ppsd_rt.models.random_weights import SHAPES, RandomCheckpoint


def test_shapes_have_the_sizes_of_their_models():
    def parameters(config):
        hidden, inner = config.hidden_size, config.intermediate_size
        widths = config.num_attention_heads + 2 * config.num_key_value_heads
        layer = hidden * config.head_dim * (widths + config.num_attention_heads) + 3 * hidden * inner
        tables = 1 if config.tie_word_embeddings else 2
        return config.num_hidden_layers * layer + tables * config.vocab_size * hidden

    sizes = {name: round(parameters(config) / 1e6) for name, config in SHAPES.items()}
    assert sizes == {
        "smollm2-135m": 134, "llama-3.2-1b": 1236, "llama-3.1-8b": 8030, "llama-2-13b": 13015, "llama-2-70b": 68975,
    }  # fmt: skip


def test_what_cannot_be_made_is_refused():
    with pytest.raises(PpsdError, match="shapes to fill with random weights are smollm2-135m"):
        RandomCheckpoint("random:gpt-4")
    with pytest.raises(UsageError, match="use --backend cuda"):
        Engine.from_pretrained("random:llama-3.2-1b")
