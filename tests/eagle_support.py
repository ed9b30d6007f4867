"""Small EAGLE-3 heads with random weights, in both layouts that people publish. Needs numpy and safetensors alone: the
packages that they are compared with run in an environment of their own (tests/models/eagle3_golden.py)."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

HIDDEN, VOCABULARY, DRAFT = 64, 259, 48
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LAYER = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}

# name -> layout, settings of the layer, settings beside it; has the head an embedding, has it draft ids of its own?
CASES = {
    "safeailab": ("safeailab", {"rope_theta": 10000.0}, {}, False, True),
    "safeailab, all ids": ("safeailab", {"intermediate_size": 160}, {}, True, False),
    "speculators, llama": (
        "speculators",
        {"rope_parameters": LLAMA3},
        {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
        True,
        True,
    ),
    "speculators, qwen3": (
        "speculators",
        {"model_type": "qwen3", "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"fc_norm": True, "norm_output": True},
        False,
        True,
    ),
    "speculators, two layers": (
        "speculators",
        {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True},
        {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [0, 3]},
        False,
        True,
    ),
}


def config_of(case: str) -> dict[str, object]:
    """What config.json says."""
    layout, layer, beside, _, own_ids = CASES[case]
    draft = DRAFT if own_ids else VOCABULARY
    if layout == "safeailab":
        return {**LAYER, **layer, **beside, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": draft}
    return {
        **beside,
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "someone/tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": draft,
        "transformer_layer_config": {**LAYER, **layer},
    }


def draft_ids(case: str) -> np.ndarray:
    """[draft vocabulary], ascending."""
    if not CASES[case][4]:
        return np.arange(VOCABULARY)
    return np.sort(np.random.default_rng(5).choice(VOCABULARY, DRAFT, replace=False))


def tensors_of(case: str, seed: int = 0) -> dict[str, np.ndarray]:
    """As the layout names them."""
    layout, layer, beside, own_embedding, own_ids = CASES[case]
    sizes = {**LAYER, **layer}
    taps = len(beside.get("eagle_aux_hidden_state_layer_ids", [1, 2, 3]))
    hidden, inner, head = HIDDEN, sizes["intermediate_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    ids = draft_ids(case)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * hidden)}
    if beside.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * hidden,)
    if beside.get("fc_norm"):
        shapes |= {f"fc_norm.{tap}.weight": (hidden,) for tap in range(taps)}
    if own_embedding:
        shapes["embed_tokens.weight"] = (VOCABULARY, hidden)
    for number in range(sizes["num_hidden_layers"]):
        prefix = "midlayer." if layout == "safeailab" else f"layers.{number}."
        width = 2 * hidden if number == 0 else hidden
        own = {f"self_attn.{name}_proj": (size, width) for name, size in (("q", queries), ("k", keys), ("v", keys))}
        own |= {"self_attn.o_proj": (hidden, queries)}
        mlp = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
        for name, shape in {**own, **mlp}.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if sizes.get("attention_bias" if "attn" in name else "mlp_bias"):
                shapes[f"{prefix}{name}.bias"] = shape[:1]
        norms = ["input_layernorm", "post_attention_layernorm", *(["hidden_norm"] if number == 0 else [])]
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in norms}
        if sizes["model_type"] == "qwen3":
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (head,) for name in "qk"}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (len(ids), hidden)}
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = generator.standard_normal(shape, np.float32)
        tensors[name] = 1 + 0.1 * noise if "norm" in name else 0.15 * noise
    if own_ids:
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(VOCABULARY), ids)
    return tensors


def write_eagle3(folder: Path, case: str = "safeailab", seed: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(case)))
    save_file(tensors_of(case, seed), folder / "model.safetensors")
    return folder


def embedding() -> np.ndarray:
    """The model's, where the head has none: [vocabulary, hidden]."""
    return 0.15 * np.random.default_rng(99).standard_normal((VOCABULARY, HIDDEN), np.float32)


def contexts(case: str, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids [rows + 1], and hidden states at the taps [rows, taps * hidden] of all but the last of them."""
    taps = len(CASES[case][2].get("eagle_aux_hidden_state_layer_ids", [1, 2, 3]))
    generator = np.random.default_rng(len(case))
    made = []
    for _ in range(count):
        rows = int(generator.integers(1, 40))
        ids = generator.integers(0, VOCABULARY, rows + 1)
        made.append((ids, generator.standard_normal((rows, taps * HIDDEN), np.float32)))
    return made


def write_knowing(folder: Path, **shape: int) -> tuple[Path, Path]:
    """A model whose layers do little, and a head that is often right about it: it takes the model's final norm and LM
    head, and what these make of the token at hand. Features change it a little."""
    from support import tiny_model, write_model  # not where only golden values are made

    settings = {"tie_word_embeddings": False, **shape}
    model = tiny_model(**settings)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            parameter *= 0.02
    norm, lm_head = model.model.norm.weight.numpy(), model.lm_head.weight.numpy()
    tensors = tensors_of("speculators, llama")
    whole, half = np.eye(HIDDEN, dtype=np.float32), np.zeros((HIDDEN, HIDDEN), np.float32)
    own = {
        f"layers.0.self_attn.{name}_proj.weight": np.hstack([by * whole, half])
        for name, by in zip("qkv", (5, 5, 1), strict=True)
    }
    tensors |= own | {
        "layers.0.self_attn.o_proj.weight": whole,
        "layers.0.hidden_norm.weight": np.full(HIDDEN, 0.05, np.float32),
        "layers.0.input_layernorm.weight": np.ones(HIDDEN, np.float32),
        "layers.0.mlp.down_proj.weight": 0.01 * tensors["layers.0.mlp.down_proj.weight"],
        "norm.weight": norm,
        "lm_head.weight": lm_head,
    }
    for name in ("embed_tokens.weight", "d2t", "t2d"):
        del tensors[name]
    config = config_of("speculators, llama")
    layer = {**config["transformer_layer_config"], "num_key_value_heads": 4}
    (folder / "head").mkdir(parents=True)
    config = {**config, "draft_vocab_size": len(lm_head), "transformer_layer_config": layer}
    (folder / "head/config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "head/model.safetensors")
    return write_model(folder / "model", model, **settings), folder / "head"
