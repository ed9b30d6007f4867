"""The torch baseline computes what the model says: its step, uncompiled, against the reference's plain decoding."""

import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from support import tiny_model

from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.rope import Rope

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_baseline.py"


def load():
    spec = importlib.util.spec_from_file_location("gpu_baseline", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "tie_word_embeddings": False}])
def test_a_step_is_the_models(changes):
    model = tiny_model(**changes)
    weights = DeviceWeights.build(model.config, lambda name: model.state_dict()[name], "float32", "cpu")
    decoder = load().Decoder(weights, 32, lambda function: function)
    decoder.token.fill_(7)
    ids = [7]
    for _ in range(12):
        decoder.step()
        ids.append(int(decoder.token))
    hidden, _ = model.forward_batch(torch.tensor([ids[:-1]]), Rope(model.config, 32))
    assert model.lm_head(hidden)[0].argmax(-1).tolist() == ids[1:]
    assert len(set(ids)) > 3


def test_int8_weights_are_near(capsys):
    model = tiny_model()
    weights = DeviceWeights.build(model.config, lambda name: model.state_dict()[name], "int8", "cpu")
    weight = weights.layers[0].out
    x = torch.randn(1, weight.inputs)
    per_output = weight._replace(scales=weight.scales[:, :1].contiguous())
    expected = x @ (per_output.values.float() * per_output.scales.float()).t()
    assert torch.allclose(load().product(x, per_output), expected, atol=1e-4)


def test_transformers_answers_with_a_model_of_the_same_shape():
    pytest.importorskip("transformers")
    told = load().measure_transformers(tiny_model().config, torch.float32, "cpu", 5, 3)
    assert told["transformers_tokens"] == 3
    assert told["transformers_milliseconds_per_token"] > 0
