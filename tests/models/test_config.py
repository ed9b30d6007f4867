"""config.json -> LlamaConfig: what is read, and what is refused by name."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from support import tiny_config

from ppsd_rt.errors import PpsdError
from ppsd_rt.models.config import _RANGES, LayerAttention, LlamaConfig
from ppsd_rt.models.rope import Rope
from ppsd_rt.models.rotary import inverse_frequencies

FACTORS = ("factor", "low_freq_factor", "high_freq_factor")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
@pytest.mark.parametrize("named", [{}, {"eos_token_id": None, "bos_token_id": None}, {"eos_token_id": [3, -1, 9]}])
def test_where_answers_end_is_what_transformers_takes(model_type, named):
    transformers = pytest.importorskip("transformers")
    raw = {key: value for key, value in tiny_config().items() if not key.endswith("token_id")}
    raw |= {"model_type": model_type, "vocab_size": 200_000, **named}
    theirs = transformers.GenerationConfig.from_model_config(transformers.AutoConfig.for_model(**raw, pad_token_id=0))
    ends = theirs.eos_token_id if isinstance(theirs.eos_token_id, list) else [theirs.eos_token_id]
    ours = LlamaConfig.from_dict(raw)
    assert list(ours.eos_token_ids) == [end for end in ends if end is not None and end >= 0]
    assert ours.bos_token_id == theirs.bos_token_id


def scaled(**scaling):
    return {"rope_scaling": {"rope_type": "longrope", **scaling}}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        *(({"model_type": value}, "model_type") for value in ("gpt_neox", None, ["llama"])),
        ({"mlp_bias": "yes"}, "mlp_bias"),
        ({"model_type": "qwen3", "use_sliding_window": "yes"}, "use_sliding_window"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "layer_types"),  # no window is in use
        ({"model_type": "qwen2", "layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"] * 3}, "layer_types"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1]}, "no_rope_layers"),
        *((scaled(rope_type=kind), "rope_scaling: type") for kind in ("ntk", "x" * 5000)),
        *((scaled(rope_type=kind, factor=0.5), "rope_scaling: factor") for kind in ("linear", "dynamic", "yarn")),
        *((scaled(short_factor=some), "rope_scaling: short_factor") for some in (None, [0.0] * 8, [1.0] * 7)),
        (scaled(short_factor=[1.0] * 8), "rope_scaling: long_factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_parameters"),
        ({"rope_parameters": {}, "rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "rope_scaling: high_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        *(({"num_hidden_layers": value}, "num_hidden_layers") for value in (0, True, 2.0, "4", 10_000_000)),
        *(({"rms_norm_eps": value}, "rms_norm_eps") for value in (float("nan"), 1e-300)),
        ({"head_dim": 15}, "head_dim"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_refuses_by_name(changes, place):
    with pytest.raises(PpsdError) as caught:
        LlamaConfig.from_dict(tiny_config(**changes), where="config.json")
    line = str(caught.value)
    assert line.startswith(f"config.json: {place}")
    assert "\n" not in line and len(line) < 600


def extremes(name):
    """The ends of a field's range, and what is typical between them."""
    return [*_RANGES[name], 8.0]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 9 for i in range(8)],
    "long_factor": [1.5 * 2**i for i in range(8)],
    "original_max_position_embeddings": 32,
}
ROTATIONS = {
    "default, whatever else is said": {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 5e5}},
    "both keys, linear": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {"type": "linear", "factor": 4.0},
    },
    "both keys, yarn": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN},
    "llama3, no original length": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}},
    "llama3, two original lengths": {"rope_scaling": LLAMA3, "original_max_position_embeddings": 16},
    "yarn": {"rope_scaling": YARN},
    "yarn, two original lengths": {"rope_scaling": YARN, "original_max_position_embeddings": 16},
    "yarn, no factor": {"rope_scaling": {**YARN, "factor": None}},
    "yarn, attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.25}},
    "yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}},
    "yarn, betas, not truncated": {"rope_scaling": {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False}},
    "dynamic": {"max_position_embeddings": 32, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "longrope": {"rope_scaling": LONGROPE},
    "longrope, factor": {"rope_scaling": {**LONGROPE, "factor": 8.0}},
    "longrope, attention factor": {"rope_scaling": {**LONGROPE, "attention_factor": 1.5}},
}


@pytest.mark.parametrize("length", [32, 64, 128])
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_are_those_of_transformers(name, length):
    """At one, two and four times the length that the model was trained for."""
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaConfig as TheirConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = tiny_config(max_position_embeddings=128) | json.loads(json.dumps(ROTATIONS[name]))
    if "rope_parameters" in raw:
        del raw["rope_theta"]
    if name == "llama3, no original length":
        del raw["rope_scaling"]["original_max_position_embeddings"]
    config = LlamaConfig.from_dict(raw)
    cos, sin = LlamaRotaryEmbedding(TheirConfig(**raw))(torch.zeros(1), torch.arange(length)[None])
    rope = Rope(config, length).of_text(length)
    assert config.max_position_embeddings >= 64
    for ours, theirs in ((rope.cos, cos), (rope.sin, sin)):
        torch.testing.assert_close(ours, theirs[0, :, :8], rtol=1e-5, atol=2e-5)


def test_rows_after_the_prompt_are_rotated_as_they_are_decoded():
    """transformers rotates a prompt by its length, and each later row by the length that the text then has."""
    config = LlamaConfig.from_dict(tiny_config(**ROTATIONS["dynamic"]))
    rope = Rope(config, 60, text=40)
    for length, rows in ((40, slice(0, 40)), (51, slice(50, 51)), (60, slice(59, 60))):
        assert torch.equal(rope.cos[rows], Rope(config, 60, text=length).cos[rows])
    short = Rope(config, 60)
    assert torch.equal(short.cos[:32], Rope(config, 60, text=31).cos[:32])
    assert torch.equal(short.cos[40], Rope(config, 60, text=41).cos[40])


def test_everything_in_range_gives_frequencies_that_mean_something():
    """And no warnings of numpy: finite, above 0, at most 1, and so are the angles of the last position."""
    contexts = (1, 8192, 2**31 - 1)
    scalings = [None, *({"type": "linear", "factor": factor} for factor in extremes("factor"))]
    for factor, low, high, context in product(*map(extremes, FACTORS), contexts):
        if low < high:
            values = zip(FACTORS, (factor, low, high), strict=True)
            scalings.append({"type": "llama3", **dict(values), "original_max_position_embeddings": context})
    # So close that the rounding of the blend between them would be -46 933 at the first frequency.
    scalings.append({**LLAMA3, "low_freq_factor": 1303.797306937706, "high_freq_factor": 1303.7973069399818})
    for theta, scaling in product(extremes("rope_theta"), scalings):
        raw = tiny_config(rope_theta=theta, rope_scaling=scaling, head_dim=64, max_position_embeddings=2**31 - 1)
        config = LlamaConfig.from_dict(raw)
        with np.errstate(all="raise"):
            frequencies = inverse_frequencies(config)
            angles = frequencies * np.float32(config.max_position_embeddings)
        assert ((frequencies > 0) & (frequencies <= 1) & np.isfinite(angles)).all(), (theta, scaling)


SLIDES = {"use_sliding_window": True, "sliding_window": 8}
FULL, SLIDING = LayerAttention(), LayerAttention(True, 8)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "llama"}, ()),
        ({"model_type": "llama", **SLIDES, "layer_types": ["sliding_attention"] * 4}, ()),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral"}, (LayerAttention(True, 4096),) * 4),
        ({"model_type": "mistral", "sliding_window": 8}, (SLIDING,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, ()),
        ({"model_type": "qwen2", **SLIDES}, ()),  # from layer 28 on
        ({"model_type": "qwen3", **SLIDES, "max_window_layers": 2}, (FULL, FULL, SLIDING, SLIDING)),
        ({"model_type": "qwen3", **SLIDES, "max_window_layers": 0}, (SLIDING,) * 4),
        (
            {"model_type": "qwen3", **SLIDES, "layer_types": ["sliding_attention", *["full_attention"] * 3]},
            (SLIDING, FULL, FULL, FULL),
        ),
        ({"model_type": "smollm3"}, (FULL, FULL, FULL, LayerAttention(False))),
        ({"model_type": "smollm3", "no_rope_layer_interval": 9}, ()),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1, 1, 1, 0]}, (LayerAttention(False), FULL, FULL, FULL)),
        ({"model_type": "smollm3", **SLIDES}, (FULL, FULL, FULL, LayerAttention(False, 8))),
    ],
)
def test_how_each_layer_attends(changes, expected):
    config = LlamaConfig.from_dict(tiny_config(**changes))
    assert config.layer_attention == expected
    assert [config.attention(layer) for layer in range(-4, 4)] == list(expected or (FULL,) * 4) * 2


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_what_a_file_does_not_say_is_what_transformers_takes(model_type):
    transformers = pytest.importorskip("transformers")
    silent = ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "max_position_embeddings", "rms_norm_eps")
    raw = {key: value for key, value in tiny_config(model_type=model_type).items() if key not in silent}
    raw |= {"num_attention_heads": 32, "hidden_size": 512}
    ours = LlamaConfig.from_dict(raw)
    theirs = transformers.AutoConfig.for_model(**raw, pad_token_id=0)
    for name in ("num_key_value_heads", "tie_word_embeddings", "max_position_embeddings", "rms_norm_eps"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 512 // 32)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.qk_norm == (model_type == "qwen3")
    window = getattr(theirs, "sliding_window", None)
    assert [ours.attention(layer).window for layer in range(4)] == [window] * 4


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, {}, (2,)),
        ({}, {"eos_token_id": [7, -1, 10**9]}, (7,)),
        ({"eos_token_id": 10**30}, {}, ()),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (9,)),
        ({"eos_token_id": 5}, {"eos_token_id": [7, 5]}, (7, 5)),
        ({"eos_token_id": 5}, {"eos_token_id": -1}, (5,)),
    ],
)
def test_ids_that_no_token_has_end_nothing(tmp_path, config, generation, expected):
    raw = tiny_config()
    del raw["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps({**raw, **config}))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert LlamaConfig.from_folder(tmp_path).eos_token_ids == expected
