"""A model folder as a GGUF file, so that llama.cpp runs the very weights that ppsd-rt runs.

    python benchmarks/export_gguf.py smollm2-135m Q8_0 model-q8_0.gguf

The file has no tokenizer: most benchmarks talk to llama.cpp in token ids.
"""

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from ppsd_rt.models.cache import cache_dir
from ppsd_rt.models.checkpoint import Checkpoint, as_float32
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.files import is_gguf
from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.models.tokenizer import load_tokenizer

FORMATS = {name: gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0")}
_NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 512)  # layers, at most


def model_folder(name: str) -> Path:
    """The folder of a model by any of its names; one that comes as a .gguf file is converted once, into the cache."""
    path = resolve_model(name)
    if not is_gguf(path):
        return path
    folder = cache_dir() / "benchmarks" / f"{path.stem}-{Checkpoint(path).hash}"
    if not folder.exists():
        as_folder(path, folder)
    return folder


def as_folder(path: Path, folder: Path) -> None:
    """The model of a .gguf file as a new folder that other programs read; weights in float32."""
    checkpoint = Checkpoint(path)
    assert checkpoint.gguf is not None
    unfinished = folder.with_name(folder.name + ".unfinished")
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text(json.dumps(checkpoint.gguf.config_json()))
    says = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (unfinished / "tokenizer_config.json").write_text(json.dumps(says | checkpoint.gguf.tokenizer_config()))
    (unfinished / "tokenizer.json").write_text(checkpoint.gguf.tokenizer().to_str())
    save_file(dict(checkpoint.tensors), unfinished / "model.safetensors", {"format": "pt"})
    unfinished.replace(folder)


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
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if format == "F32" else f"MOSTLY_{format}"])
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
    found = _NAMES.get_name(name, try_suffixes=(".weight",))
    assert found is not None, name
    return str(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("format", choices=FORMATS)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    export(model_folder(args.model), args.format, args.target)
