"""Every key that a reference knows stands in docs/reference/file-formats.md, and what stands there is true."""

import dataclasses
import inspect
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_support import metadata, write_gguf
from support import tiny_config

from ppsd_rt.errors import PpsdError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.config import LlamaConfig

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def documented() -> dict[str, dict[str, list[str]]]:
    """file -> what becomes of it -> keys, some with a `*`."""
    text = (ROOT / "docs" / "reference" / "file-formats.md").read_text(encoding="utf-8")
    rows = re.search(r"\n## Keys\n(.*?)\n## ", text, re.DOTALL)
    assert rows is not None
    found: dict[str, dict[str, list[str]]] = {}
    for line in rows[1].splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and cells[0].strip("`") not in ("file", "---"):
            found.setdefault(cells[0].strip("`"), {})[cells[1]] = re.findall("`([^`]+)`", cells[2])
    return found


def config_keys() -> set[str]:
    configs = [transformers.AutoConfig.for_model(family) for family in FAMILIES]
    fields = {field.name for config in configs for field in dataclasses.fields(config)}
    return fields | {key for config in configs for key in config.to_dict()}


def tokenizer_keys() -> set[str]:
    """What the constructor of all tokenizers takes out of tokenizer_config.json, and the tokens with names."""
    base = transformers.tokenization_utils_base.PreTrainedTokenizerBase
    source = inspect.getsource(base.__init__)
    popped = set(re.findall(r"kwargs\.pop\(\s*\"(\w+)\"", source)) | set(re.findall(r"\"(\w+)\" in kwargs", source))
    return {*base.SPECIAL_TOKENS_ATTRIBUTES, *popped, "added_tokens_decoder", "extra_special_tokens", "chat_template"}


def gguf_keys() -> set[str]:
    def walk(group: type) -> list[str]:
        values = [value for name, value in vars(group).items() if not name.startswith("_")]
        return [key for value in values for key in (walk(value) if isinstance(value, type) else [value])]

    return {key for key in walk(gguf.constants.Keys) if isinstance(key, str)}


REFERENCES = {
    "config.json": config_keys,
    "rope_parameters": lambda: set(transformers.modeling_rope_utils.RopeParameters.__annotations__),
    "generation_config.json": lambda: set(transformers.GenerationConfig().to_dict()),
    "tokenizer_config.json": tokenizer_keys,
    "GGUF": gguf_keys,
}


@pytest.mark.parametrize("file", REFERENCES)
def test_every_key_of_a_reference_is_listed(file: str) -> None:
    patterns = [pattern for keys in documented()[file].values() for pattern in keys]
    missing = sorted(key for key in REFERENCES[file]() if not any(fnmatchcase(key, pattern) for pattern in patterns))
    assert missing == []
    assert len(set(patterns)) == len(patterns)


SLIDES = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "short_factor": [2.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# key -> what else the file says, and a value that changes the configuration or is refused
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    **{key: ({}, 2) for key in ("num_hidden_layers", "num_attention_heads", "eos_token_id", "bos_token_id")},
    **{key: ({}, 32) for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")},
    **{key: ({}, True) for key in ("attention_bias", "mlp_bias")},
    "model_type": ({}, "qwen2"),
    "num_key_value_heads": ({}, 4),
    "max_position_embeddings": ({}, 64),
    "original_max_position_embeddings": ({"rope_scaling": YARN}, 128),
    "rms_norm_eps": ({}, 1e-3),
    "rope_theta": ({}, 5e5),
    "rope_scaling": ({}, YARN),
    "rope_parameters": ({}, YARN),
    "tie_word_embeddings": ({}, False),
    "no_rope_layers": ({"model_type": "smollm3"}, [0, 1, 1, 1]),
    "no_rope_layer_interval": ({"model_type": "smollm3"}, 2),
    "layer_types": ({"model_type": "qwen2", **SLIDES}, ["full_attention"] * 4),
    "sliding_window": ({"model_type": "qwen2", **SLIDES}, 9),
    "use_sliding_window": ({"model_type": "qwen2", **SLIDES}, False),
    "max_window_layers": ({"model_type": "qwen2", **SLIDES}, 2),
}
IN_FOLDERS = {"quantization_config", "compression_config"}  # see test_quantised.py
ROTATIONS: dict[str, tuple[dict[str, Any], Any]] = {
    "rope_type": (YARN, "linear"),
    "type": ({"factor": 2.0}, "linear"),
    "rope_theta": (YARN, 5e5),
    "factor": (YARN, 2.0),
    "low_freq_factor": (LLAMA3, 2.0),
    "high_freq_factor": (LLAMA3, 3.0),
    "original_max_position_embeddings": (YARN, 32),
    "attention_factor": (LONG, 1.5),
    "beta_fast": (YARN, 8.0),
    "beta_slow": (YARN, 2.0),
    "mscale": ({**YARN, "mscale_all_dim": 0.5}, 0.8),
    "mscale_all_dim": ({**YARN, "mscale": 0.5}, 0.8),
    "truncate": (YARN, False),
    "short_factor": (LONG, [1.0] * 8),
    "long_factor": (LONG, [1.0] * 8),
}


def test_keys_that_are_used_change_something() -> None:
    assert set(CHANGES) | IN_FOLDERS == set(documented()["config.json"]["used"])
    for key, (others, value) in CHANGES.items():
        raw = tiny_config(**others)
        assert LlamaConfig.from_dict({**raw, key: value}) != LlamaConfig.from_dict(raw), key
    assert set(ROTATIONS) == set(documented()["rope_parameters"]["used"])
    for key, (section, value) in ROTATIONS.items():
        before, after = (
            LlamaConfig.from_dict(tiny_config(rope_parameters=rotation))
            for rotation in (section, {**section, key: value})
        )
        assert before != after, key


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_of_config_json_without_effect(family: str) -> None:
    raw = tiny_config(model_type=family)
    expected = LlamaConfig.from_dict(raw)
    for key in documented()["config.json"]["without effect"]:
        for value in ("anything", 0.5, 3, [7], None):
            assert LlamaConfig.from_dict({**raw, key: value}) == expected, key
    section = {"rope_type": "linear", "factor": 2.0}
    expected = LlamaConfig.from_dict({**raw, "rope_parameters": section})
    for key in documented()["rope_parameters"]["without effect"]:
        assert LlamaConfig.from_dict({**raw, "rope_parameters": {**section, key: [1, 2]}}) == expected, key


def test_keys_of_config_json_that_are_refused() -> None:
    values = {"hidden_act": "gelu", "num_experts": 8, "num_local_experts": 8}
    assert set(values) == set(documented()["config.json"]["refused"])
    for key, value in values.items():
        with pytest.raises(PpsdError, match=f"config.json: {key} is {value!r}"):
            LlamaConfig.from_dict(tiny_config(**{key: value}))
    assert documented()["rope_parameters"]["refused"] == ["partial_rotary_factor"]
    with pytest.raises(PpsdError, match="partial_rotary_factor"):
        LlamaConfig.from_dict(
            tiny_config(rope_parameters={"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5})
        )


def test_keys_of_generation_config_without_effect(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    expected = LlamaConfig.from_folder(tmp_path)
    others = {
        key: 7 for state, keys in documented()["generation_config.json"].items() if state != "used" for key in keys
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(others))
    assert LlamaConfig.from_folder(tmp_path) == expected


def test_keys_of_gguf_without_effect(tmp_path: Path) -> None:
    states = documented()["GGUF"]
    used = {*states["used"], *states["refused"]}
    known = {key for key in gguf_keys() if not any(fnmatchcase(key, pattern) for pattern in used)}
    values: dict[str, Any] = {}
    for key in sorted(known):
        name = key.replace("{arch}", "llama").replace("{id}", "0").replace("{name}", "x").replace("{dense}", "dense_2")
        values[name] = 3
    plain, changed = write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf", values=values)
    assert len(values) > 150
    assert Checkpoint(changed).config == Checkpoint(plain).config


def test_keys_of_gguf_that_are_refused(tmp_path: Path) -> None:
    neutral = {"{arch}.attention.causal": False}
    for key in documented()["GGUF"]["refused"]:
        name = key.replace("{arch}", "llama")
        path = write_gguf(
            tmp_path / "m.gguf", values={**metadata(), name: neutral.get(key, 2.0 if "attention" in key else 2)}
        )
        with pytest.raises(PpsdError, match=re.escape(f"{name} is ")):
            Checkpoint(path)
