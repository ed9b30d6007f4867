"""The tokenizer of a GGUF file as a `tokenizers` tokenizer that gives the same ids.

What the fields mean follows llama.cpp's vocabulary (`src/llama-vocab.cpp`: types, defaults, regular expressions).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import PpsdError
from .gguf_file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


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
    texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(gguf.strings("tokenizer.ggml.tokens"))]
    if len(texts) != vocabulary:
        raise gguf.bad(f"there are {len(texts)} tokens, but the embedding has {vocabulary} rows")
    if len(set(texts)) != len(texts):
        (twice, _), *_ = Counter(texts).most_common(1)
        raise gguf.bad(f"the token {twice!r} is in the vocabulary twice")

    ids = {
        name: gguf.token_id(f"tokenizer.ggml.{name}_token_id", len(texts))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    if ids["eos"] is None:
        raise gguf.bad("the metadata lacks tokenizer.ggml.eos_token_id: the text would have no end")
    ends = [token for name in ("eos", "eot", "eom") if (token := ids[name]) is not None]
    add_bos = gguf.flag("tokenizer.ggml.add_bos_token", _adds_bos_by_default(gguf))
    if add_bos and ids["bos"] is None:
        raise gguf.bad("texts are to begin with a BOS token, but the metadata lacks tokenizer.ggml.bos_token_id")
    return Tokens(
        texts=texts,
        types=gguf.numbers("tokenizer.ggml.token_type", len(texts)).tolist(),
        bos=ids["bos"],
        eos=list(dict.fromkeys(ends)),
        unknown=ids["unknown"],
        padding=ids["padding"],
        add_bos=add_bos,
        add_eos=gguf.flag("tokenizer.ggml.add_eos_token", False),
    )


def _adds_bos_by_default(gguf: GgufFile) -> bool:
    """What llama.cpp does where the file does not say."""
    if gguf.text("tokenizer.ggml.model") == "llama":
        return True
    return gguf.text("tokenizer.ggml.pre") in _LLAMA3_NAMES


def build_tokenizer(gguf: GgufFile, tokens: Tokens) -> Tokenizer:
    """A tokenizer that gives the same ids as the one the model was trained with."""
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    model = gguf.text("tokenizer.ggml.model")
    if model not in builders:
        raise gguf.bad(f"the tokenizer model {model!r} is not supported; supported are {', '.join(builders)}")
    try:
        tokenizer = builders[model](gguf, tokens)
        _add_special_tokens(tokenizer, tokens)
        tokenizer.post_processor = _post_processor(tokens)
    except PpsdError:
        raise
    except Exception as error:  # whatever the tokenizers package raises for tables that do not fit together
        reason = " ".join(str(error).split())
        raise gguf.bad(f"the tokenizer's tables do not fit together ({reason}): the file is damaged") from None
    return tokenizer


def _byte_level_bpe(gguf: GgufFile, tokens: Tokens) -> Tokenizer:
    name = gguf.text("tokenizer.ggml.pre")
    vocabulary = {text: i for i, text in enumerate(tokens.texts)}
    # Llama 3 takes a word that is a token whole, even where no chain of merges leads to it.
    whole_words = name in _LLAMA3_NAMES
    tokenizer = Tokenizer(models.BPE(vocabulary, _read_merges(gguf), ignore_merges=whole_words))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(gguf, name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(gguf: GgufFile, name: str) -> pre_tokenizers.PreTokenizer:
    """How the text is cut into words before merging, by llama.cpp's name for it."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps: list[pre_tokenizers.PreTokenizer]
    if name == "gpt-2":
        steps = [words]
    elif name == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), words]
    elif name == "qwen2":
        steps = [_split(_QWEN2_SPLIT), letters]
    elif name in (*_LLAMA3_NAMES, "smaug-bpe"):  # smaug-bpe: SmolLM3's, too
        steps = [_split(_LLAMA3_SPLIT), letters]
    elif name == "default":
        # What llama.cpp falls back to, and so what these files have always been run with.
        splits = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", "[0-9][0-9][0-9]")
        steps = [*map(_split, splits), letters]
    else:
        known = ", ".join(("smollm", *_LLAMA3_NAMES, "smaug-bpe", "qwen2", "gpt-2", "default"))
        raise gguf.bad(f"the pre-tokenizer {name!r} is not supported; supported are {known}")
    return pre_tokenizers.Sequence(steps)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)


def _read_merges(gguf: GgufFile) -> list[tuple[str, str]]:
    merges = []
    for merge in gguf.strings("tokenizer.ggml.merges"):
        cut = merge.find(" ", 1)
        if cut < 1 or cut + 1 == len(merge):
            raise gguf.bad(f"the merge {merge!r} does not name two tokens: the file is damaged")
        merges.append((merge[:cut], merge[cut + 1 :]))
    return merges


def _sentencepiece_bpe(gguf: GgufFile, tokens: Tokens) -> Tokenizer:
    vocabulary = {text: i for i, text in enumerate(tokens.texts)}
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary]
    if missing:
        raise gguf.bad(f"the vocabulary lacks the byte token <0x{missing[0]:02X}>: byte fallback needs all 256")
    merges = _read_merges(gguf) if "tokenizer.ggml.merges" in gguf.values else _merges_by_score(gguf, tokens)
    model = models.BPE(vocabulary, merges, unk_token=tokens.text_of(tokens.unknown), fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)

    # Prepended to every stretch of text between special tokens, as sentencepiece and llama.cpp do.
    prefix = gguf.flag("tokenizer.ggml.add_space_prefix", True)
    escape = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape]) if prefix else escape
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges_by_score(gguf: GgufFile, tokens: Tokens) -> list[tuple[str, str]]:
    """The merges that sentencepiece makes: it joins the neighbours whose union has the best score."""
    scores = gguf.numbers("tokenizer.ggml.scores", len(tokens.texts)).tolist()
    mergeable = {
        text: score
        for text, kind, score in zip(tokens.texts, tokens.types, scores, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    if len(mergeable) > 1 and len(set(mergeable.values())) == 1:
        raise gguf.bad(
            "all tokens have the same score, so their merges cannot be told; use the original model folder instead"
        )
    found = [
        (text[:cut], text[cut:])
        for text in mergeable
        for cut in range(1, len(text))
        if text[:cut] in mergeable and text[cut:] in mergeable
    ]
    return sorted(found, key=lambda pair: -mergeable[pair[0] + pair[1]])


def _add_special_tokens(tokenizer: Tokenizer, tokens: Tokens) -> None:
    """Control tokens are recognised in text and hidden when decoding; user-defined ones are only recognised."""
    typed = list(zip(tokens.texts, tokens.types, strict=True))
    special = [text for text, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    plain = [text for text, kind in typed if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])


def _post_processor(tokens: Tokens) -> processors.PostProcessor | None:
    bos = [tokens.bos] if tokens.add_bos and tokens.bos is not None else []
    eos = tokens.eos[:1] if tokens.add_eos else []
    if not bos and not eos:
        return None
    first, last = ([tokens.texts[token] for token in ids] for ids in (bos, eos))
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{text}:1" for text in first), "$B:1", *(f"{text}:1" for text in last)],
        special_tokens=[(tokens.texts[token], token) for token in dict.fromkeys([*bos, *eos])],
    )


def generation_config(tokens: Tokens) -> dict[str, Any]:
    eos = tokens.eos[0] if len(tokens.eos) == 1 else tokens.eos
    ids = {"bos_token_id": tokens.bos, "eos_token_id": eos, "pad_token_id": tokens.padding}
    return {name: value for name, value in ids.items() if value is not None}


def tokenizer_config(gguf: GgufFile, context: int, tokens: Tokens) -> dict[str, Any]:
    named = {
        "bos_token": tokens.text_of(tokens.bos),
        "eos_token": tokens.text_of(tokens.eos[0]),
        "unk_token": tokens.text_of(tokens.unknown),
        "pad_token": tokens.text_of(tokens.padding),
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokens.add_bos,
        "add_eos_token": tokens.add_eos,
        **{name: text for name, text in named.items() if text is not None},
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if "tokenizer.chat_template" in gguf.values:
        config["chat_template"] = gguf.text("tokenizer.chat_template")
    return config
