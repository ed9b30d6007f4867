"""GGUF import against what the file was made from: weights, configuration, token ids; and against damaged files.

The models are made here with the `gguf` package's writer, which is llama.cpp's own. Token ids are judged by
sentencepiece and by lists that llama.cpp gave for the same files.
"""

import errno
import hashlib
import io
import itertools
import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_support import (
    BLOCK_KINDS,
    SIZES,
    TABLE_KINDS,
    byte_vocabulary,
    gguf_name,
    interleaved,
    metadata,
    random_blocks,
    tiny_state,
    write_gguf,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.models import gguf_import
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.gguf_import import convert_gguf
from ppsd_rt.models.rotary import attention_factor, inverse_frequencies
from ppsd_rt.models.tokenizer import load_tokenizer


def converted(path: Path, **options: Any) -> Path:
    target = path.with_suffix("")
    convert_gguf(path, target, **options)
    return target


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def refusal(path: Path, **options: Any) -> str:
    """The one line with which a file is refused; nothing may be left behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(PpsdError) as caught:
        convert_gguf(path, path.with_suffix(".out"), **options)
    line = str(caught.value)
    assert str(path) in line
    assert "\n" not in line
    assert sorted(path.parent.iterdir()) == before
    return line


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", ["", "qkvo"])
@pytest.mark.parametrize("tied", [True, False])
def test_llama_weights_come_back_bit_for_bit(tmp_path: Path, tied: bool, bias: str) -> None:
    state = tiny_state(tied=tied, bias=bias)
    folder = converted(write_gguf(tmp_path / "m.gguf", state))

    found = load_file(folder / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    config = LlamaConfig.from_folder(folder)
    assert config.tie_word_embeddings == tied
    assert config.attention_bias == config.attention_output_bias == bool(bias)


def test_qwen2_weights_keep_their_row_order(tmp_path: Path) -> None:
    state = tiny_state(bias="qkv", tied=False)
    values = metadata("qwen2") | {"tokenizer.ggml.pre": "qwen2"}
    folder = converted(write_gguf(tmp_path / "m.gguf", state, values))

    found = load_file(folder / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert read(folder, "config.json")["architectures"] == ["Qwen2ForCausalLM"]
    config = LlamaConfig.from_folder(folder)
    assert (config.attention_bias, config.attention_output_bias) == (True, False)


def test_qwen3_weights_keep_their_row_order_and_have_norms_of_heads(tmp_path: Path) -> None:
    state = tiny_state()
    for layer in range(SIZES["layers"]):
        for name in "qk":
            state[f"model.layers.{layer}.self_attn.{name}_norm.weight"] = torch.randn(SIZES["head_dim"])
    values = {**metadata("qwen3"), "tokenizer.ggml.pre": "qwen2", "qwen3.attention.key_length": SIZES["head_dim"]}
    folder = converted(write_gguf(tmp_path / "m.gguf", state, values))

    found = load_file(folder / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    checkpoint = Checkpoint(folder)  # its tensors fit its config
    assert checkpoint.config.qk_norm
    assert (checkpoint.config.attention_bias, checkpoint.config.layer_attention) == (False, ())

    del state["model.layers.1.self_attn.k_norm.weight"]
    assert "'blk.1.attn_k_norm.weight' is missing" in refusal(write_gguf(tmp_path / "n.gguf", state, values))


def test_smollm3_skips_every_fourth_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "layers", 5)
    state = tiny_state()
    values = {**metadata("smollm3"), "tokenizer.ggml.pre": "smaug-bpe"}
    folder = converted(write_gguf(tmp_path / "m.gguf", state, values))

    found = load_file(folder / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    config = Checkpoint(folder).config
    assert [layer.rotary for layer in config.layer_attention] == [True, True, True, False, True]
    assert config.tie_word_embeddings
    tokenizer = tokenizer_of(folder)
    for text, expected in SPLITS.items():
        assert " ".join(tokenizer.encode(text, add_special_tokens=False).tokens) == expected["llama-bpe"]


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)])
def test_half_precision_files_lose_nothing(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype).float() for name, tensor in tiny_state().items()}
    path = write_gguf(tmp_path / "m.gguf", state, kinds=lambda name: kind)

    wide = load_file(converted(path) / "model.safetensors")
    assert all(torch.equal(wide[name], state[name]) for name in state)
    convert_gguf(path, tmp_path / "half", dtype=str(dtype).removeprefix("torch."))
    narrow = load_file(tmp_path / "half" / "model.safetensors")
    assert all(torch.equal(narrow[name], state[name].to(dtype)) for name in state)
    assert read(tmp_path / "half", "config.json")["torch_dtype"] == str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_to_nearest_even(tmp_path: Path, dtype: str) -> None:
    state = tiny_state()
    # Every distance of two neighbours in 16 bits, ties included: the low half of the float32 bits runs through.
    bits = np.arange(64 * 64, dtype=np.uint32) * 16 + 0x3F800000
    state["model.layers.0.self_attn.o_proj.weight"] = torch.from_numpy(bits.view(np.float32).reshape(64, 64).copy())
    folder = converted(write_gguf(tmp_path / "m.gguf", state), dtype=dtype)

    found = load_file(folder / "model.safetensors")
    assert all(torch.equal(found[name], state[name].to(getattr(torch, dtype))) for name in state)


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, *TABLE_KINDS], ids=lambda kind: kind.name)
def test_quantised_weights_are_dequantised(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_import, "_BLOCK_BYTES", 7 * 4 * 256)  # many blocks for each tensor, the last one short
    changes = {"hidden": 256, "inner": 256, "head_dim": 16}
    state = tiny_state(**changes)
    raw = {
        gguf_name(key): (random_blocks(kind, len(tensor), 256, seed), kind)
        for seed, (key, tensor) in enumerate(state.items())
        if tensor.dim() == 2 and tensor.shape[1] == 256
    }
    folder = converted(write_gguf(tmp_path / "m.gguf", state, metadata(**changes), raw=raw))

    found = load_file(folder / "model.safetensors")
    for key, tensor in found.items():
        if gguf_name(key) not in raw:
            assert torch.equal(tensor, state[key])
            continue
        expected = torch.from_numpy(gguf.quants.dequantize(*raw[gguf_name(key)]))
        if "q_proj" in key or "k_proj" in key:
            tensor = interleaved(tensor, 16)
        assert torch.equal(tensor, expected)
    assert len(raw) == 2 * 6 + 1


def test_q4_1_and_q8_0_are_what_their_blocks_say(tmp_path: Path) -> None:
    """The default model's two types, computed from their definition: d * q + m, and d * q."""
    state = tiny_state()
    q4_1, q8_0 = random_blocks(Kind.Q4_1, 64, 64, seed=1), random_blocks(Kind.Q8_0, 64, 96, seed=2)
    raw = {"blk.0.attn_output.weight": (q4_1, Kind.Q4_1), "blk.1.ffn_down.weight": (q8_0, Kind.Q8_0)}
    found = load_file(converted(write_gguf(tmp_path / "m.gguf", state, raw=raw)) / "model.safetensors")

    for row in range(64):
        values: list[float] = []
        for block in q4_1[row].reshape(-1, 20):
            scale, least = (float(x) for x in block[:4].view(np.float16))
            halves = [[byte & 15 for byte in block[4:]], [byte >> 4 for byte in block[4:]]]
            values += [np.float32(scale) * np.float32(q) + np.float32(least) for half in halves for q in half]
        assert found["model.layers.0.self_attn.o_proj.weight"][row].tolist() == [float(x) for x in values]
        values = []
        for block in q8_0[row].reshape(-1, 34):
            scale = float(block[:2].view(np.float16)[0])
            values += [scale * int(q) for q in block[2:].view(np.int8)]
        assert found["model.layers.1.mlp.down_proj.weight"][row].tolist() == values


def test_shards_hold_the_same_as_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", state := tiny_state(tied=False))
    monkeypatch.setattr(gguf_import, "_SHARD_BYTES", 100_000)
    folder = converted(path)

    index = read(folder, "model.safetensors.index.json")
    shards = sorted({*index["weight_map"].values()})
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert sorted(p.name for p in folder.glob("*.safetensors")) == shards
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    for shard in shards:
        found = load_file(folder / shard)
        assert sum(tensor.nbytes for tensor in found.values()) <= 100_000
        assert found.keys() == {name for name, place in index["weight_map"].items() if place == shard}
        assert all(torch.equal(tensor, state[name]) for name, tensor in found.items())


def test_same_input_gives_the_same_bytes_and_progress_ends_at_the_total(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", state := tiny_state())
    seen: list[tuple[int, int]] = []
    convert_gguf(path, tmp_path / "one", progress=lambda done, total: seen.append((done, total)))
    (tmp_path / "two").mkdir()  # an empty folder may be there already
    convert_gguf(path, tmp_path / "two")

    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    described = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert names == sorted([*described, "model.safetensors"])
    assert all((tmp_path / "one" / n).read_bytes() == (tmp_path / "two" / n).read_bytes() for n in names)
    total = sum(tensor.nbytes for tensor in state.values())
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {total}
    assert seen[-1] == (total, total)


def test_interruption_leaves_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")

    def interrupt(done: int, total: int) -> None:
        assert done < total
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(path, tmp_path / "out", progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


# ---------------------------------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------------------------------


def test_config_is_what_the_file_says(tmp_path: Path) -> None:
    values = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.eom_token_id": 2}
    folder = converted(write_gguf(tmp_path / "m.gguf", values=values))
    assert read(folder, "config.json") == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(byte_vocabulary()),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert read(folder, "generation_config.json") == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 0}
    assert read(folder, "tokenizer_config.json") == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": "{{ messages[0]['content'] }}",
    }


def test_head_width_need_not_be_hidden_over_heads(tmp_path: Path) -> None:
    changes = {"heads": 2, "kv_heads": 1, "head_dim": 16}
    state = tiny_state(**changes)
    for number, stated in enumerate([{}, {"llama.attention.key_length": 16, "llama.attention.value_length": 16}]):
        folder = converted(write_gguf(tmp_path / f"m{number}.gguf", state, metadata(**changes) | stated))
        assert read(folder, "config.json")["head_dim"] == 16
        found = load_file(folder / "model.safetensors")
        assert all(torch.equal(found[name], state[name]) for name in state)


def test_absent_kv_heads_and_rope_base_take_llama_cpp_defaults(tmp_path: Path) -> None:
    values = metadata(kv_heads=4) | {"llama.attention.head_count_kv": None, "llama.rope.freq_base": None}
    values["llama.rope.dimension_count"] = None
    config = read(converted(write_gguf(tmp_path / "m.gguf", tiny_state(kv_heads=4), values)), "config.json")
    assert (config["num_key_value_heads"], config["rope_theta"], config["head_dim"]) == (4, 10000.0, 16)


def llama3_factors(factor: float, head_dim: int = 16, theta: float = 100000.0) -> np.ndarray:
    """As llama.cpp's converter computes them, frequency by frequency."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192 / 1:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_scaling_is_recovered(tmp_path: Path, factor: float) -> None:
    raw = {"rope_freqs.weight": (llama3_factors(factor), Kind.F32)}
    folder = converted(write_gguf(tmp_path / "m.gguf", raw=raw))
    assert read(folder, "config.json")["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "values",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_rope_scaling(tmp_path: Path, values: dict[str, Any]) -> None:
    config = read(converted(write_gguf(tmp_path / "m.gguf", values=values)), "config.json")
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------

WITHOUT = sorted(
    metadata().keys()
    - {"general.architecture", "llama.attention.head_count_kv", "llama.rope.freq_base", "llama.rope.dimension_count"}
    - {"tokenizer.ggml.bos_token_id", "tokenizer.ggml.padding_token_id", "tokenizer.chat_template"}
    - {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.pre", "tokenizer.ggml.token_type"}
)


@pytest.mark.parametrize("key", WITHOUT)
def test_missing_metadata_is_named(tmp_path: Path, key: str) -> None:
    assert f"the metadata lacks {key}" in refusal(write_gguf(tmp_path / "m.gguf", values={key: None}))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon = nan"),
        ({"llama.rope.freq_base": float("inf")}, "freq_base = inf"),
        ({"llama.rope.freq_base": "10000"}, "freq_base is of the wrong type (str)"),
        ({"llama.block_count": 3}, "3 layers are announced"),
        ({"llama.block_count": 2**31 - 1}, "2147483647 layers are announced"),
        ({"llama.embedding_length": 65}, "shape"),
        ({"llama.attention.head_count": 8}, "partial rotary"),
        ({"llama.attention.head_count_kv": 3}, "cannot share 3"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv differs from layer to layer"),
        ({"llama.rope.dimension_count": 8}, "rotary embedding of 8 of 16 dimensions"),
        ({"llama.attention.value_length": 8}, "value_length differs"),
        ({"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 4.0}, "'dynamic' is not supported"),
        ({"llama.attention.clamp_kqv": 8.0}, "clamps queries, keys and values"),
        ({"general.type": "adapter"}, "this is a LoRA adapter, not a model"),
        ({"general.type": "mmproj"}, "a file of the type 'mmproj', not a model"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.attention.causal": False}, "both directions"),
        ({"split.count": 3.0}, "split.count is of the wrong type (float)"),
        ({"split.count": 3}, "one of the 3 parts of a split model, which must be called NAME-00001-of-00003.gguf"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer model 't5' is not supported"),
        ({"tokenizer.ggml.pre": "bloom"}, "pre-tokenizer 'bloom' is not supported"),
        ({"tokenizer.ggml.tokens": byte_vocabulary()[:-1]}, "the embedding has"),
        ({"tokenizer.ggml.tokens": ["a", *byte_vocabulary()[1:]]}, "'a' is in the vocabulary twice"),
        ({"tokenizer.ggml.token_type": [1, 2, 3]}, "has 3 entries"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab' does not name two tokens"),
        ({"tokenizer.ggml.merges": ["he nosuch"]}, "do not fit together"),
        ({"general.alignment": 24}, "not a power of two"),
        ({"llama.rope.freq_base": 1e-30}, "m.gguf: rope_theta must be a number from 1 to 1e+15, not 1e-30"),
        ({"llama.rope.scale_linear": 1e-30}, "m.gguf: rope_scaling: factor must be a number from 1 to 1e+06"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, values: dict[str, Any], expected: str) -> None:
    assert expected in refusal(write_gguf(tmp_path / "m.gguf", values=values))


def test_architecture_is_named(tmp_path: Path) -> None:
    assert "architecture 'gemma' is not supported" in refusal(write_gguf(tmp_path / "m.gguf", values=metadata("gemma")))


def with_tensor(name: str, data: np.ndarray, kind: Kind = Kind.F32) -> dict[str, tuple[np.ndarray, Kind]]:
    return {name: (data, kind)}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (with_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 96, 64), np.float32)), "'blk.0.ffn_gate_exps.weight'"),
        (with_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32)), "'blk.0.attn_k.bias' is missing"),
        (with_tensor("blk.1.attn_norm.weight", np.zeros(63, np.float32)), "shape (63,), expected (64,)"),
        (with_tensor("output_norm.weight", np.zeros((64, 1), np.float32)), "shape (64, 1), expected (64,)"),
        (with_tensor("rope_freqs.weight", np.zeros(8, np.float32)), "factors that are not positive numbers"),
        (with_tensor("blk.0.attn_output.bias", np.zeros(64, np.float32)), "'blk.1.attn_output.bias' is missing"),
        (with_tensor("blk.0.ffn_gate.bias", np.zeros(96, np.float32)), "'blk.0.ffn_up.bias' is missing"),
        (with_tensor("rope_freqs.weight", llama3_factors(8.0)[:-1]), "shape (7,), expected (8,)"),
        (with_tensor("blk.0.ffn_up.weight", np.full((96, 64), np.nan, np.float32)), "'blk.0.ffn_up.weight' holds NaN"),
        (with_tensor("blk.0.ffn_up.weight", np.zeros((96, 36), np.uint8), Kind.NVFP4), "has type NVFP4"),
        (with_tensor("blk.0.ffn_up.weight", np.zeros((96, 64), np.int32), Kind.I32), "has type I32"),
    ],
)
def test_unknown_and_wrong_tensors_are_named(
    tmp_path: Path, raw: dict[str, tuple[np.ndarray, Kind]], expected: str
) -> None:
    assert expected in refusal(write_gguf(tmp_path / "m.gguf", raw=raw))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    for missing in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        state = tiny_state(bias="qkvo")
        del state[missing]
        assert f"{gguf_name(missing)!r} is missing" in refusal(write_gguf(tmp_path / "m.gguf", state))


def test_value_that_the_dtype_cannot_hold(tmp_path: Path) -> None:
    state = tiny_state()
    state["model.norm.weight"][3] = -70000.0
    path = write_gguf(tmp_path / "m.gguf", state)
    assert "'output_norm.weight' holds 70000, too large for float16" in refusal(path, dtype="float16")
    assert load_file(converted(path, dtype="bfloat16") / "model.safetensors")["model.norm.weight"][3] == -70144.0


def test_unknown_dtype_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="int8"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", dtype="int8")


def test_target_in_use_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "keep").touch()
    for occupied in (tmp_path / "folder", path):
        with pytest.raises(PpsdError, match="already exists"):
            convert_gguf(path, occupied)
    assert [p.name for p in (tmp_path / "folder").iterdir()] == ["keep"]


def test_files_that_are_no_gguf(tmp_path: Path) -> None:
    for content in (b"", b"GGU", b"PK\x03\x04" * 9):
        (tmp_path / "m.gguf").write_bytes(content)
        assert "is not a GGUF file" in refusal(tmp_path / "m.gguf")
    assert "does not exist" in refusal(tmp_path / "absent.gguf")
    assert "is not a file" in refusal(tmp_path)


def test_versions_and_byte_orders(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    for version, expected in ((1, "GGUF version 1"), (4, "GGUF version 4"), (3 << 24, "big-endian")):
        path.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
        assert expected in refusal(path)


def test_full_disk_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(gguf_import.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(PpsdError, match="make room"):
        convert_gguf(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    def full(done: int, total: int) -> None:
        if done > total // 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    line = refusal(write_gguf(tmp_path / "m.gguf"), progress=full)
    assert "No space left on device" in line
    assert "another place" in line


# ---------------------------------------------------------------------------------------------------------------------
# Damaged files
# ---------------------------------------------------------------------------------------------------------------------


def small_gguf(path: Path) -> tuple[bytes, int]:
    """The bytes of a file with one small layer, and where its tensors' data begins."""
    sizes = {"hidden": 32, "inner": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "layers": 1}
    path = write_gguf(path, tiny_state(**sizes), metadata(**sizes), kinds=lambda name: Kind.Q8_0)
    return path.read_bytes(), min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    content, data = small_gguf(path)
    for length in [*range(400), *range(400, data + 64, 37), *range(data, len(content), 997), len(content) - 1]:
        path.write_bytes(content[:length])
        refusal(path)


@pytest.mark.parametrize("huge", [2**20, 2**31, 2**40, 2**63, 2**64 - 1])
def test_absurd_counts_cost_neither_memory_nor_time(tmp_path: Path, huge: int) -> None:
    path = tmp_path / "m.gguf"
    content, _ = small_gguf(path)
    places = {"tensors": 8, "keys": 16, "first key's length": 24}
    for key in (b"tokenizer.ggml.tokens", b"tokenizer.ggml.token_type", b"tokenizer.ggml.merges"):
        places[key.decode()] = content.index(key) + len(key) + 8  # past the types array and string or int32
    name = b"blk.0.ffn_up.weight"
    places["tensor name"] = content.index(name) - 8
    places["tensor dimension"] = content.index(name) + len(name) + 4
    places["tensor offset"] = content.index(name) + len(name) + 4 + 2 * 8 + 4
    for what, place in places.items():
        path.write_bytes(content[:place] + struct.pack("<Q", huge) + content[place + 8 :])
        line = refusal(path)
        assert "announces" in line or "length" in what or "tensor " in what


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers
# ---------------------------------------------------------------------------------------------------------------------

# What llama.cpp (xllamacpp 2026.10) makes of tiny files like these, as tokens.
WORDS = "  hello    the\n\n\nthing  \n "
SPLITS = {
    WORDS: {
        "smollm": "Ġ Ġ hello ĠĠ Ġ Ġthe ĊĊ Ċ t h ing ĠĠ Ċ Ġ",
        "llama-bpe": "Ġ Ġ hello ĠĠ Ġ Ġthe ĊĊ Ċ t h ing ĠĠ Ċ Ġ",
        "qwen2": "Ġ Ġ hello ĠĠ Ġ Ġthe ĊĊ Ċ t h ing ĠĠ Ċ Ġ",
        "gpt-2": "Ġ Ġ hello ĠĠ Ġ Ġthe ĊĊ Ċ t h ing ĠĠ Ċ Ġ",
        "default": "Ġ Ġ hello ĠĠ Ġ Ġthe ĊĊ Ċ t h ing ĠĠ Ċ Ġ",
        "tekken": "Ġ Ġ hello ĠĠ Ġ Ġthe ĊĊ Ċ t h ing ĠĠ Ċ Ġ",
        "seed-coder": "Ġ Ġ hello ĠĠ Ġ Ġthe ĊĊ Ċ t h ing ĠĠ Ċ Ġ",
        "deepseek-llm": "Ġ Ġ hello ĠĠ Ġ Ġthe Ċ Ċ Ċ t h ing ĠĠ Ċ Ġ",
        "deepseek-coder": "Ġ Ġ hello ĠĠ Ġ Ġthe Ċ Ċ Ċ t h ing ĠĠ Ċ Ġ",
    },
    "It's 'S I'S a's": {
        "smollm": "I t 's Ġ ' S Ġ I ' S Ġ a 's",
        "llama-bpe": "I t 's Ġ ' S Ġ I 'S Ġ a 's",
        "qwen2": "I t 's Ġ ' S Ġ I 'S Ġ a 's",
        "gpt-2": "I t 's Ġ ' S Ġ I ' S Ġ a 's",
        "default": "I t ' s Ġ ' S Ġ I ' S Ġ a ' s",
        "tekken": "I t 's Ġ ' S Ġ I 'S Ġ a 's",
        "seed-coder": "I t 's Ġ ' S Ġ I 'S Ġ a 's",
        "deepseek-llm": "I t ' s Ġ ' S Ġ I ' S Ġ a ' s",
        "deepseek-coder": "I t ' s Ġ ' S Ġ I ' S Ġ a ' s",
    },
    "1 12 123 1234 12345": {
        "smollm": "1 Ġ 1 2 Ġ 1 2 3 Ġ 1 2 3 4 Ġ 1 2 3 4 5",
        "llama-bpe": "1 Ġ 12 Ġ 123 Ġ 123 4 Ġ 123 4 5",
        "qwen2": "1 Ġ 1 2 Ġ 1 2 3 Ġ 1 2 3 4 Ġ 1 2 3 4 5",
        "gpt-2": "1 Ġ 12 Ġ 123 Ġ 1234 Ġ 1234 5",
        "default": "1 Ġ 12 Ġ 123 Ġ 123 4 Ġ 123 4 5",
        "tekken": "1 Ġ 1 2 Ġ 1 2 3 Ġ 1 2 3 4 Ġ 1 2 3 4 5",
        "seed-coder": "1 Ġ 1 2 Ġ 1 2 3 Ġ 1 2 3 4 Ġ 1 2 3 4 5",
        "deepseek-llm": "1 Ġ 12 Ġ 123 Ġ 1234 Ġ 1234 5",
        "deepseek-coder": "1 Ġ 1 2 Ġ 1 2 3 Ġ 1 2 3 4 Ġ 1 2 3 4 5",
    },
    "f()\n!! !!!! $+<=>^~| c++ \u00bd": {
        "smollm": "f () Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½",
        "llama-bpe": "f ( )Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½",
        "qwen2": "f ( )Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½",
        "gpt-2": "f () Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½",
        "default": "f () Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½",
        "tekken": "f ( )Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½",
        "seed-coder": "f () Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½",
        "deepseek-llm": "f () Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½",
        "deepseek-coder": "f () Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½",
    },
}

# The same of the default model, as ids.
DEFAULT_MODEL_IDS = {
    "": "",
    " ": "216",
    "hello the thing": "28120 260 2775",
    WORDS: "216 33662 333 260 1116 198 1884 256 3805",
    "\t\r\n\r\n x": "197 18682 1792",
    "It's 'S I'S a's": "1589 506 637 67 339 23 67 253 506",
    "1 12 123 3.14": "33 216 33 34 216 33 34 35 216 35 30 33 36",
    "def f(x):\n    return x + 1  # ok\n": "1604 275 24 104 727 472 1003 1792 1232 216 33 216 907 10907 198",
    "a<|im_start|>user\nhello<|im_end|><think> x": "81 1 4093 198 28120 2 44 17400 46 1792",
    "\u00a0x\u2003y\u3000z\u200b\x00\x7f": "15442 104 321 221 105 12109 218 106 321 229 190 217",
    "f()\n!! !!!! ++ $+<=>^~| c++ \u00bd \u0663": (
        "86 1000 198 10095 5728 29646 1232 27 1885 27 44 45 46 78 110 108 265 11444 216 16738 216 164 113"
    ),
    "é e\u0301 日本語 ไทย हिन्दी עברית": (
        "2756 297 151 219 17097 241 115 40993 179 120 248 216 31933 222 10283 241 10283 112 12335 "
        "134 27011 30658 16525 44757 37189 12960 112 37657 30825 28532 120"
    ),
    "😀👩\u200d👩\u200d👧 🇫🇷": (
        "10813 242 218 10813 235 119 321 231 10813 235 119 321 231 10813 235 117 15107 225 121 10813 225 132"
    ),
}


def ids_of(numbers: str) -> list[int]:
    return [int(number) for number in numbers.split()]


def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("pre", SPLITS[WORDS])
def test_byte_level_ids_are_llama_cpps(tmp_path: Path, pre: str) -> None:
    tokenizer = tokenizer_of(converted(write_gguf(tmp_path / "m.gguf", values={"tokenizer.ggml.pre": pre})))
    for text, expected in SPLITS.items():
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert " ".join(encoding.tokens) == expected[pre]
        assert tokenizer.decode(encoding.ids) == text


@pytest.mark.parametrize(
    ("pre", "rule"),
    [
        *(("deepseek-r1-qwen", "qwen2"), ("megrez", "qwen2"), ("kormo", "qwen2"), ("falcon3", "llama-bpe")),
        *(("pixtral", "llama-bpe"), ("midm-2.0", "llama-bpe"), ("llama3", "llama-bpe"), ("llama-v3", "llama-bpe")),
        *(("smaug-bpe", "llama-bpe"), ("phi-2", "gpt-2"), ("mellum", "gpt-2"), ("a.x-4.0", "gpt-2")),
        *(("starcoder", "smollm"), (None, "default")),
    ],
)
def test_names_of_the_same_rule(tmp_path: Path, pre: str | None, rule: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ppsd_rt"):
        tokenizer = tokenizer_of(converted(write_gguf(tmp_path / "m.gguf", values={"tokenizer.ggml.pre": pre})))
    for text, expected in SPLITS.items():
        assert " ".join(tokenizer.encode(text, add_special_tokens=False).tokens) == expected[rule]
    assert ("names no pre-tokenizer" in caplog.text) == (pre is None)


LLAMA3_ENDS = ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")


@pytest.mark.parametrize(
    ("texts", "stated", "expected"),
    [
        # What llama_vocab_is_eog of llama.cpp says, of a file with these control tokens from id 0 on.
        (LLAMA3_ENDS, {"eos": 0}, [0, 1, 2]),
        (("<|im_end|>", "<|endoftext|>", "<|im_start|>"), {"eos": 0}, [0, 1]),
        (("<|im_end|>", "<|endoftext|>", "<|im_start|>"), {"eos": 1}, [1, 0]),
        (("<｜end▁of▁sentence｜>", "a1", "a2"), {"eos": 1}, [1, 0]),
        (("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"), {"eos": 3}, [3, 0, 1, 2]),
        (("<|fim_pad|>", "<|fim_prefix|>", "<|file_sep|>"), {"eos": 3, "fim_pad": 1}, [3, 1, 2]),
        (("a0", "a1", "a2"), {"eos": 2, "eot": 0, "eom": 2**32 - 1}, [2, 0]),
        (("<|end|>", "<|return|>", "<|call|>"), {"eos": 1}, [1, 2]),
        (("</s>", "<|tool_response>", "a2"), {"eos": 1}, [1]),
        (("</s>", "<end_of_turn>", "a2"), {}, [0, 1]),
    ],
)
def test_where_answers_end_is_what_llama_cpp_says(
    tmp_path: Path, texts: tuple[str, ...], stated: dict[str, int], expected: list[int]
) -> None:
    values: dict[str, Any] = {
        "tokenizer.ggml.tokens": [*texts, "<other>", *byte_vocabulary()[4:]],
        "tokenizer.ggml.eos_token_id": None,
        **{f"tokenizer.ggml.{name}_token_id": id for name, id in stated.items()},
    }
    path = write_gguf(tmp_path / "m.gguf", values=values)
    assert list(Checkpoint(path).config.eos_token_ids) == expected
    tokenizer = load_tokenizer(path)
    assert tokenizer.special_ids >= set(expected)  # whatever type the file gives them
    assert list(LlamaConfig.from_folder(converted(path)).eos_token_ids) == expected


def test_a_text_without_an_end_is_refused(tmp_path: Path) -> None:
    vocabulary = ["<a>", "<b>", "<c>", *byte_vocabulary()[3:]]
    values = {"tokenizer.ggml.tokens": vocabulary, "tokenizer.ggml.eos_token_id": 2**32 - 1}
    assert "the text would have no end" in refusal(write_gguf(tmp_path / "m.gguf", values=values))


def test_ids_that_nobody_needs(tmp_path: Path) -> None:
    """2^32 - 1 is a way to say none; a token for padding is never used."""
    none = {f"tokenizer.ggml.{name}_token_id": 2**32 - 1 for name in ("bos", "padding", "unknown", "eot", "seperator")}
    path = write_gguf(tmp_path / "m.gguf", values={**none, "tokenizer.ggml.add_bos_token": True})
    config = read(converted(path), "config.json")
    assert config["eos_token_id"] == [2, 0]
    assert "bos_token_id" not in config
    assert "pad_token_id" not in config
    assert tokenizer_of(converted(path.rename(tmp_path / "n.gguf"))).encode("a").tokens == ["a"]


def test_metadata_that_llama_cpp_accepts(tmp_path: Path) -> None:
    values = {
        "llama.attention.head_count": [4, 4],
        "llama.attention.head_count_kv": [2, 2],
        "llama.feed_forward_length": [96, 96],
        "llama.rope.scaling.factor": 0.0,
        "llama.attention.sliding_window": 128,
        "tokenizer.ggml.token_type": None,
    }
    plain, changed = write_gguf(tmp_path / "a.gguf"), write_gguf(tmp_path / "b.gguf", values=values)
    assert Checkpoint(plain).config == Checkpoint(changed).config


@pytest.mark.parametrize("mlp", [False, True])
def test_biases_of_any_part(tmp_path: Path, mlp: bool) -> None:
    """Biases of q, k and v alone, as Qwen2 has them, and of gate, up and down."""
    state = tiny_state(bias="" if mlp else "qkv")
    if mlp:
        for layer in range(SIZES["layers"]):
            for name, size in (("gate", SIZES["inner"]), ("up", SIZES["inner"]), ("down", SIZES["hidden"])):
                state[f"model.layers.{layer}.mlp.{name}_proj.bias"] = torch.randn(size)
    folder = converted(write_gguf(tmp_path / "m.gguf", state))
    found = load_file(folder / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    config = Checkpoint(folder).config
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (not mlp, False, mlp)


FREQUENCIES = 100000.0 ** -(np.arange(8) / 8)


@pytest.mark.parametrize(
    ("values", "raw", "divided_by", "grown_by"),
    [
        ({}, {"rope_freqs.weight": llama3_factors(16.0)}, llama3_factors(16.0), 1.0),
        ({}, {"rope_freqs.weight": np.ones(8, np.float32)}, np.ones(8), 1.0),
        ({"factor": 2.0}, {"rope_freqs.weight": llama3_factors(8.0)}, 2 * llama3_factors(8.0), 1.0),
        ({"factor": 2.0, "type": "none"}, {"rope_freqs.weight": llama3_factors(8.0)}, llama3_factors(8.0), 1.0),
        ({"attn_factor": 1.5}, {}, np.ones(8), 1.5),
        ({"type": "longrope", "attn_factor": 1.2}, {"rope_factors_short.weight": np.full(8, 3.0, np.float32)}, 3, 1.2),
    ],
)
def test_rotations_are_as_llama_cpp_computes_them(
    tmp_path: Path, values: dict[str, Any], raw: dict[str, np.ndarray], divided_by: Any, grown_by: float
) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        values={f"llama.rope.scaling.{name}": value for name, value in values.items()},
        raw={name: (data, Kind.F32) for name, data in raw.items()},
    )
    for config in (Checkpoint(path).config, LlamaConfig.from_folder(converted(path))):
        np.testing.assert_allclose(inverse_frequencies(config), FREQUENCIES / divided_by, rtol=2e-5)
        assert attention_factor(config) == pytest.approx(grown_by)


def test_yarn_is_transformers(tmp_path: Path) -> None:
    """Of a file that llama.cpp's converter makes of such a config.json; the two agree on the formula."""
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 16.0}
    values = {f"llama.rope.scaling.{name}": value for name, value in scaling.items()}
    config = Checkpoint(write_gguf(tmp_path / "m.gguf", values=values)).config
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16.0}
    raw = read(converted(tmp_path / "m.gguf"), "config.json")
    expected = LlamaConfig.from_dict({**raw, "rope_scaling": yarn})
    assert inverse_frequencies(config).tolist() == inverse_frequencies(expected).tolist()
    assert attention_factor(config) == pytest.approx(attention_factor(expected)) == pytest.approx(1 + 0.1 * np.log(4))


@pytest.mark.parametrize(("pre", "composes"), [("qwen2", True), ("smollm", False)])
def test_only_qwen2_composes_characters(tmp_path: Path, pre: str, composes: bool) -> None:
    tokenizer = tokenizer_of(converted(write_gguf(tmp_path / "m.gguf", values={"tokenizer.ggml.pre": pre})))
    assert (tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids) == composes


@pytest.mark.parametrize(("pre", "tokens"), [("llama-bpe", ["xyz"]), ("smollm", ["x", "y", "z"])])
def test_only_llama3_takes_whole_words_without_merges(tmp_path: Path, pre: str, tokens: list[str]) -> None:
    vocabulary = [*byte_vocabulary(), "xyz"]
    state = tiny_state()
    state["model.embed_tokens.weight"] = torch.randn(len(vocabulary), 64)
    values = {
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [1] * len(vocabulary),
    }
    tokenizer = tokenizer_of(converted(write_gguf(tmp_path / "m.gguf", state, values)))
    assert tokenizer.encode("xyz", add_special_tokens=False).tokens == tokens


def test_special_and_user_defined_tokens(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(converted(write_gguf(tmp_path / "m.gguf")))
    ids = tokenizer.encode("a<|im_start|><think>!<|im_end|>").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["a", "<|im_start|>", "<think>", "!", "<|im_end|>"]
    assert ids[1:3] == [1, 3]
    assert tokenizer.decode(ids) == "a<think>!"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_start|><think>!<|im_end|>"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, ["a"]),
        ({"tokenizer.ggml.add_bos_token": True}, ["<|im_start|>", "a"]),
        ({"tokenizer.ggml.add_eos_token": True}, ["a", "<|im_end|>"]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, ["<|im_start|>", "a"]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, ["a"]),
    ],
)
def test_bos_and_eos_are_added_where_the_file_says_so(
    tmp_path: Path, values: dict[str, Any], expected: list[str]
) -> None:
    folder = converted(write_gguf(tmp_path / "m.gguf", values=values))
    assert tokenizer_of(folder).encode("a").tokens == expected
    assert tokenizer_of(folder).encode("a", add_special_tokens=False).tokens == ["a"]
    assert read(folder, "tokenizer_config.json")["add_bos_token"] == (expected[0] == "<|im_start|>")


def sentencepiece_model(prefix: bool) -> sentencepiece.SentencePieceProcessor:
    """Trained on this file and on runs, with Llama's settings: byte fallback, no normalisation, pieces of spaces."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, *["aaaaa aa  aaaaaaa    b"] * 30]),
        model_writer=model,
        vocab_size=800,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=prefix,
        split_digits=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_gguf(path: Path, model: sentencepiece.SentencePieceProcessor, values: dict[str, Any]) -> Path:
    ids = range(model.get_piece_size())
    state = tiny_state()
    state["model.embed_tokens.weight"] = torch.zeros(len(ids), 64)
    kinds = [(model.is_unknown, 2), (model.is_control, 3), (model.is_byte, 6)]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for test, kind in kinds if test(i)), 1) for i in ids],
        "tokenizer.ggml.unknown_token_id": 0,
        **values,
    }
    return write_gguf(path, state, values)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_sentencepieces(tmp_path: Path, prefix: bool) -> None:
    model = sentencepiece_model(prefix)
    values = {} if prefix else {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = tokenizer_of(converted(sentencepiece_gguf(tmp_path / "m.gguf", model, values)))

    rng = random.Random(0)
    fragments = [*"aaab   \n\t0123.,'()", "test", " the", "é", "e\u0301", "日", "😀", "\u00a0", "▁", "\x00"]
    texts = [text for text in DEFAULT_MODEL_IDS if "<|" not in text]
    texts += ["".join(rng.choices(fragments, k=rng.randint(1, 50))) for _ in range(1000)]
    assert len({piece for text in texts for piece in model.encode(text)}) > 100
    for text in texts:
        ids = model.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.encode(text).ids == [1, *ids]  # BOS unless the file says otherwise
        assert tokenizer.decode(ids) == model.decode(ids)
    assert tokenizer.encode("a<s>b", add_special_tokens=False).tokens.count("<s>") == 1


def test_letters_never_merge_into_a_byte_token(tmp_path: Path) -> None:
    pieces = ["<", "0", "x", "A", ">", "▁", "0x", "<0x", "0A", "<0x0A"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    state = tiny_state()
    state["model.embed_tokens.weight"] = torch.zeros(len(tokens), 64)
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
    }
    tokenizer = tokenizer_of(converted(write_gguf(tmp_path / "m.gguf", state, values)))
    assert tokenizer.encode("<0x0A>\n", add_special_tokens=False).tokens == ["▁", "<0x0A", ">", "<0x0A>"]


def test_sentencepiece_files_that_cannot_be_recovered(tmp_path: Path) -> None:
    model = sentencepiece_model(prefix=True)
    size = model.get_piece_size()
    path = sentencepiece_gguf(tmp_path / "a.gguf", model, {"tokenizer.ggml.scores": [-1000.0] * size})
    assert "all tokens have the same score" in refusal(path)
    tokens = [model.id_to_piece(i).replace("<0x0A>", "newline") for i in range(size)]
    path = sentencepiece_gguf(tmp_path / "b.gguf", model, {"tokenizer.ggml.tokens": tokens})
    assert "lacks the byte token <0x0A>" in refusal(path)
    path = sentencepiece_gguf(tmp_path / "c.gguf", model, {"tokenizer.ggml.scores": [float("nan")] * size})
    assert "tokenizer.ggml.scores holds NaN" in refusal(path)


# ---------------------------------------------------------------------------------------------------------------------
# The default model
# ---------------------------------------------------------------------------------------------------------------------


def test_default_model_ids_are_llama_cpps(default_folder: Path) -> None:
    tokenizer = tokenizer_of(default_folder)
    for text, numbers in DEFAULT_MODEL_IDS.items():
        assert tokenizer.encode(text).ids == ids_of(numbers)
        assert tokenizer.decode(ids_of(numbers), skip_special_tokens=False) == text


def test_default_model_ids_follow_from_its_merges(default_folder: Path) -> None:
    """Byte-pair encoding straight from its definition, on random text."""
    model = read(default_folder, "tokenizer.json")["model"]
    ranks = {tuple(merge): rank for rank, merge in enumerate(model["merges"])}
    tokenizer = tokenizer_of(default_folder)
    rng = random.Random(0)
    fragments = [*"abc ABC  \n\t012'.,!?-_é中😀½\u00a0пر", "'s", "'re", "ing", " the", "日本", "\r\n"]
    for _ in range(400):
        text = "".join(rng.choices(fragments, k=rng.randint(1, 40)))
        tokens = [token for word in split_like_smollm(text) for token in merged(word, ranks)]
        assert tokenizer.encode(text).ids == [model["vocab"][token] for token in tokens]


def split_like_smollm(text: str) -> list[str]:
    """Single digits, then GPT-2's words: contractions, runs of letters or of signs with one space in front, spaces."""
    words: list[str] = []
    parts = "".join(f"\0{c}\0" if c.isnumeric() else c for c in text).split("\0")
    for part in filter(None, parts):
        at = 0
        while at < len(part):
            words.append(next_word(part, at))
            at += len(words[-1])
    return words


def next_word(part: str, at: int) -> str:
    for contraction in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
        if part.startswith(contraction, at):
            return contraction
    start = at + 1 if part[at] == " " and at + 1 < len(part) else at
    for kind in (str.isalpha, str.isnumeric, lambda c: not (c.isalpha() or c.isnumeric() or c.isspace())):
        end = start
        while end < len(part) and kind(part[end]):
            end += 1
        if end > start:
            return part[at:end]
    end = at
    while end < len(part) and part[end].isspace():
        end += 1
    return part[at : end - 1] if end < len(part) and end - at > 1 else part[at:end]


def merged(word: str, ranks: dict[tuple[str, ...], int]) -> list[str]:
    (spelled,) = (token for token, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(word))
    symbols = list(spelled)
    while True:
        pairs = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(symbols)) if pair in ranks]
        if not pairs:
            return symbols
        _, i = min(pairs)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def test_transformers_reads_the_default_model(default_folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the judge of this test")
    config = transformers.AutoConfig.from_pretrained(default_folder)
    shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.num_key_value_heads)
    assert shape == (30, 576, 9, 3)
    assert (config.intermediate_size, config.vocab_size, config.tie_word_embeddings) == (1536, 49152, True)
    assert (config.rms_norm_eps, config.bos_token_id, config.eos_token_id) == (1e-5, 1, [2, 0, 4])

    tokenizer = transformers.AutoTokenizer.from_pretrained(default_folder)
    assert all(tokenizer(text)["input_ids"] == ids_of(numbers) for text, numbers in DEFAULT_MODEL_IDS.items())
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_default_model_weights_are_those_that_transformers_reads(default_folder: Path) -> None:
    """The digest of all names and float32 values as transformers' own GGUF loader (5.23) gives them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(default_folder / "model.safetensors").items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert digest.hexdigest() == "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"
