"""The tokenizer of a GGUF file as a `tokenizers` tokenizer that gives the same ids.

What the fields mean follows llama.cpp's vocabulary (`src/llama-vocab.cpp`: types, defaults, regular expressions).
"""

import logging
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..errors import PpsdError
from .files import one_line
from .gguf_file import GgufFile
from .pieces import CONTROL, NORMAL, Pieces, add_special_tokens, surround

_LOG = logging.getLogger(__name__)

# What ends an answer besides the ids that a file states: files state one of several, or none. Source: llama.cpp,
# `llama_vocab::impl::load`, from "auto-detect special tokens by text" on.
_END_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
}
# Marks of a code model that come after what was to be filled in, by the key that states their id.
_FIM_TEXTS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_DEFAULT_IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}}  # of files of a tokenizer model that state none

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SEED_SPLIT = _QWEN2_SPLIT.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_MARKS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The letters of DeepSeek LLM's first tokenizer, as its tokenizer.json lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)

# Rule -> how the text is cut into words before merging: one pattern after the other, each within the pieces of those
# before it. Source: llama.cpp, `llm_tokenizer_bpe`; where it adapts a pattern, that of the original tokenizer.json.
_RULES: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2_SPLIT,),
    "smollm": (r"\p{N}", _GPT2_SPLIT),
    "llama3": (_LLAMA3_SPLIT,),
    "smaug-bpe": (_LLAMA3_SPLIT,),
    "qwen2": (_QWEN2_SPLIT,),
    "tekken": (_TEKKEN_SPLIT,),
    "seed-coder": (_SEED_SPLIT,),
    "deepseek-llm": (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", _DEEPSEEK_MARKS, r"\s+$", _CJK, r"\p{N}+"),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    # What llama.cpp falls back to, and so what these files have always been run with.
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip
# llama.cpp's other names for a rule; those that need a tokenizer of another kind are not here.
_ALIASES = {
    **dict.fromkeys(("llama-bpe", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), "llama3"),
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "kormo", "f2llmv2", "hunyuan", "stablelm2"), "qwen2"),
    **dict.fromkeys(("phi-2", "mellum", "a.x-4.0", "gigachat", "exaone4", "trillion", "granite-docling"), "gpt-2"),
    **dict.fromkeys(("jais", "mpt", "olmo", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "modern-bert"), "gpt-2"),
    **dict.fromkeys(("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"), "smollm"),
    "dbrx": "smaug-bpe",
}
_WHOLE_WORDS = ("llama3", "tekken")  # a word that is a token is taken whole, even where no chain of merges leads to it
_COMPOSED = ("qwen2",)  # of the names that files state: texts are composed (NFC) first


@dataclass(frozen=True)
class Tokens:
    """The vocabulary in id order, and the ids with a role."""

    texts: list[str]
    types: list[int]
    bos: int | None
    eos: list[int]
    unknown: int | None
    padding: int | None
    add_bos: bool
    add_eos: bool

    def text_of(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.texts[token_id]


def read_tokens(gguf: GgufFile, vocabulary: int) -> Tokens:
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(gguf.get("tokenizer.ggml.tokens", list))]
    if not len(texts) == len(set(texts)) == vocabulary:
        raise gguf.bad("tokenizer.ggml.tokens", f"of {len(set(texts))} texts", f"one for each of {vocabulary} rows")
    model = gguf.get("tokenizer.ggml.model", str)
    usual = _DEFAULT_IDS.get(model, {})
    ids = {
        name: gguf.token_id(f"tokenizer.ggml.{name}_token_id", len(texts), usual.get(name))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    types = [NORMAL] * len(texts)
    if "tokenizer.ggml.token_type" in gguf.values:
        types = gguf.numbers("tokenizer.ggml.token_type", len(texts)).tolist()
    stated = [token for name in ("eos", "eot", "eom") if (token := ids[name]) is not None]
    ends = list(dict.fromkeys([*stated, *_known_ends(gguf, texts)]))
    if not ends:
        raise gguf.bad("tokenizer.ggml.eos_token_id", "missing")  # the text would have no end
    for token in ends:
        types[token] = CONTROL
    # What llama.cpp does where the file does not say.
    usually_bos = model == "llama" or _pre_name(gguf) in ("llama3", "tekken")
    return Tokens(
        texts=texts,
        types=types,
        bos=ids["bos"],
        eos=ends,
        unknown=ids["unknown"],
        padding=ids["padding"],
        add_bos=gguf.get("tokenizer.ggml.add_bos_token", bool, usually_bos),
        add_eos=gguf.get("tokenizer.ggml.add_eos_token", bool, False),
    )


def _known_ends(gguf: GgufFile, texts: list[str]) -> list[int]:
    """The ids of texts that end an answer wherever they occur, in the vocabulary's order."""
    ids = {text: id for id, text in enumerate(texts)}
    ends = {ids[text] for text in _END_TEXTS if text in ids}
    for key, marks in _FIM_TEXTS.items():
        named = gguf.token_id(f"tokenizer.ggml.{key}_token_id", len(texts))
        found = [ids[text] for text in marks if text in ids]
        ends |= {named} if named is not None else set(found[:1])
    has = {texts[end] for end in ends}
    # In these vocabularies <|end|> ends a part of an answer, and </s> is an ordinary token.
    if has & {"<|call|>", "<|calls|>"} and has & {"<|return|>", "<|flush|>"}:
        ends -= {ids["<|end|>"]} if "<|end|>" in ids else set()
    if has & {"<|tool_response>", "<|plamo:eos|>"}:
        ends -= {ids["</s>"]} if "</s>" in ids else set()
    return sorted(ends)


def build_tokenizer(gguf: GgufFile, tokens: Tokens) -> Tokenizer:
    """A tokenizer that gives the same ids as the one the model was trained with."""
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    model = gguf.get("tokenizer.ggml.model", str)
    if model not in builders:
        raise gguf.bad("tokenizer.ggml.model", model, " or ".join(builders))
    try:
        tokenizer = builders[model](gguf, tokens)
        bos, eos = tokens.bos if tokens.add_bos else None, tokens.eos[0] if tokens.add_eos else None
        surround(tokenizer, tokens.text_of(bos), tokens.text_of(eos))
    except PpsdError:
        raise
    except Exception as error:  # whatever the tokenizers package raises for tables that do not fit together
        raise gguf.bad("tokenizer.ggml.tokens or merges", f"not to be used ({one_line(error)})") from None
    return tokenizer


def _pre_name(gguf: GgufFile) -> str:
    """The rule by which texts are cut into words before merging, under its name here."""
    stated = gguf.get("tokenizer.ggml.pre", str, "default")
    return _ALIASES.get(stated, stated)


def _byte_level_bpe(gguf: GgufFile, tokens: Tokens) -> Tokenizer:
    name = _pre_name(gguf)
    if name not in _RULES:
        raise gguf.bad("tokenizer.ggml.pre", repr(name), ", ".join((*_RULES, *_ALIASES)))
    if "tokenizer.ggml.pre" not in gguf.values:
        _LOG.info(
            "%s: it names no pre-tokenizer, so words are cut as llama.cpp does then: answers may be worse", gguf.path
        )
    vocabulary = {text: i for i, text in enumerate(tokens.texts)}
    tokenizer = Tokenizer(models.BPE(vocabulary, _read_merges(gguf), ignore_merges=name in _WHOLE_WORDS))
    if gguf.get("tokenizer.ggml.pre", str, "") in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False) for pattern in _RULES[name]]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, letters])
    tokenizer.decoder = decoders.ByteLevel()
    add_special_tokens(tokenizer, tokens.texts, tokens.types)
    return tokenizer


def _read_merges(gguf: GgufFile) -> list[tuple[str, str]]:
    cuts = ((merge, merge.find(" ", 1)) for merge in gguf.get("tokenizer.ggml.merges", list))
    return [(merge[:cut], merge[cut + 1 :]) for merge, cut in cuts]


def _sentencepiece_bpe(gguf: GgufFile, tokens: Tokens) -> Tokenizer:
    prefix, scores, merges = gguf.get("tokenizer.ggml.add_space_prefix", bool, True), [], None
    if "tokenizer.ggml.merges" in gguf.values:
        merges = _read_merges(gguf)
    else:
        scores = gguf.numbers("tokenizer.ggml.scores", len(tokens.texts)).tolist()
        if len(set(scores)) < 2:  # then merges cannot be told
            raise gguf.bad("tokenizer.ggml.scores", "the same for all tokens")
    pieces = Pieces(tokens.texts, tokens.types, scores, tokens.text_of(tokens.unknown), prefix)
    return pieces.tokenizer(pieces.bpe(merges))


def generation_config(tokens: Tokens) -> dict[str, Any]:
    eos = tokens.eos[0] if len(tokens.eos) == 1 else tokens.eos
    ids = {"bos_token_id": tokens.bos, "eos_token_id": eos, "pad_token_id": tokens.padding}
    return {name: value for name, value in ids.items() if value is not None}


def tokenizer_config(gguf: GgufFile, tokens: Tokens) -> dict[str, Any]:
    roles = {"bos": tokens.bos, "eos": tokens.eos[0], "unk": tokens.unknown, "pad": tokens.padding}
    named = {f"{role}_token": tokens.texts[id] for role, id in roles.items() if id is not None}
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    templates = {name: gguf.get(key, str) for name, key in keys.items() if key in gguf.values}
    return named | ({"chat_template": templates} if templates else {})
