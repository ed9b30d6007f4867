"""GGUF files against what the file was made from: weights, configuration, token ids; and against damaged files.

The models are made here with the `gguf` package's writer, which is llama.cpp's own. Token ids are judged by
sentencepiece and by lists that llama.cpp gave for the same files.
"""

import io
import json
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
    as_folder,
    byte_vocabulary,
    gguf_name,
    interleaved,
    metadata,
    random_blocks,
    tiny_state,
    write_gguf,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer

from ppsd_rt.errors import PpsdError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.rotary import attention_factor, inverse_frequencies
from ppsd_rt.models.tokenizer import load_tokenizer


def converted(path: Path) -> Path:
    target = path.with_suffix("")
    as_folder(path, target)
    return target


def read(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / name).read_text(encoding="utf-8"))


def refusal(path: Path) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(PpsdError) as caught:
        load_tokenizer(path, sum(map(len, Checkpoint(path).tensors.values())))  # reads all of the file
    line = str(caught.value)
    assert str(path) in line
    assert "\n" not in line
    return line


# ---------------------------------------------------------------------------------------------------------------------
# Weights
# ---------------------------------------------------------------------------------------------------------------------


NORMS = {f"self_attn.{name}_norm.weight": 16 for name in "qk"}
MLP = {"mlp.gate_proj.bias": 96, "mlp.up_proj.bias": 96, "mlp.down_proj.bias": 64}
NARROW = {"heads": 2, "kv_heads": 1, "head_dim": 16}


@pytest.mark.parametrize(
    ("arch", "options", "vectors", "expected"),
    [
        ("llama", {}, {}, (False, False, False, False)),
        ("llama", {"tied": False, "bias": "qkvo"}, {}, (True, True, False, False)),
        ("llama", {"bias": "qkv"}, {}, (True, False, False, False)),
        ("llama", {}, MLP, (False, False, True, False)),
        ("llama", NARROW, {}, (False, False, False, False)),
        ("qwen2", {"tied": False, "bias": "qkv"}, {}, (True, False, False, False)),
        ("qwen3", {}, NORMS, (False, False, False, True)),
        ("smollm3", {}, {}, (False, False, False, False)),
    ],
)
def test_weights_come_back_bit_for_bit(tmp_path, arch, options, vectors, expected):
    """expected: biases of q, k and v, of the output, of the MLP; norms of heads."""
    state = tiny_state(**options)
    for layer in range(SIZES["layers"]):
        state |= {f"model.layers.{layer}.{name}": torch.randn(size) for name, size in vectors.items()}
    values = metadata(arch, **{name: size for name, size in options.items() if name in SIZES})
    folder = converted(write_gguf(tmp_path / "m.gguf", state, values))

    found = load_file(folder / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    config = Checkpoint(folder).config  # its tensors fit its config
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias, config.qk_norm) == expected
    assert (config.tie_word_embeddings, config.head_dim) == (options.get("tied", True), 16)


def test_smollm3_skips_every_fourth_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "layers", 5)
    config = Checkpoint(write_gguf(tmp_path / "m.gguf", values=metadata("smollm3"))).config
    assert [layer.rotary for layer in config.layer_attention] == [True, True, True, False, True]


@pytest.mark.parametrize(("kind", "dtype"), [(Kind.F16, torch.float16), (Kind.BF16, torch.bfloat16)])
def test_half_precision_files_lose_nothing(tmp_path: Path, kind: Kind, dtype: torch.dtype) -> None:
    state = {name: tensor.to(dtype).float() for name, tensor in tiny_state().items()}
    path = write_gguf(tmp_path / "m.gguf", state, kinds=lambda name: kind)

    wide = load_file(converted(path) / "model.safetensors")
    assert all(torch.equal(wide[name], state[name]) for name in state)


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, *TABLE_KINDS], ids=lambda kind: kind.name)
def test_quantised_weights_are_dequantised(tmp_path: Path, kind: Kind) -> None:
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


# ---------------------------------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------------------------------


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


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        {"general.architecture": "gemma"},
        {"general.type": "adapter"},
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
        *({"llama.rope.freq_base": value} for value in (float("inf"), "10000")),
        {"llama.block_count": 3},
        {"llama.attention.head_count_kv": [2, 1]},
        {"llama.rope.dimension_count": 8},
        {"llama.attention.value_length": 8},
        {"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 4.0},
        {"llama.attention.clamp_kqv": 8.0},
        {"llama.expert_count": 8},
        {"llama.attention.causal": False},
        {"split.count": 3.0},
        {"tokenizer.ggml.model": "t5"},
        {"tokenizer.ggml.pre": "bloom"},
        *({"tokenizer.ggml.tokens": tokens} for tokens in (byte_vocabulary()[:-1], ["a", *byte_vocabulary()[1:]])),
        {"tokenizer.ggml.token_type": [1, 2, 3]},
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, values: dict[str, Any]) -> None:
    line = refusal(path := write_gguf(tmp_path / "m.gguf", values=values))
    assert line.startswith(f"{path}: {next(iter(values))} is ")


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"llama.embedding_length": 65}, "tensor token_embd.weight"),
        ({"llama.attention.head_count": 8}, "llama.rope.dimension_count"),
        ({"llama.attention.head_count_kv": 3}, "num_key_value_heads"),
        ({"llama.rope.freq_base": 1e-30}, "rope_theta"),
        ({"split.count": 3}, "its name"),
        *(({"tokenizer.ggml.merges": [merge]}, "tokenizer.ggml.tokens or merges") for merge in ("ab", "he nosuch")),
        ({"general.alignment": 24}, "byte "),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, values: dict[str, Any], place: str) -> None:
    line = refusal(path := write_gguf(tmp_path / "m.gguf", values=values))
    assert line.startswith(f"{path}: {place}")


def with_tensor(name: str, data: np.ndarray, kind: Kind = Kind.F32) -> dict[str, tuple[np.ndarray, Kind]]:
    return {name: (data, kind)}


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (with_tensor("blk.0.ffn_gate_exps.weight", np.zeros((2, 96, 64), np.float32)), "blk.0.ffn_gate_exps.weight"),
        (with_tensor("blk.0.attn_q.bias", np.zeros(64, np.float32)), "blk.0.attn_k.bias"),
        (with_tensor("blk.1.attn_norm.weight", np.zeros(63, np.float32)), "blk.1.attn_norm.weight"),
        (with_tensor("rope_freqs.weight", np.zeros(8, np.float32)), "rope_freqs.weight"),
        (with_tensor("blk.0.ffn_gate.bias", np.zeros(96, np.float32)), "blk.0.ffn_up.bias"),
        (with_tensor("rope_freqs.weight", llama3_factors(8.0)[:-1]), "rope_freqs.weight"),
        (with_tensor("blk.0.ffn_up.weight", np.full((96, 64), np.nan, np.float32)), "blk.0.ffn_up.weight"),
        (with_tensor("blk.0.ffn_up.weight", np.zeros((96, 64), np.int32), Kind.I32), "'blk.0.ffn_up.weight'"),
    ],
)
def test_unknown_and_wrong_tensors_are_named(tmp_path, raw, name):
    assert f"tensor {name} is " in refusal(write_gguf(tmp_path / "m.gguf", raw=raw))


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    for missing in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        state = tiny_state(bias="qkvo")
        del state[missing]
        assert f"tensor {gguf_name(missing)} is missing" in refusal(write_gguf(tmp_path / "m.gguf", state))


def test_versions_and_byte_orders(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    content = path.read_bytes()
    for version in (1, 4, 3 << 24):
        path.write_bytes(content[:4] + struct.pack("<I", version) + content[8:])
        assert f"its version is {version}" in refusal(path)


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers
# ---------------------------------------------------------------------------------------------------------------------

# What llama.cpp (xllamacpp 2026.10) makes of tiny files like these, as tokens.
WORDS = "  hello    the\n\n\nthing  \n "
SPLITS = {
    WORDS: {
        "Ġ Ġ hello ĠĠ Ġ Ġthe ĊĊ Ċ t h ing ĠĠ Ċ Ġ": "smollm llama-bpe qwen2 gpt-2 default tekken seed-coder",
        "Ġ Ġ hello ĠĠ Ġ Ġthe Ċ Ċ Ċ t h ing ĠĠ Ċ Ġ": "deepseek-llm deepseek-coder",
    },
    "It's 'S I'S a's": {
        "I t 's Ġ ' S Ġ I ' S Ġ a 's": "smollm gpt-2",
        "I t 's Ġ ' S Ġ I 'S Ġ a 's": "llama-bpe qwen2 tekken seed-coder",
        "I t ' s Ġ ' S Ġ I ' S Ġ a ' s": "default deepseek-llm deepseek-coder",
    },
    "1 12 123 1234 12345": {
        "1 Ġ 1 2 Ġ 1 2 3 Ġ 1 2 3 4 Ġ 1 2 3 4 5": "smollm qwen2 tekken seed-coder deepseek-coder",
        "1 Ġ 12 Ġ 123 Ġ 123 4 Ġ 123 4 5": "llama-bpe default",
        "1 Ġ 12 Ġ 123 Ġ 1234 Ġ 1234 5": "gpt-2 deepseek-llm",
    },
    "f()\n!! !!!! $+<=>^~| c++ \u00bd": {
        "f () Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½": (
            "smollm gpt-2 default seed-coder deepseek-llm deepseek-coder"
        ),
        "f ( )Ċ !! Ġ !! !! Ġ $ + < = > ^ ~ | Ġ c ++ Ġ Â ½": "llama-bpe qwen2 tekken",
    },
}
RULES = ("smollm", "llama-bpe", "qwen2", "gpt-2", "default", "tekken", "seed-coder", "deepseek-llm", "deepseek-coder")

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


@pytest.mark.parametrize(
    ("pre", "rule"),
    [
        *((rule, rule) for rule in RULES),
        *(("deepseek-r1-qwen", "qwen2"), ("megrez", "qwen2"), ("kormo", "qwen2"), ("falcon3", "llama-bpe")),
        *(("pixtral", "llama-bpe"), ("midm-2.0", "llama-bpe"), ("llama3", "llama-bpe"), ("llama-v3", "llama-bpe")),
        *(("smaug-bpe", "llama-bpe"), ("phi-2", "gpt-2"), ("mellum", "gpt-2"), ("a.x-4.0", "gpt-2")),
        *(("starcoder", "smollm"), (None, "default")),
    ],
)
def test_byte_level_ids_are_llama_cpps(tmp_path, pre, rule, caplog):
    with caplog.at_level("INFO", "ppsd_rt"):
        tokenizer = tokenizer_of(converted(write_gguf(tmp_path / "m.gguf", values={"tokenizer.ggml.pre": pre})))
    for text, found in SPLITS.items():
        encoding = tokenizer.encode(text, add_special_tokens=False)
        assert rule in found[" ".join(encoding.tokens)].split()
        assert tokenizer.decode(encoding.ids) == text
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
def test_where_answers_end_is_what_llama_cpp_says(tmp_path, texts, stated, expected):
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
    assert "tokenizer.ggml.eos_token_id is missing" in refusal(write_gguf(tmp_path / "m.gguf", values=values))


FREQUENCIES = 100000.0 ** -(np.arange(8) / 8)


@pytest.mark.parametrize(
    ("values", "raw", "divided_by", "grown_by"),
    [
        ({}, {"rope_freqs.weight": llama3_factors(16.0)}, llama3_factors(16.0), 1.0),
        ({}, {"rope_freqs.weight": np.ones(8, np.float32)}, np.ones(8), 1.0),
        ({"type": "linear", "factor": 4.0}, {}, 4 * np.ones(8), 1.0),
        ({"factor": 2.0}, {"rope_freqs.weight": llama3_factors(8.0)}, 2 * llama3_factors(8.0), 1.0),
        ({"factor": 2.0, "type": "none"}, {"rope_freqs.weight": llama3_factors(8.0)}, llama3_factors(8.0), 1.0),
        ({"attn_factor": 1.5}, {}, np.ones(8), 1.5),
        ({"type": "longrope", "attn_factor": 1.2}, {"rope_factors_short.weight": np.full(8, 3.0, np.float32)}, 3, 1.2),
    ],
)
def test_rotations_are_as_llama_cpp_computes_them(tmp_path, values, raw, divided_by, grown_by):
    path = write_gguf(
        tmp_path / "m.gguf",
        values={f"llama.rope.scaling.{name}": value for name, value in values.items()},
        raw={name: (data, Kind.F32) for name, data in raw.items()},
    )
    for config in (Checkpoint(path).config, LlamaConfig.from_folder(converted(path))):
        np.testing.assert_allclose(inverse_frequencies(config), FREQUENCIES / divided_by, rtol=2e-5)
        assert attention_factor(config) == pytest.approx(grown_by)


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
def test_bos_and_eos_are_added_where_the_file_says_so(tmp_path, values, expected):
    folder = converted(write_gguf(tmp_path / "m.gguf", values=values))
    assert tokenizer_of(folder).encode("a").tokens == expected
    assert tokenizer_of(folder).encode("a", add_special_tokens=False).tokens == ["a"]


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
    for name, scores in (("a", [-1000.0] * size), ("b", [float("nan")] * size)):
        path = sentencepiece_gguf(tmp_path / f"{name}.gguf", model, {"tokenizer.ggml.scores": scores})
        assert "tokenizer.ggml.scores is " in refusal(path)


# ---------------------------------------------------------------------------------------------------------------------
# The default model
# ---------------------------------------------------------------------------------------------------------------------


def test_default_model_ids_are_llama_cpps(default_folder: Path) -> None:
    tokenizer = tokenizer_of(default_folder)
    for text, numbers in DEFAULT_MODEL_IDS.items():
        assert tokenizer.encode(text).ids == ids_of(numbers)
        assert tokenizer.decode(ids_of(numbers), skip_special_tokens=False) == text
