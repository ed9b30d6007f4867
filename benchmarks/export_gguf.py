"""A model folder as a GGUF file, so that llama.cpp runs the very weights that ppsd-rt runs.

    python benchmarks/export_gguf.py smollm2-135m Q8_0 model-q8_0.gguf

The file has no tokenizer: most benchmarks talk to llama.cpp in token ids.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from ppsd_rt.models.cache import cache_dir
from ppsd_rt.models.checkpoint import Checkpoint, as_float32
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.files import is_gguf
from ppsd_rt.models.gguf_import import convert_gguf
from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.models.tokenizer import load_tokenizer

FORMATS = {
    "F32": gguf.GGMLQuantizationType.F32,
    "F16": gguf.GGMLQuantizationType.F16,
    "BF16": gguf.GGMLQuantizationType.BF16,
    "Q8_0": gguf.GGMLQuantizationType.Q8_0,
    "Q4_0": gguf.GGMLQuantizationType.Q4_0,
}
_FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
_MODEL = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def model_folder(name: str) -> Path:
    """The folder of a model by any of its names; one that comes as a .gguf file is converted once, into the cache."""
    path = resolve_model(name)
    if not is_gguf(path):
        return path
    folder = cache_dir() / "benchmarks" / f"{path.stem}-{Checkpoint(path).hash}"
    if not folder.exists():
        convert_gguf(path, folder)
    return folder


def export(folder: Path, format: str, target: Path, tokenizer: bool = False) -> None:
    """Write the whole file, or none. Vectors stay float32, as llama.cpp has them.

    tokenizer: with what turns ids into text (of byte-level tokenizers); text into ids it may cut differently.
    """
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    if config.rope_scaling is not None or config.attention_bias or config.attention_output_bias:
        raise SystemExit(f"{folder}: rope scaling and biases are not exported; use llama.cpp's own converter")
    unfinished = target.with_name(target.name + ".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_name(folder.name)
    writer.add_file_type(_FILE_TYPES[format])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer:
        _add_tokenizer(writer, folder, config)
    else:
        writer.add_tokenizer_model("no_vocab")
    add_shape(writer, config)
    for name, tensor in checkpoint.tensors.items():
        values = as_float32(tensor)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleave(values, config)
        kind = FORMATS[format] if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(target)


def add_shape(writer: gguf.GGUFWriter, config: LlamaConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: LlamaConfig) -> None:
    loaded = load_tokenizer(folder, config.vocab_size)
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([loaded.id_to_token(id) or f"<unused {id}>" for id in range(config.vocab_size)])
    writer.add_token_types([control if id in loaded.special_ids else normal for id in range(config.vocab_size)])
    gguf.SpecialVocab(folder, load_merges=True).add_to_gguf(writer)


def interleave(rows: npt.NDArray[np.float32], config: LlamaConfig) -> npt.NDArray[np.float32]:
    """From Hugging Face's rope order (pairs half a head apart) to GGUF's (pairs side by side)."""
    halves = rows.reshape(-1, 2, config.head_dim // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows.shape))


def gguf_name(name: str) -> str:
    if name in _MODEL:
        return _MODEL[name]
    _, _, number, rest = name.split(".", 3)
    return f"blk.{number}.{_LAYER[rest.removesuffix('.weight')]}.weight"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    export(model_folder(args.model), args.format, args.target)
