"""benchmarks/memory.py on a shape that takes no time."""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.random_weights import SHAPES

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_random_model_loads_and_decodes(monkeypatch, tmp_path, kind):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    module = importlib.import_module("memory")
    config = replace(SHAPES["llama-2-13b"], vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    config = replace(config, num_attention_heads=8, num_key_value_heads=8, head_dim=32)
    module.write(tmp_path / "m.gguf", config, kind)
    checkpoint = Checkpoint(tmp_path / "m.gguf")
    weights = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    assert 0.01 < weights.std() < 0.05
    assert abs(weights.mean()) < 0.01
    assert checkpoint.parameters == 2 * 300 * 256 + 2 * 256 * (4 * 256 + 3 * 512 + 2) + 256
    assert checkpoint.stored_as == ["F32", kind]
    row = module.load(tmp_path / "m.gguf", "int4", 1, 4, 0.0)
    assert row["tokens_per_second"] > 0
    assert row["packed_gb"] < row["peak_gb_loaded"] <= row["peak_gb"]
