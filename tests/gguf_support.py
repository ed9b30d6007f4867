"""Tiny models as GGUF files, written with the `gguf` package's writer, which is llama.cpp's own."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type
from tokenizers import pre_tokenizers

from ppsd_rt.models.config import LlamaConfig, model_shapes

_EXPORT = Path(__file__).parents[1] / "benchmarks" / "export_gguf.py"


def as_folder(path: Path, folder: Path) -> None:
    """The model of a .gguf file as a folder that other programs read."""
    runpy.run_path(str(_EXPORT))["as_folder"](path, folder)


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>")
MERGES = [
    *("h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he", "i n", "in g", "' s", "' S", "Ġ Ġ", "ĠĠ ĠĠ", "Ċ Ċ", "č Ċ"),
    *("1 2", "12 3", "123 4", "Ġ 1", "Ġ1 2", "! !", ") Ċ", "Ġ !", "Ã ©", "( )", "e Ì", "+ +", "a '"),
]


def byte_vocabulary() -> list[str]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]


SIZES = {"hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2}


def tiny_state(seed: int = 0, *, tied: bool = True, bias: str = "", **changes: int) -> dict[str, torch.Tensor]:
    """Random weights under Hugging Face's names; `bias`: the projections that have one, "qkv" or "qkvo"."""
    sizes = {**SIZES, **changes}
    config = LlamaConfig(
        vocab_size=len(byte_vocabulary()),
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["inner"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        attention_bias=bool(bias),
        attention_output_bias="o" in bias,
    )
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in model_shapes(config).items()}


_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 64)
MATRICES = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")


def gguf_name(key: str) -> str:
    name = _NAMES.get_name(key, (".weight", ".bias"))
    assert name is not None
    return name


def interleaved(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The rows as llama.cpp stores them for `llama`: the two halves of each head become neighbours."""
    rows = []
    for head in range(0, len(tensor), head_dim):
        for i in range(head_dim // 2):
            rows += [tensor[head + i], tensor[head + head_dim // 2 + i]]
    return torch.stack(rows)


def metadata(arch: str = "llama", **changes: int) -> dict[str, Any]:
    """Key -> value as llama.cpp's converter writes it; ints are uint32, floats float32."""
    sizes = {**SIZES, **changes}
    vocabulary = byte_vocabulary()
    return {
        "general.architecture": arch,
        f"{arch}.block_count": sizes["layers"],
        f"{arch}.context_length": 512,
        f"{arch}.embedding_length": sizes["hidden"],
        f"{arch}.feed_forward_length": sizes["inner"],
        f"{arch}.attention.head_count": sizes["heads"],
        f"{arch}.attention.head_count_kv": sizes["kv_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 100000.0,
        f"{arch}.rope.dimension_count": sizes["head_dim"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(vocabulary) - 4),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        kinds = {str: Type.STRING, bool: Type.BOOL, int: Type.UINT32, float: Type.FLOAT32}
        writer.add_key_value(key, value, kinds[type(value)])


def write_gguf(
    path: Path,
    state: dict[str, torch.Tensor] | None = None,
    values: dict[str, Any] | None = None,
    *,
    kinds: Callable[[str], Kind] = lambda name: Kind.F32,
    raw: dict[str, tuple[np.ndarray, Kind]] | None = None,
    tensors_of_a_part: int = 0,
) -> Path:
    """A file of `state`, in llama.cpp's row order. A value of None drops its key; `raw` tensors go in as they are.

    tensors_of_a_part: the model is split into parts of so many tensors, and NAME-00001-of-... are written instead.
    """
    values = metadata() | (values or {})
    state = tiny_state() if state is None else state
    tensors: dict[str, tuple[np.ndarray, Kind]] = {}
    for key, tensor in state.items():
        if values["general.architecture"] in ("llama", "smollm3") and ("q_proj" in key or "k_proj" in key):
            tensor = interleaved(tensor, SIZES["head_dim"])
        name = gguf_name(key)
        kind = kinds(name) if tensor.dim() == 2 else Kind.F32
        tensors[name] = (gguf.quants.quantize(tensor.numpy(), kind), kind)
    tensors |= raw or {}

    writer = gguf.GGUFWriter(path, values["general.architecture"], split_max_tensors=tensors_of_a_part)
    for key, value in values.items():
        if value is not None and key != "general.architecture":
            add_value(writer, key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_blocks(kind: Kind, rows: int, columns: int, seed: int) -> np.ndarray:
    """Any bytes are a block; only the scales have to be numbers: float16 with an exponent that is not all ones."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(seed).integers(0, 256, (rows, columns // block, size), np.uint8)
    if kind == Kind.MXFP4:  # of which the scale is a power of two
        data[:, :, 0] = 120 + data[:, :, 0] % 16
        return data.reshape(rows, -1)
    at = {Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q6_K: (208,), Kind.TQ1_0: (52,), Kind.TQ2_0: (64,)}
    both = (Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K)
    for place in at.get(kind, (0, 2) if kind in both else (0,)):
        data[:, :, place + 1] = data[:, :, place + 1] & 0b10111111
    return data.reshape(rows, -1)


BLOCK_KINDS = [
    *(Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K),
    *(Kind.IQ4_NL, Kind.IQ4_XS),
]
TABLE_KINDS = [
    *(Kind.IQ1_S, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S, Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4)
]


OWN = (Kind.Q4_0, Kind.Q4_1, Kind.Q4_K)
WIDE = {"hidden": 256, "inner": 512, "heads": 4, "kv_heads": 2, "head_dim": 64}  # Q4_K has blocks of 256


def own_bits(kind, rows, columns, seed=0):
    """Blocks whose weights are about as large as a model's."""
    if kind == Kind.Q6_K:
        data = random_blocks(kind, rows, columns, seed).reshape(rows, -1, 210)
        scales = np.random.default_rng(seed).uniform(1e-5, 2e-5, (rows, columns // 256, 1))
        data[:, :, 208:] = scales.astype(np.float16).view(np.uint8)
        return data.reshape(rows, -1)
    if kind == Kind.Q4_K:
        data = random_blocks(kind, rows, columns, seed).reshape(rows, -1, 144)
        scales = np.random.default_rng(seed).uniform(0.5, 1.0, (rows, columns // 256, 2)) * (1e-4, 7e-4)
        data[:, :, :4] = scales.astype(np.float16).view(np.uint8).reshape(rows, -1, 4)
        return data.reshape(rows, -1)
    weights = 0.02 * np.random.default_rng(seed).standard_normal((rows, columns), np.float32)
    return gguf.quants.quantize(weights, kind)


def four_bit_model(path, kinds):
    """kinds: of each matrix, by the last part of its name in the file; the others are float32."""
    state = tiny_state(tied=False, **WIDE)
    raw = {}
    for key, tensor in state.items():
        kind = kinds.get(gguf_name(key).split(".")[-2])
        if kind in (*OWN, Kind.Q6_K):
            raw[gguf_name(key)] = own_bits(kind, *tensor.shape, seed=len(raw)), kind
        elif kind is not None:
            raw[gguf_name(key)] = gguf.quants.quantize(0.02 * tensor.numpy(), kind), kind
    return write_gguf(path, state, metadata(**WIDE), raw=raw)
