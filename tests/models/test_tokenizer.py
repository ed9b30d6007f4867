"""Tokenizers against independent judges: transformers, the tokenizers library and sentencepiece itself.

The tokenizers are trained here, on a few sentences in many scripts: small vocabularies make every character outside of
them a run of byte tokens, which is what incremental decoding has to survive.
"""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.models.tokenizer import Tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is the judge of these tests")

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

CORPUS = [
    "Hello world, this is a test of the tokenizer.",
    "The quick brown fox jumps over the lazy dog.",
    "def main(values: list[int]) -> int:\n    return sum(values)  # 42",
    "你好，世界。今天天气很好。",
    "مرحبا بالعالم، كيف حالك؟",
    "नमस्ते दुनिया, आप कैसे हैं?",
    "สวัสดีชาวโลก สบายดีไหม",
    "Ünïcödé façade naïve 1234567890 3.14",
    "<s> [INST] hi [/INST] hello </s>",
]

TEXTS = [
    "",
    "Hello world",
    "hello",
    "The lazy dog's 12345 foxes, 3.14 times!",
    "a  b   c    d",
    "tab\tand\nnewline\r\n\n\nend\n",
    "    indented\n\t\tcode(x=[1, 2], y={'a': \"b\"})",
    "你好，世界！龘",
    "مرحبا بالعالم",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก ภาษาไทย",
    "e\u0301 n\u0303 o\u0302\u0323 Z\u0351\u036b\u0343",
    "😀 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U0010ffff \u0000 \ufeff \u200b",
    "literal � replacement �",
    "<0x0A> <0xE4> ▁",
    "x" * 300,
    "ends with a space ",
]

SPECIAL_TEXTS = [
    "<s>[INST] hi [/INST]",
    "<s>hello</s><s>again",
    "a<s>b</s>c",
    "hello<tool>world",
    "<tool>hello",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "x<unk>y",
    "</s></s>",
    "<s",
    "<|im_end",
]

# Texts as people mix them: pieces of the above, special tokens and arbitrary characters.
mixed_texts = st.lists(
    st.sampled_from(TEXTS + SPECIAL_TEXTS + ["<s>", "</s>", "<|im_end|>", "<tool>", " ", "▁", "\n"])
    | st.text(max_size=8),
    max_size=8,
).map("".join)


# --- the tokenizers under test ---


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of the SmolLM2 / Llama-3 kind: byte-level BPE, digits split, the marks of a chat."""
    folder = tmp_path_factory.mktemp("byte_level")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 10, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("日本", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "<|im_end|>"})
    return folder


@pytest.fixture(scope="session")
def spm_model() -> bytes:
    """A SentencePiece model with the training options of Llama."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 10),
        model_writer=model,
        vocab_size=440,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        character_coverage=0.99,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.fixture(scope="session")
def spm(spm_model: bytes) -> Any:
    processor = sentencepiece.SentencePieceProcessor()
    processor.load_from_serialized_proto(spm_model)
    return processor


ADDED_TO_SPM = {"<|im_start|>": True, "<|im_end|>": True, "<tool>": False}  # text: special?


@pytest.fixture(scope="session")
def make_spm_folder(tmp_path_factory: pytest.TempPathFactory, spm_model: bytes, spm: Any) -> Callable[..., Path]:
    def make(**config: object) -> Path:
        folder = tmp_path_factory.mktemp("spm")
        (folder / "tokenizer.model").write_bytes(spm_model)
        size = spm.get_piece_size()
        added = {
            str(size + place): {"content": text, "special": special, "lstrip": False, "rstrip": False}
            for place, (text, special) in enumerate(ADDED_TO_SPM.items())
        }
        write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": added, **config})
        return folder

    return make


@pytest.fixture(scope="session")
def llama_vocab(spm: Any) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and the merges of the SentencePiece model, as BPE of the tokenizers library wants them."""
    pieces = [spm.id_to_piece(id) for id in range(spm.get_piece_size())]
    vocab = {piece: id for id, piece in enumerate(pieces)}
    merges = []
    for piece in pieces:
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        pairs = [(left, right) for left, right in splits if left in vocab and right in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return vocab, sorted(merges, key=lambda pair: -spm.get_score(vocab["".join(pair)]))


@pytest.fixture(scope="session")
def llama_json(tmp_path_factory: pytest.TempPathFactory, llama_vocab: tuple[dict[str, int], list]) -> Path:
    """A tokenizer.json of the Llama-2 kind: BPE with byte fallback, `▁` for spaces, one put in front of each text."""
    folder = tmp_path_factory.mktemp("llama_json")
    vocab, merges = llama_vocab
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    for text, special in ADDED_TO_SPM.items():
        tokenizer.add_tokens([AddedToken(text, special=special, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    return folder


@pytest.fixture(scope="session")
def metaspace_json(tmp_path_factory: pytest.TempPathFactory, llama_json: Path) -> Path:
    """The same vocabulary in a file with the Metaspace pre-tokenizer and decoder, without byte fallback."""
    folder = tmp_path_factory.mktemp("metaspace_json")
    shutil.copytree(llama_json, folder, dirs_exist_ok=True)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.model.byte_fallback = False
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


JSON_KINDS = ["byte_level", "llama_json", "metaspace_json"]


@pytest.fixture(params=JSON_KINDS)
def json_folder(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["byte_level", "llama_json", "spm"])
def any_tokenizer(request: pytest.FixtureRequest, make_spm_folder: Callable[..., Path]) -> Tokenizer:
    return load_tokenizer(make_spm_folder() if request.param == "spm" else request.getfixturevalue(request.param))


def pushed(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens=skip)
    return [*(stream.push(id) for id in ids), stream.flush()]


# --- tokenizer.json ---


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_json_agrees_with_transformers(json_folder: Path, add_special_tokens: bool) -> None:
    judge = transformers.PreTrainedTokenizerFast.from_pretrained(str(json_folder))
    tokenizer = load_tokenizer(json_folder)
    assert tokenizer.vocab_size == len(judge)
    for text in TEXTS + SPECIAL_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        assert ids == judge.encode(text, add_special_tokens=add_special_tokens), text
        for skip in (True, False):
            decoded = judge.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == decoded, text
            assert "".join(pushed(tokenizer, ids, skip=skip)) == decoded, text


@settings(UNHURRIED, max_examples=60)
@given(text=mixed_texts, skip=st.booleans())
@pytest.mark.parametrize("kind", ["byte_level", "llama_json"])
def test_json_streams_any_text(request: pytest.FixtureRequest, kind: str, text: str, skip: bool) -> None:
    folder = request.getfixturevalue(kind)
    judge = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(text)
    assert ids == judge.encode(text).ids
    whole = judge.decode(ids, skip_special_tokens=skip)
    shown = ""
    stream = tokenizer.stream(skip_special_tokens=skip)
    for count, id in enumerate(ids, start=1):
        shown += stream.push(id)
        assert whole.startswith(shown), "what was shown is final"
        settled = judge.decode(ids[:count], skip_special_tokens=skip).rstrip("�")
        assert len(shown) >= len(settled), "nothing but an unfinished character is held back"
    assert shown + stream.flush() == whole


@settings(UNHURRIED, max_examples=60)
@given(data=st.data(), skip=st.booleans())
@pytest.mark.parametrize("kind", ["byte_level", "metaspace_json"])
def test_decoders_stream_any_ids(request: pytest.FixtureRequest, kind: str, data: st.DataObject, skip: bool) -> None:
    folder = request.getfixturevalue(kind)
    judge = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    assert "".join(pushed(tokenizer, ids, skip=skip)) == judge.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["byte_level", "metaspace_json", "llama_json"])
def test_every_id_decodes_as_the_library_decodes_it(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> None:
    """But for added tokens of byte-level tokenizers, which are text: the library takes their letters for bytes."""
    source = request.getfixturevalue(kind)
    judge = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    words = ["đem", "č", "é", "ĠĊ", "Ġx", "<0x41>", "▁y", "日本語"]
    judge.add_tokens([AddedToken(word, normalized=False) for word in words])
    judge.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    for id in range(tokenizer.vocab_size):
        word = judge.id_to_token(id)
        text = word if kind == "byte_level" and word in words else judge.decode([id], skip_special_tokens=False)
        assert tokenizer.decode([id], skip_special_tokens=False) == text
    if kind == "byte_level":
        text = "".join(words)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(words) and tokenizer.decode(ids) == text
        assert [tokenizer.token_bytes(id).decode() for id in ids] == words


def test_truncation_and_padding_of_the_file_are_off(byte_level: Path, tmp_path: Path) -> None:
    shutil.copytree(byte_level, tmp_path, dirs_exist_ok=True)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.enable_truncation(4)
    library.enable_padding(length=64)
    library.save(str(tmp_path / "tokenizer.json"))
    text = "The quick brown fox"
    assert len(library.encode(text).ids) == 64
    assert load_tokenizer(tmp_path).encode(text) == load_tokenizer(byte_level).encode(text)


def test_tokens_that_only_the_config_calls_special(byte_level: Path, tmp_path: Path) -> None:
    """The token chosen as EOS is an ordinary one of the vocabulary; the other one is in no vocabulary at all."""
    shutil.copytree(byte_level, tmp_path, dirs_exist_ok=True)
    eos = next(
        token for token in load_tokenizer(byte_level)._tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{2,}", token)
    )
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": eos, "additional_special_tokens": ["<nowhere>"]})
    tokenizer = load_tokenizer(tmp_path)
    judge = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ids = tokenizer.encode(f"hello{eos}hello")
    assert ids == judge.encode(f"hello{eos}hello")
    assert tokenizer.eos_id == judge.eos_token_id
    assert tokenizer.eos_id in tokenizer.special_ids
    assert tokenizer.decode(ids) == judge.decode(ids, skip_special_tokens=True) == "hellohello"
    # What no vocabulary has gets an id after all others, which the model has no place for.
    assert tokenizer.token_to_id("<nowhere>") == judge.convert_tokens_to_ids("<nowhere>") >= tokenizer.base_size


# --- SentencePiece ---


def spm_judge(llama_vocab: tuple[dict[str, int], list], legacy: bool) -> Any:
    """transformers' LlamaTokenizer with the same vocabulary."""
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("before version 5, transformers' LlamaTokenizer cannot be built from a vocabulary and merges")
    vocab, merges = llama_vocab
    judge = transformers.LlamaTokenizer(vocab=dict(vocab), merges=list(merges), legacy=legacy)
    for text, special in ADDED_TO_SPM.items():
        judge.add_tokens([AddedToken(text, special=special, normalized=False)], special_tokens=special)
    return judge


def swallows_a_space(text: str, legacy: bool) -> bool:
    """Whether LlamaTokenizer of transformers 5 takes a space of the writer's for the one that it should have added.

    SentencePiece (and LlamaTokenizer of transformers 4) keeps both.
    """
    ends = "|".join(map(re.escape, ["<unk>", "<s>", "</s>", *ADDED_TO_SPM]))
    return re.search(f"(?:^|{ends})[ ▁]" if legacy else "^[ ▁]", text) is not None


@pytest.mark.parametrize("legacy", [True, False])
def test_spm_agrees_with_transformers(make_spm_folder, llama_vocab, legacy):
    judge = spm_judge(llama_vocab, legacy)
    tokenizer = load_tokenizer(make_spm_folder(legacy=legacy))
    assert tokenizer.vocab_size == len(judge)
    texts = [text for text in TEXTS + SPECIAL_TEXTS if not swallows_a_space(text, legacy)]
    assert len(texts) > len(TEXTS)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == judge.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            decoded = judge.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert "".join(pushed(tokenizer, ids, skip=skip)) == decoded, text


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("text", [*TEXTS, " one", "  two", "\u2581mark"])
def test_spm_of_plain_text_is_what_sentencepiece_says(make_spm_folder, spm, legacy, text):
    tokenizer = load_tokenizer(make_spm_folder(legacy=legacy))
    assert tokenizer.encode(text, add_special_tokens=False) == spm.encode(text, out_type=int)


def test_space_after_special_tokens(make_spm_folder: Callable[..., Path]) -> None:
    def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
        return [tokenizer.id_to_token(id) for id in tokenizer.encode(text, add_special_tokens=False)]

    default, legacy, new = (
        load_tokenizer(make_spm_folder(**options)) for options in ({}, {"legacy": True}, {"legacy": False})
    )
    assert pieces(legacy, "<s>hi")[:2] == ["<s>", "▁"]
    assert pieces(default, "<s>hi") == pieces(legacy, "<s>hi")
    assert "▁" not in "".join(filter(None, pieces(new, "<s>hi")))
    assert "".join(filter(None, pieces(new, "<s> hi"))) == "<s>▁hi"
    assert "".join(filter(None, pieces(new, "hi<s>hi"))) == "▁hi<s>hi"
    assert "".join(filter(None, pieces(new, "<tool>hi"))) == "<tool>hi"
    bare = load_tokenizer(make_spm_folder(legacy=False, add_prefix_space=False))
    assert "".join(filter(None, pieces(bare, "hi hi"))) == "hi▁hi"
    assert bare.decode(bare.encode(" hi hi")) == " hi hi"


def test_spm_strips_around_added_tokens(make_spm_folder: Callable[..., Path], spm: Any) -> None:
    size = spm.get_piece_size()
    added = {
        str(size): {"content": "<left>", "lstrip": True},
        str(size + 1): {"content": "<right>", "rstrip": True, "special": True},
        str(size + 2): {"content": "<right>er"},
    }
    tokenizer = load_tokenizer(make_spm_folder(legacy=False, added_tokens_decoder=added))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    assert encode("hi \n <left> hi") == [*encode("hi"), size, *encode("<s> hi")[1:]]
    assert encode("hi <right> \n hi") == [*encode("hi "), size + 1, *encode("<s>hi")[1:]]
    assert encode("  <left>") == [size]
    assert encode("<right>er") == [size + 2], "the longest token that starts at a character is meant"


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": None, "add_eos_token": None}, [1], []),
        ({"add_eos_token": True, "eos_token": "<|im_end|>"}, [1], [441]),
    ],
)
def test_spm_adds_what_the_config_says(make_spm_folder, options, before, after):
    tokenizer = load_tokenizer(make_spm_folder(**options))
    inner = tokenizer.encode("hello", add_special_tokens=False)
    assert inner
    assert tokenizer.encode("hello") == before + inner + after


@settings(UNHURRIED, max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize("kind", ["spm", "llama_json"])
def test_byte_fallback_streams_any_ids(request, make_spm_folder, spm, kind, data):
    """Against sentencepiece itself, which writes one U+FFFD for every invalid byte, where we write one for several."""
    tokenizer = load_tokenizer(make_spm_folder() if kind == "spm" else request.getfixturevalue("llama_json"))
    # Many bytes, among them the first and the last ones of characters, in between pieces of text. No space as a byte:
    # at the start of a text the libraries disagree about it, and no text is encoded to it.
    any_id = st.integers(3, 258) | st.integers(3, spm.get_piece_size() - 1)
    ids = data.draw(st.lists(any_id.filter(lambda id: spm.id_to_piece(id) != "<0x20>"), max_size=40))
    text = "".join(pushed(tokenizer, ids))
    assert re.sub("�+", "�", text) == re.sub("�+", "�", spm.decode(ids))


def test_an_answer_that_goes_on_from_a_text(any_tokenizer: Tokenizer) -> None:
    text, more = "hello", " hello 你好"
    ids = any_tokenizer.encode(text + more, add_special_tokens=False)
    stream = any_tokenizer.stream()
    shown = ""
    while shown != text:
        shown += stream.push(ids.pop(0))
    assert "".join(stream.push(id) for id in ids) + stream.flush() == more


# --- what all of them promise ---


def test_invalid_bytes_do_not_pile_up(any_tokenizer: Tokenizer) -> None:
    start_of_four = any_tokenizer.encode("a😀", add_special_tokens=False)[-4]
    stream = any_tokenizer.stream()
    for count in range(1, 5001):
        stream.push(start_of_four) if count == 1 else None
        assert count == 1 or stream.push(start_of_four) == "�"
    assert stream.flush() == "�"


def test_to_follow_a_text_is_to_push_all_of_it(any_tokenizer: Tokenizer) -> None:
    rng = random.Random(7)
    bytes_of_characters = any_tokenizer.encode("😀é你 a", add_special_tokens=False)
    any_id = [*range(any_tokenizer.vocab_size), *any_tokenizer.special_ids, any_tokenizer.vocab_size, -1]
    for _ in range(300):
        text, more = (
            [rng.choice(rng.choice((bytes_of_characters, any_id))) for _ in range(rng.randrange(15))] for _ in range(2)
        )
        skip = rng.random() < 0.5
        pushed, followed = (any_tokenizer.stream(skip_special_tokens=skip) for _ in range(2))
        for id in text:
            pushed.push(id)
        followed.follow(text)
        assert [pushed.push(id) for id in more] == [followed.push(id) for id in more], (text, more)
        assert pushed.flush() == followed.flush()


def test_to_follow_a_long_text_looks_at_its_ends_alone(any_tokenizer: Tokenizer) -> None:
    stream, looked = any_tokenizer.stream(), []
    piece = stream._piece
    stream._piece = lambda id, first: looked.append(id) or piece(id, first)
    stream.follow(any_tokenizer.encode("lorem ipsum " * 1000))
    assert len(looked) < 20


def test_special_tokens_and_unknown_ids_in_a_stream(any_tokenizer: Tokenizer) -> None:
    special = sorted(any_tokenizer.special_ids)
    nothing = [any_tokenizer.vocab_size, any_tokenizer.vocab_size + 10**6, 2**40, -1]
    ids = any_tokenizer.encode("hello 你好😀 world", add_special_tokens=False)
    between = [id for original in ids for id in (*special, *nothing, original)]
    assert "".join(pushed(any_tokenizer, [*between, *special, *nothing])) == "hello 你好😀 world"
    assert any_tokenizer.decode([*special, *nothing]) == ""
    assert [any_tokenizer.id_to_token(id) for id in nothing] == [None] * 4


def test_lone_surrogate(any_tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"character 3 is a lone surrogate \(U\+D83D\)"):
        any_tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize("kind", ["byte_level", "spm"])
@pytest.mark.parametrize(
    ("config", "special_map", "bos", "eos"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, {}, "<s>", "</s>"),
        ({"bos_token": {"content": "</s>"}, "eos_token": {"content": "<s>"}}, {}, "</s>", "<s>"),
        ({"bos_token": None}, {"bos_token": "</s>", "eos_token": {"content": "<|im_end|>"}}, "</s>", "<|im_end|>"),
        ({"eos_token": "</s>", "added_tokens_decoder": {}}, {"eos_token": "<|im_end|>"}, None, "</s>"),
        ({"eos_token": "</s>", "added_tokens_decoder": None}, {"eos_token": "<unk>"}, None, "<unk>"),
        (None, {"bos_token": "<s>", "eos_token": "</s>"}, "<s>", "</s>"),
    ],
)
def test_bos_and_eos(byte_level, make_spm_folder, tmp_path, kind, config, special_map, bos, eos):
    shutil.copytree(byte_level if kind == "byte_level" else make_spm_folder(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    if config is None:
        path.unlink()
    else:
        write_json(path, json.loads(path.read_text()) | {"bos_token": "<s>", "eos_token": None} | config)
    write_json(tmp_path / "special_tokens_map.json", special_map)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_id == tokenizer.token_to_id(bos or "<s>")
    assert tokenizer.eos_id == tokenizer.token_to_id(eos)
    assert {tokenizer.eos_id} <= tokenizer.special_ids


# --- errors ---


def error_of(folder: Path, vocab_size: int | None = None) -> str:
    with pytest.raises(PpsdError) as caught:
        load_tokenizer(folder, vocab_size)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 1000
    return message


def test_vocabulary_larger_than_the_model(byte_level: Path, make_spm_folder: Callable[..., Path]) -> None:
    for folder, file in ((byte_level, "tokenizer.json"), (make_spm_folder(), "tokenizer.model")):
        size = load_tokenizer(folder).base_size
        assert load_tokenizer(folder, size).vocab_size > size  # tokens that were added, and that nobody uses
        load_tokenizer(folder, size + 64)
        assert f"{file}: its vocabulary is of {size} tokens" in error_of(folder, size - 1)


def test_tiktoken_in_the_place_of_sentencepiece(tmp_path: Path) -> None:
    """Meta's own Llama 3 files have it."""
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\nIw== 2\n")
    assert "tokenizer.model: its vocabulary is of no use" in error_of(tmp_path)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("options", [{"model_type": "unigram"}, {"model_type": "bpe", "split_digits": True}])
def test_other_sentencepiece_models(tmp_path: Path, options: dict[str, Any], legacy: bool) -> None:
    """SentencePiece's usual kind; and with its usual normalisation, which folds spaces."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 10), model_writer=model, vocab_size=380, byte_fallback=True,
        character_coverage=0.99, minloglevel=2, **options,
    )  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    write_json(tmp_path / "tokenizer_config.json", {"legacy": legacy})
    tokenizer, judge = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in ("Hello world", "a  b   c", "The ﬁrst ①", "你好，世界！龘", "Ünïcödé 12345", "x" * 50):
        ids = judge.encode(text, out_type=int)
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == judge.decode(ids)
    for text in (
        ("<s>hello</s> world", "<s>hello</s>▁world") if not legacy else ()
    ):  # inside a text spaces separate words
        assert tokenizer.decode(tokenizer.encode(text)) == "hello world"


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens_decoder": {"A": "<a>", "B": "<b>"}},
        {"added_tokens_decoder": {"A": {"content": "<a>", "special": False, "lstrip": True}, "B": "<b>"}},
        {"added_tokens_decoder": {"A": {"content": "<a>", "rstrip": True}, "4": "<|im_end|>"}},
        {"added_tokens_decoder": {"A": {"content": "<a>", "single_word": True}}, "split_special_tokens": True},
        {"added_tokens_decoder": {"A": "<a>"}, "additional_special_tokens": ["<b>", "e"]},
        {"added_tokens.json": {"<a>": "A", "<b>": "B"}, "extra_special_tokens": ["<b>"]},
        {"split_special_tokens": True},
        {"pad_token": "<b>", "bos_token": "<|im_end|>"},
    ],
)
def test_tokens_that_tokenizer_json_lacks(byte_level: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """As transformers adds them: recognised in text, hidden from answers where they are special."""
    shutil.copytree(byte_level, tmp_path, dirs_exist_ok=True)
    end = load_tokenizer(byte_level).vocab_size
    ids = {"A": end, "B": end + 1, "4": load_tokenizer(byte_level).token_to_id("<|im_end|>")}
    config = {"chat_template": CHATML, "eos_token": "</s>", **changes}
    added = config.pop("added_tokens.json", None)
    if added:
        write_json(tmp_path / "added_tokens.json", {text: ids[id] for text, id in added.items()})
    if "added_tokens_decoder" in config:
        entries = config["added_tokens_decoder"].items()
        config["added_tokens_decoder"] = {
            str(ids[id]): {**FLAGS, **({"content": entry} if isinstance(entry, str) else entry)}
            for id, entry in entries
        }
    write_json(tmp_path / "tokenizer_config.json", {**config, "tokenizer_class": "PreTrainedTokenizerFast"})
    ours, judge = load_tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("x <a> y", "x<b> <|im_end|>  y", "<a><b>", "he<a>llo<b>", "hello </s>!", "<|im_end|><a> <a>"):
        found = ours.encode(text)
        assert found == judge(text)["input_ids"]
        assert ours.decode(found) == judge.decode(found, skip_special_tokens=True)
    chat = [{"role": "user", "content": "hi <a>"}]
    assert ours.chat_template is not None
    rendered = ours.chat_template.render(chat)
    assert ours.encode(rendered, add_special_tokens=False) == judge.apply_chat_template(chat)["input_ids"]


def test_nothing_to_load(tmp_path: Path) -> None:
    assert "neither tokenizer.json nor tokenizer.model" in error_of(tmp_path)
    assert "there is no folder" in error_of(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").mkdir()
    assert "tokenizer.json: Is a directory" in error_of(tmp_path)


def damaged_json(byte_level: Path, tmp_path: Path, **changes: object) -> Path:
    value = json.loads((byte_level / "tokenizer.json").read_text(encoding="utf-8"))
    write_json(tmp_path / "tokenizer.json", value | changes)
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {
            "model": {
                "type": "BPE",
                "vocab": {"a": 0, "b": 1, "ab": 2},
                "merges": ["a b"],
                "continuing_subword_prefix": "####",
            }
        },
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        },
    ],
    ids=["model", "normalizer", "post_processor"],
)
def test_panic_in_the_library(byte_level, tmp_path, changes):
    folder = damaged_json(byte_level, tmp_path, **changes)
    with pytest.raises(BaseException) as raw:  # noqa: PT011 - a panic is no Exception, and has no public type
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode("ab")
    assert raw.type.__name__ == "PanicException", "this file must make the library panic for the test to mean anything"
    assert str(folder / "tokenizer.json") in error_of(folder)


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        None,
        {"type": "Strip", "content": "_", "start": 1, "stop": 0},
        {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"},
        {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]},
    ],
)
def test_unsupported_decoder(byte_level: Path, tmp_path: Path, decoder: dict[str, object] | None) -> None:
    message = error_of(damaged_json(byte_level, tmp_path, decoder=decoder))
    assert "tokenizer.json: its decoder is " in message


def test_a_damaged_model_gives_an_error_or_a_tokenizer(make_spm_folder: Callable[..., Path]) -> None:
    """Cut short, or with bytes exchanged. What is JSON is damaged by fuzz/test_fuzz.py."""
    folder, rng, refused = make_spm_folder(eos_token="</s>", legacy=False), random.Random(7), 0
    good = (folder / "tokenizer.model").read_bytes()
    for number in range(200):
        bad = bytearray(good[: number * len(good) // 50])
        if number >= 50:
            bad = bytearray(good)
            for _ in range(rng.choice([1, 1, 2, 8])):
                bad[rng.randrange(len(bad))] = rng.randrange(256)
        (folder / "tokenizer.model").write_bytes(bad)
        try:
            tokenizer = load_tokenizer(folder, vocab_size=2000)
            ids = tokenizer.encode("Hello 你好 <s> 😀</s>")
            assert isinstance(tokenizer.decode([*ids, *range(600)]), str)
        except PpsdError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 50, "the damage is too mild to test anything"
