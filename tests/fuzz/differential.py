"""Targets: random models against their references: the same numbers, the same ids, the same ends.

`twin-folder`: a Hugging Face folder of any family, layout and setting against transformers (logits, greedy ids, where
answers end); `twin-tokenizer`: the files beside a tokenizer.json against transformers (ids, text); `twin-gguf`: a file
written by the `gguf` package against a folder of the same weights. A case is made from its number alone.
"""

import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf_support import BLOCK_KINDS, TABLE_KINDS, gguf_name, metadata, random_blocks, tiny_state, write_gguf
from hypothesis import strategies as st
from safetensors.torch import save_file
from support import EOS, VOCAB, byte_tokenizer
from tokenizers import processors

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.cpu.formats import refuses
from ppsd_rt.models.checkpoint import Checkpoint, as_float32
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.tokenizer import load_tokenizer

from .oracle import Fault
from .place import Place

TOLERANCE = 2e-4  # of the largest logit, in float32
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


# -- Hugging Face folders ----------------------------------------------------------------------------------------------


def folder_case(rng: random.Random, folder: Path) -> str:
    """-> what kind of model it was."""
    import transformers

    raw = random_config(rng)
    torch.manual_seed(rng.randrange(2**31))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**json.loads(json.dumps(raw)))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    write_folder(rng, folder, raw, model.state_dict())

    # What is read back is what counts: rounded to the file's dtype, and with a rotation that has seen no text yet.
    def fresh() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    checkpoint = Checkpoint(folder)
    expected_ends = ends_of(folder, checkpoint.config)
    backend = "cpu" if refuses(checkpoint.config) is None and rng.random() < 0.8 else "torch"
    engine = Engine.from_pretrained(folder, exit_head="none", backend=backend, dtype="float32", threads=1)
    if set(engine.config.eos_token_ids) != expected_ends:
        raise Fault(f"answers end at {engine.config.eos_token_ids}, there at {sorted(expected_ends)}")
    length = rng.choice((3, 20, 70, 130, 200))
    ids = [rng.randrange(VOCAB) for _ in range(length)]
    with torch.no_grad():
        logits = fresh()(torch.tensor([ids])).logits[0].numpy()
    found = engine.backend.logits(ids, length)
    largest = float(np.abs(logits).max())
    if not np.abs(found - logits).max() <= TOLERANCE * largest:
        raise Fault(f"logits differ by {np.abs(found - logits).max():g} of {largest:g}, after {length} tokens")
    compare_greedy(fresh(), engine, ids, expected_ends, largest)
    scaling = engine.config.rope_scaling
    return f"{raw['model_type']}, {scaling.kind if scaling else 'default'}"


def compare_greedy(peer: Any, engine: Engine, ids: list[int], ends: set[int], largest: float) -> None:
    import transformers

    # Its cache drops what is beyond `sliding_window`, which Llama's modules do not read.
    cache = {"past_key_values": transformers.DynamicCache()} if peer.config.model_type == "llama" else {}
    with torch.no_grad():
        theirs = peer.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=sorted(ends) or None,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **cache,
        )
    expected = theirs.sequences[0, len(ids) :].tolist()
    found = list(engine.generate(ids, SamplingParams(max_tokens=24), "plain").run().ids)
    for place, (ours, other) in enumerate(zip(found, expected, strict=False)):
        if ours != other:
            scores = theirs.scores[place][0]
            if scores[other] - scores[ours] > 2 * TOLERANCE * largest:
                raise Fault(f"greedy ids {found} instead of {expected}")
            return  # as good as equal, and from here on another text
    if len(found) != len(expected):
        raise Fault(f"greedy ids {found} instead of {expected}")


def random_config(rng: random.Random) -> dict[str, Any]:
    """A config.json: what a family's modules read, and some of what they do not."""
    family = rng.choice([*FAMILIES])
    heads = rng.choice((1, 2, 4))
    hidden = heads * rng.choice((16, 32)) if rng.random() < 0.8 else 96
    raw: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": rng.choice((32, 64, 96)),
        "num_hidden_layers": rng.choice((1, 2, 3, 5)),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "max_position_embeddings": 512,
        "rope_theta": rng.choice((10000.0, 500000.0)),
        "tie_word_embeddings": rng.random() < 0.5,
        "pad_token_id": rng.choice((None, 0)) if family != "smollm3" else 0,
        **random_ends(rng),
    }
    if family == "qwen3" or rng.random() < 0.3 or hidden == 96:
        raw["head_dim"] = rng.choice((16, 32))
    for key in ("attention_bias", "mlp_bias"):  # some families read neither
        if rng.random() < 0.3:
            raw[key] = rng.random() < 0.7
    random_windows(rng, raw)
    random_rotation(rng, raw)
    return raw


def random_ends(rng: random.Random) -> dict[str, Any]:
    several = rng.sample(range(VOCAB), 25)
    named = rng.choice([several, several, several[0], None, [*several[:3], -1, 10**6]])
    return rng.choice([{"eos_token_id": named, "bos_token_id": 1}, {"eos_token_id": named}, {}])


def random_windows(rng: random.Random, raw: dict[str, Any]) -> None:
    family, layers = raw["model_type"], raw["num_hidden_layers"]
    if family == "smollm3" and rng.random() < 0.5:
        raw["no_rope_layers"] = [rng.randint(0, 1) for _ in range(layers)]
    if family == "mistral":
        raw["sliding_window"] = rng.choice((None, 5, 33, 4096))
        return
    if rng.random() < 0.5:
        return
    raw |= {"sliding_window": rng.choice((5, 33)), "use_sliding_window": rng.random() < 0.7}
    if family in ("qwen2", "qwen3"):
        raw["max_window_layers"] = rng.randint(0, 3)
        if raw["use_sliding_window"] and rng.random() < 0.5:
            raw["layer_types"] = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]


def random_rotation(rng: random.Random, raw: dict[str, Any]) -> None:
    """Of any kind, under either key or both, with the length before stretching inside, outside, or nowhere."""
    half = (raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]) // 2
    original = rng.choice((32, 64, 128))
    kind = rng.choice(("default", "default", "linear", "llama3", "yarn", "dynamic", "longrope"))
    section: dict[str, Any] = {rng.choice(("rope_type", "rope_type", "type")): kind}
    if kind != "default":
        section["factor"] = rng.choice((2.0, 4.0, 8))
    if kind == "dynamic":
        raw["max_position_embeddings"] = original
        section["factor"] = 8.0
    if kind in ("llama3", "yarn", "longrope"):
        for place in rng.choice(([section], [raw], [section, raw], [])):
            place["original_max_position_embeddings"] = original if place is section else rng.choice((32, 64, 128))
    if kind == "llama3":
        section |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice((2.0, 4.0))}
    if kind == "yarn":
        for key, values in {
            "attention_factor": (1.1,), "beta_fast": (32, 8.0), "beta_slow": (1, 2.0), "truncate": (False, True),
            "mscale": (0.7,), "mscale_all_dim": (0.5,),
        }.items():  # fmt: skip
            if rng.random() < 0.25:
                section[key] = rng.choice(values)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            section[name] = [round(rng.uniform(1, 6), 3) for _ in range(half)]
        if rng.random() < 0.3:
            section["attention_factor"] = 1.2
    if rng.random() < 0.3:
        section["rope_theta"] = 100000.0
    if rng.random() < 0.3:
        raw["partial_rotary_factor"] = 1.0 if kind != "default" else rng.choice((0.5, 1.0))
    raw[rng.choice(("rope_scaling", "rope_parameters"))] = section
    if rng.random() < 0.3:
        raw.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 1234.0})


def write_folder(rng: random.Random, folder: Path, raw: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """In one of the layouts that people save: dtypes, tied heads under any name, no prefix, shards, a stale index."""
    (folder / "config.json").write_text(json.dumps(raw))
    if rng.random() < 0.4:
        (folder / "generation_config.json").write_text(json.dumps(random_ends(rng)))
    dtype = rng.choice((torch.float32, torch.float16, torch.bfloat16))
    tensors = {name: tensor.to(dtype).contiguous().clone() for name, tensor in state.items()}
    if raw["tie_word_embeddings"]:
        head = tensors.pop("lm_head.weight", None)
        choice = rng.random()
        if choice < 0.2 and head is not None:
            tensors["lm_head.weight"] = head
        elif choice < 0.35:
            tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
        elif choice < 0.5:
            tensors["lm_head.weight"] = (0.1 * torch.randn(VOCAB, raw["hidden_size"])).to(dtype)
    if rng.random() < 0.15 and "lm_head.weight" not in tensors:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if rng.random() < 0.15:
        tensors["model.layers.77.mlp.up_proj.weight"] = torch.ones(3, 3)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    names, index = sorted(tensors), folder / "model.safetensors.index.json"
    if rng.random() < 0.25:
        weight_map = {name: f"model-{place % 2 + 1:05}-of-00002.safetensors" for place, name in enumerate(names)}
        for file in sorted(set(weight_map.values())):
            save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if rng.random() < 0.15:
            index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00009.safetensors")}))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))


def ends_of(folder: Path, config: LlamaConfig) -> set[int]:
    """Where transformers ends: by generation_config.json, else config.json. Where both are there we end by both, as
    vLLM does, and where neither names an id by the tokenizer's."""
    import transformers

    raw = json.loads((folder / "config.json").read_text())
    theirs = transformers.AutoConfig.from_pretrained(folder)
    named = listed(theirs.eos_token_id)
    if (folder / "generation_config.json").exists():
        generation = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
        inside = [id for id in listed(generation) if 0 <= id < config.vocab_size]
        if inside:
            named = [*inside, *listed(raw.get("eos_token_id"))]
    return {id for id in named if 0 <= id < config.vocab_size} or {EOS}


def listed(ids: Any) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


# -- tokenizers --------------------------------------------------------------------------------------------------------

_PLAIN, _ADDED, _SPECIAL = (
    ("a", " ", "  b", "q", "\n", "x<", "é"),
    ("<a>", "<b>", "<cc>", " <d>"),
    ("<|im_start|>", "<|im_end|>"),
)


def tokenizer_case(rng: random.Random, folder: Path) -> str:
    import transformers

    tokenizer = byte_tokenizer()
    if rng.random() < 0.3:
        start = [("<|im_start|>", tokenizer.token_to_id("<|im_start|>"))]
        tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A", "<|im_start|> $A $B:1", start)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(random_tokens(rng, folder)))
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for _ in range(20):
        text = "".join(rng.choices((*_PLAIN, *_ADDED, *_SPECIAL), k=rng.randint(0, 8)))
        for add in (True, False):
            found, expected = (
                ours.encode(text, add_special_tokens=add),
                theirs(text, add_special_tokens=add)["input_ids"],
            )
            if found != expected:
                raise Fault(f"{text!r} is {found} instead of {expected}")
            said = theirs.decode(expected, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if ours.decode(expected) != said:
                raise Fault(f"{expected} is {ours.decode(expected)!r} instead of {said!r}")
    return "tokenizer"


def random_tokens(rng: random.Random, folder: Path) -> dict[str, Any]:
    def flags() -> dict[str, bool]:
        return {name: rng.random() < 0.4 for name in ("lstrip", "rstrip", "special", "normalized", "single_word")}

    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    given = rng.sample(_ADDED, rng.randint(0, 3))
    if rng.random() < 0.6:
        entries = {str(VOCAB + place): {"content": text, **flags()} for place, text in enumerate(given)}
        known = [id for id in range(256, VOCAB) if rng.random() < 0.5]
        names = {id: byte_tokenizer().id_to_token(id) for id in known}
        config["added_tokens_decoder"] = {**entries, **{str(id): {"content": names[id], **flags()} for id in known}}
    elif rng.random() < 0.5:
        (folder / "added_tokens.json").write_text(json.dumps({text: VOCAB + n for n, text in enumerate(given)}))
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        if rng.random() < 0.5:
            config[name] = rng.choice(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    for name in ("add_bos_token", "add_eos_token", "split_special_tokens"):
        if rng.random() < 0.25:
            config[name] = rng.random() < 0.5
    if rng.random() < 0.4:
        config["additional_special_tokens"] = rng.sample(("<a>", "<|im_start|>", "q"), rng.randint(1, 2))
    if rng.random() < 0.3:
        named = {rng.choice(("bos_token", "eos_token")): rng.choice(_SPECIAL)}
        (folder / "special_tokens_map.json").write_text(json.dumps(named))
    return config


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf_case(rng: random.Random, folder: Path) -> str:
    arch = rng.choice(("llama", "qwen2", "qwen3", "smollm3"))
    wide = {"hidden": 256, "inner": 256, "heads": 16, "kv_heads": rng.choice((4, 16)), "layers": rng.choice((1, 5))}
    bias = "qkv" if arch == "qwen2" else rng.choice(("", "qkv", "qkvo")) if arch == "llama" else ""
    state = tiny_state(rng.randrange(2**31), tied=rng.random() < 0.5, bias=bias, **wide)
    state = {name: 1 + 0.1 * tensor if "norm" in name else 0.05 * tensor for name, tensor in state.items()}
    more = random_vectors(rng, arch, state, wide)
    values, rope, raw = random_metadata(rng, arch, wide)
    for number, (name, tensor) in enumerate(sorted(state.items())):
        if tensor.dim() == 2 and rng.random() < 0.5:
            kind = rng.choice([*BLOCK_KINDS, *TABLE_KINDS])
            if "q_proj" in name or "k_proj" in name:  # of which the writer turns the rows, and blocks are made here
                continue
            data = tamed(random_blocks(kind, len(tensor), tensor.shape[1], number), kind)
            raw[gguf_name(name)] = data, kind
            state[name] = torch.from_numpy(gguf.quants.dequantize(data, kind))
    path = write_gguf(folder / "m.gguf", state, values, raw=raw)

    other = folder / "m"
    other.mkdir()
    family = "qwen2" if bias == "qkv" else arch
    config = {
        "model_type": family,
        "architectures": [FAMILIES[family]],
        "vocab_size": len(state["model.embed_tokens.weight"]),
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": wide["layers"],
        "num_attention_heads": 16,
        "num_key_value_heads": wide["kv_heads"],
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_theta": 100000.0,
        "tie_word_embeddings": "lm_head.weight" not in state,
        "attention_bias": bias == "qkvo",
        "mlp_bias": more,
        "eos_token_id": [2, 0],
        "rope_scaling": rope,
    }
    (other / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, other / "model.safetensors")
    files, folders = Checkpoint(path), Checkpoint(other)
    if set(files.config.eos_token_ids) != {2, 0}:
        raise Fault(f"answers end at {files.config.eos_token_ids}")
    for name, tensor in folders.tensors.items():
        if as_float32(files.tensors[name]).tobytes() != as_float32(tensor).tobytes():
            raise Fault(f"tensor {name} is another one")
    load_tokenizer(path)
    ids = [rng.randrange(VOCAB) for _ in range(rng.choice((5, 90)))]
    logits = [backend_logits(checkpoint, ids) for checkpoint in (files, folders)]
    if not np.abs(logits[0] - logits[1]).max() <= 1e-5 * np.abs(logits[1]).max():
        raise Fault(f"logits differ by {np.abs(logits[0] - logits[1]).max():g} of {np.abs(logits[1]).max():g}")
    return f"gguf, {arch}"


def backend_logits(checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    from ppsd_rt.cpu.backend import CpuBackend

    return CpuBackend(checkpoint, "float32", "cpu", 1).logits(ids, len(ids))


def tamed(data: np.ndarray, kind: Any) -> np.ndarray:
    """Random blocks whose values are of the size of weights: scales of the exponent of 0.001."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, size)
    values = np.abs(gguf.quants.dequantize(blocks.reshape(len(data), -1), kind)).reshape(-1, block).max(1)
    return np.where(values[:, None] < 4, blocks, 0).astype(np.uint8).reshape(data.shape)


def random_vectors(rng: random.Random, arch: str, state: dict[str, torch.Tensor], wide: dict[str, int]) -> bool:
    """Norms of heads, biases of MLPs; -> has it the latter?"""
    biased = arch in ("llama", "smollm3") and not any("bias" in name for name in state) and rng.random() < 0.3
    for layer in range(wide["layers"]):
        prefix = f"model.layers.{layer}."
        if arch == "qwen3":
            state |= {f"{prefix}self_attn.{name}_norm.weight": 1 + 0.1 * torch.randn(16) for name in "qk"}
        for name in ("gate", "up", "down") if biased else ():
            state[f"{prefix}mlp.{name}_proj.bias"] = 0.1 * torch.randn(256)
    return biased


def random_metadata(
    rng: random.Random, arch: str, wide: dict[str, int]
) -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any]]:
    """-> metadata, the same rotation in transformers' words, and tensors of it."""
    values = {
        **metadata(arch, **wide),
        "tokenizer.ggml.pre": rng.choice(("qwen2", "smollm", "llama-bpe", "tekken", None)),
    }
    values[f"{arch}.attention.key_length"] = 16
    for key in ("head_count", "head_count_kv"):
        if rng.random() < 0.2:
            values[f"{arch}.attention.{key}"] = [values[f"{arch}.attention.{key}"]] * wide["layers"]
    for name in ("padding", "bos"):
        if rng.random() < 0.2:
            values[f"tokenizer.ggml.{name}_token_id"] = 2**32 - 1
    kind, scaling = rng.choice(("none", "linear", "yarn", "factors")), f"{arch}.rope.scaling."
    factor = rng.choice((2.0, 4.0))
    if kind == "linear":
        values |= {f"{scaling}type": "linear", f"{scaling}factor": factor}
        return values, {"rope_type": "linear", "factor": factor}, {}
    if kind == "yarn":
        values |= {f"{scaling}type": "yarn", f"{scaling}factor": factor, f"{scaling}original_context_length": 64}
        return values, {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64}, {}
    if kind == "factors":
        factors = np.array([rng.uniform(1, 8) for _ in range(8)], np.float32)
        same = {f"{length}_factor": factors.tolist() for length in ("short", "long")}
        rope = {"rope_type": "longrope", **same, "factor": 1.0, "original_max_position_embeddings": 512}
        return values, rope, {"rope_freqs.weight": (factors, gguf.GGMLQuantizationType.F32)}
    return values, None, {}


def alone(case: Callable[[random.Random, Path], str]) -> Callable[[Place, int], str]:
    """The case of a number, in a folder of its own."""

    def run(place: Place, number: int) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return case(random.Random(number), Path(folder))

    return run


TARGETS = {
    name: (lambda place: st.integers(0, 2**62), alone(case))
    for name, case in (("twin-folder", folder_case), ("twin-tokenizer", tokenizer_case), ("twin-gguf", gguf_case))
}
