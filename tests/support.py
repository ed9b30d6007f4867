"""Small models that tests make for themselves: no network, no weights, milliseconds."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from ppsd_rt import Grammar, SamplingParams
from ppsd_rt.backend import RunOptions
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.head_file import HeadInfo
from ppsd_rt.pipeline.rounds import Drafted

try:
    import torch
    from safetensors.torch import save_file

    from ppsd_rt.models.exit_head import ExitHead
    from ppsd_rt.models.llama import LlamaForCausalLM
except ImportError:  # `make quick` has none: small_gguf() is its model
    torch = None

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIAL)
EOS = VOCAB - 1


class Lazily:
    """A module that is imported when something is first asked of it: workers that only collect its tests need none."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):  # pytest asks everything in a module for such names
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def slow(*values: object, **options: object) -> object:
    """A parameter of a test that `make test-all` runs and `make test` does not."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def tiny_config(**changes: object) -> dict[str, object]:
    """config.json of a model with four layers and a byte vocabulary."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": VOCAB - 2,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    return {**config, **changes}


# Families whose attention is not plain Llama's, in the settings of `tiny_config`.
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32},
    "smollm3": {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "pad_token_id": 0,
        "no_rope_layer_interval": 3,
    },
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 21},
    "qwen3, some layers sliding": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 70,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "smollm3, some layers sliding": {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "pad_token_id": 0,
        "no_rope_layers": [1, 0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 5,
    },
}


def tiny_model(seed: int = 0, **changes: object) -> "LlamaForCausalLM":
    """Random weights, large enough for the answers to be neither constant nor uniform."""
    generator = torch.Generator().manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig.from_dict(tiny_config(**changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.15 * noise)
    return model.eval().requires_grad_(False)


def tiny_head(
    model: "LlamaForCausalLM",
    kind: str = "layer",
    exit_layer: int = 2,
    hash: str = "0",
    sizes: tuple[int, int] = (0, 0),
    tap: int = 0,
) -> "ExitHead":
    """sizes: of its MLP, and the rank of its feedback; 0: the model's."""
    draft_ids = None if kind == "norm" else [i for i in range(VOCAB) if i % 5]
    info = HeadInfo(kind, exit_layer, "tiny", hash, intermediate_size=sizes[0], feedback_rank=sizes[1], tap=tap)
    return ExitHead.from_model(model, info, draft_ids)


def write_model(folder: Path, model: "LlamaForCausalLM | None" = None, **changes: object) -> Path:
    """A Hugging Face folder: config, weights, byte tokenizer, chat template."""
    model = model or tiny_model(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(**changes)))
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def loud_head(
    hash: str,
    strength: float = 0.5,
    kind: str = "feedback",
    exit_layer: int = 2,
    sizes: tuple[int, int] = (0, 0),
    tap: int = 0,
    **shape: int,
) -> "ExitHead":
    """A feedback head for which what it receives matters, and differs with the distance: a fresh one ignores it."""
    head = tiny_head(tiny_model(**shape), kind, exit_layer, hash, sizes, tap)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in head.feedback.named_parameters():
        if name != "norm.weight":
            parameter.data.normal_(0, strength / parameter.shape[0] ** 0.5, generator=generator)
    if head.tap is not None:
        for parameter in head.tap.state_dict().values():
            parameter.normal_(0, strength, generator=generator)
    return head


def byte_tokenizer() -> Tokenizer:
    """One id per byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


def small_gguf(path: Path, seed: int = 0, layers: int = 1) -> Path:
    """A GGUF file with a byte vocabulary: random matrices, norms of seed + 0.5."""
    import gguf  # not where only the tests of a GPU run

    generator = np.random.default_rng(seed)
    tokens = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"embedding_length": 32, "feed_forward_length": 32, "context_length": 32 * layers}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_block_count(layers)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {"output_norm.weight": (32,)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}.weight": (32, 32) for name in matrices}
        shapes |= {f"blk.{layer}.{name}.weight": (32,) for name in ("attn_norm", "ffn_norm")}
    shapes["token_embd.weight"] = (len(tokens), 32)
    for name, shape in shapes.items():
        norm = len(shape) == 1
        values = np.full(shape, seed + 0.5, np.float32) if norm else generator.standard_normal(shape, np.float32)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Grammars that tests of one process and of ranks use.
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}
GRAMMARS = {
    "regex": Grammar.regex("([a-f]{2,5} ){3,12}[xyz]+!"),
    "schema": Grammar.json_schema(SCHEMA),
    "lark": Grammar.lark('start: line{4,9}\nline: ("ab" | "ba")+ ";" /[0-9]/'),
}
PROMPT = "once upon a time once upon a time"

# Eight answers at once, of which each wants something else.
EIGHT = (
    {
        "grammar": Grammar(
            "json_schema", '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}'
        )
    },
    {"repetition_penalty": 1.3, "temperature": 0.7, "seed": 2},
    {"presence_penalty": 0.9, "frequency_penalty": 0.4, "logprobs": 2},
    {"logprobs": 3, "temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 4},
    {"logit_bias": {40: 4.0}, "min_p": 0.05, "temperature": 1.0, "seed": 5},
    {"temperature": 1.3, "seed": 6},
    {"grammar": Grammar("regex", "[a-f]{5,30}!"), "temperature": 1.0, "seed": 7, "logprobs": 0},
    {},
)


def check_eight(engine, schedule, tokens=30):
    """With schemas, penalties, log-probabilities, and one that is cancelled in the middle; plain decoding's tokens."""
    asked = [SamplingParams(**{"max_tokens": tokens, **options}) for options in EIGHT]
    prompts = ["the same beginning, " * 4 + "and more"[:number] for number in range(8)]
    alone = [engine.generate(prompt, each, "plain").run() for prompt, each in zip(prompts, asked, strict=True)]
    together = [engine.generate(prompt, each, schedule) for prompt, each in zip(prompts, asked, strict=True)]
    streams = [generation.events() for generation in together]
    for place in range(tokens + 10):
        for number, stream in enumerate(streams):
            next(stream, None)
            if (place, number) == (1, 7):  # of the tokens it has 4 at the most
                together[7].cancel()
    for generation, expected in zip(together[:7], alone[:7], strict=True):
        found = generation.run()
        assert (found.ids, found.text, found.logprobs) == (expected.ids, expected.text, expected.logprobs)
    assert together[7].completion.finish_reason == "cancelled"
    assert together[7].completion.ids == alone[7].ids[: len(together[7].completion.ids)]


def drafts_of(engine, prompt, params, schedule):
    """[(position, id)] of an answer's draft tokens, as they are drawn; none is copied from another text."""
    events = engine.generate(prompt, params, schedule, RunOptions(report_drafts=True, owner=None)).events()
    return [(event.position, event.token) for event in events if isinstance(event, Drafted)]
