"""SentencePiece's tokenizers as `tokenizers` tokenizers that give the same ids: of a `tokenizer.model`, of a GGUF file.

What the numbers of fields mean is in SentencePiece's `sentencepiece_model.proto`; GGUF has its kinds of pieces too.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from .files import read_bytes

MOST_BYTES = 1 << 28  # of tokenizer.json or tokenizer.model; vocabularies of 256 000 tokens take an eighth of it
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2

Steps = Sequence[normalizers.Normalizer]


@dataclass(frozen=True)
class Pieces:
    """A vocabulary in id order. unknown: the token for what it lacks. prefix: a space is put before each text."""

    texts: list[str]
    kinds: list[int]
    scores: list[float]
    unknown: str | None
    prefix: bool

    def bpe(self, merges: Sequence[tuple[str, str]] | None = None) -> models.BPE:
        """merges: None: by the scores."""
        vocabulary = {text: id for id, text in enumerate(self.texts)}
        merges = self._merges() if merges is None else list(merges)
        return models.BPE(vocabulary, merges, unk_token=self.unknown, fuse_unk=True, byte_fallback=True)

    def unigram(self) -> models.Unigram:
        unknown = None if self.unknown is None else self.texts.index(self.unknown)
        return models.Unigram([*zip(self.texts, self.scores, strict=True)], unknown, True)

    def _merges(self) -> list[tuple[str, str]]:
        """Those that SentencePiece makes: it joins the neighbours whose union has the best score."""
        whole = zip(self.texts, self.kinds, self.scores, strict=True)
        mergeable = {text: score for text, kind, score in whole if kind in (NORMAL, USER_DEFINED)}
        found = [
            (text[:cut], text[cut:])
            for text in mergeable
            for cut in range(1, len(text))
            if text[:cut] in mergeable and text[cut:] in mergeable
        ]
        return sorted(found, key=lambda pair: -mergeable[pair[0] + pair[1]])

    def tokenizer(self, model: models.Model, steps: Steps = (), everywhere: bool = True) -> Tokenizer:
        """steps: before spaces become letters. everywhere: the space comes before every stretch of text between special
        tokens, as SentencePiece and llama.cpp have it; else nowhere."""
        tokenizer = Tokenizer(model)
        before = [normalizers.Prepend("▁")] if self.prefix and everywhere else []
        tokenizer.normalizer = normalizers.Sequence([*steps, *before, normalizers.Replace(" ", "▁")])
        after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*after, *([decoders.Strip(" ", 1, 0)] if self.prefix else [])])
        add_special_tokens(tokenizer, self.texts, self.kinds)
        return tokenizer


def add_special_tokens(tokenizer: Tokenizer, texts: Sequence[str], kinds: Sequence[int]) -> None:
    """Control tokens are recognised in text and hidden when decoding; user-defined ones are only recognised."""
    typed = list(zip(texts, kinds, strict=True))
    special = [text for text, kind in typed if kind in (CONTROL, UNKNOWN)]
    plain = [text for text, kind in typed if kind == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])


def surround(tokenizer: Tokenizer, before: str | None, after: str | None) -> None:
    """Put these tokens around every text; None: nothing."""
    first, last = ([] if text is None else [text] for text in (before, after))
    if first or last:
        ids = {text: tokenizer.token_to_id(text) for text in (*first, *last)}
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{text}:1" for text in first), "$B:1", *(f"{text}:1" for text in last)],
            special_tokens=[(text, id) for text, id in ids.items() if id is not None],
        )


def read_sentencepiece(path: Path, legacy: bool, prefix: bool | None) -> tuple[Pieces, Tokenizer]:
    """A `tokenizer.model`. Raises what parsing and the library raise for another file.

    legacy: each stretch of text between special tokens counts as a text of its own. Else `prefix` may say that no space
    is put before texts, and otherwise who encodes puts it there.
    """
    texts, kinds, scores, kind, charsmap, space, folds = [], [], [], _UNIGRAM, b"", True, True
    for number, value in _fields(read_bytes(path, MOST_BYTES)):
        inner = dict(_fields(value)) if number in (1, 2, 3) else {}
        if number == 1:
            texts.append(inner[1].decode())
            scores.append(struct.unpack("<f", inner[2])[0] if 2 in inner else 0.0)
            kinds.append(inner.get(3, NORMAL))
        elif number == 2:
            kind = inner.get(3, _UNIGRAM)
        elif number == 3:
            charsmap, space, folds = inner.get(2, b""), bool(inner.get(3, 1)), bool(inner.get(4, 1))
    if not texts or len(set(texts)) != len(texts) or kind not in (_UNIGRAM, _BPE):
        raise ValueError("no vocabulary of SentencePiece's kinds BPE or unigram")
    unknown = texts[kinds.index(UNKNOWN)] if UNKNOWN in kinds else None
    pieces = Pieces(texts, kinds, scores, unknown, space if legacy or prefix is None else prefix)
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if folds:
        steps += [normalizers.Replace(Regex(" +"), " "), *([normalizers.Strip()] if legacy else [])]
    return pieces, pieces.tokenizer(pieces.bpe() if kind == _BPE else pieces.unigram(), steps, legacy)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The number and the value of each field of a protobuf message. Raises IndexError or KeyError where it is none."""
    place = 0

    def varint() -> int:
        nonlocal place
        value = 0
        for shift in range(0, 64, 7):
            byte = data[place]
            place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise IndexError("a number without an end")

    while place < len(data):
        key = varint()
        if key & 7 == 0:
            yield key >> 3, varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        if size > len(data) - place:
            raise IndexError("it ends too early")
        place += size
        yield key >> 3, data[place - size : place]
