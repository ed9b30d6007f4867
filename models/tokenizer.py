"""Text to token ids and back: `tokenizer.json`, SentencePiece's `tokenizer.model`, GGUF; by the library `tokenizers`.

Decoding does not go through the library. Its decoders take the whole answer, so that showing an
answer while it is written means decoding it again and again. Here every token stands for some bytes, and an answer is
their concatenation read as UTF-8: the whole decoder state of a stream is an unfinished character. `decode` is a stream
that is given everything at once, so the two can never differ.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from ..arguments import check_unicode
from ..errors import PpsdError
from .chat_template import ChatTemplate, TokenFiles, token_content
from .config import Reader
from .files import is_gguf, one_line, read_text, shown, unfit
from .pieces import MOST_BYTES, read_sentencepiece, surround

if TYPE_CHECKING:
    from .gguf_model import GgufModel

_LONG = 1 << 13  # characters, whose encoding takes other threads' time

# What a token stands for, given whether it is the first one of the text. None: no such token.
_Piece = Callable[[int, bool], bytes | None]
_UNFINISHED = 3  # bytes of a character that may wait for its last one


def load_tokenizer(folder: Path, vocab_size: int | None = None, gguf: GgufModel | None = None) -> Tokenizer:
    """The tokenizer of a .gguf file or a model folder: its tokenizer.json, or else its SentencePiece tokenizer.model.

    Special tokens and options come from tokenizer_config.json, special_tokens_map.json and added_tokens.json beside it,
    all of which may be missing. `vocab_size` is the number of rows in the model's embedding.
    `gguf`: the .gguf file, where it has been read already.

    Raises PpsdError, one line with the file and the mend, when there is no tokenizer, when a file cannot be read or is
    damaged, when it uses a feature that is not supported, when the named EOS token is not in the vocabulary (answers
    would never end), and when the tokenizer has ids at or beyond `vocab_size`, other than those of added tokens.
    """
    folder = Path(folder)
    json_path, model_path = folder / "tokenizer.json", folder / "tokenizer.model"
    tokenizer: Tokenizer
    if is_gguf(folder):
        if gguf is None:
            from .gguf_model import open_tensors  # it takes packages that models in folders do without

            gguf = open_tensors(folder).model
        files = TokenFiles(folder, gguf.tokenizer_config(), {}, {})
        path, tokenizer = folder, _JsonTokenizer(folder, files, gguf.tokenizer())
        if templates := files.config.get("chat_template"):
            tokenizer.chat_template = ChatTemplate(templates, files.names, origin=str(folder))
    elif not folder.is_dir():
        raise PpsdError(f"there is no folder {folder}: give the folder of a model")
    elif json_path.exists() or model_path.exists():
        path, kind = (json_path, _JsonTokenizer) if json_path.exists() else (model_path, _SentencePieceTokenizer)
        tokenizer = kind(path, TokenFiles.read(folder))
        tokenizer.chat_template = ChatTemplate.from_folder(folder)
    else:
        raise PpsdError(f"{folder} has neither tokenizer.json nor tokenizer.model: copy one from the model's source")
    if vocab_size is not None and tokenizer.base_size > vocab_size:
        raise unfit(path, "its vocabulary", f"of {tokenizer.base_size} tokens", f"one of at most {vocab_size}")
    return tokenizer


class Tokenizer(ABC):
    """Text to ids and back.

    vocab_size:    one more than the greatest id
    base_size:     the same without added tokens, some of which (for padding) may have no place in the model
    bos_id/eos_id: begin and end of a text; None where the folder names none
    special_ids:   control tokens, which are not part of a text (BOS, EOS, the marks of a chat)
    chat_template: turns messages into a prompt; None where the folder has none
    """

    vocab_size: int
    base_size: int
    bos_id: int | None
    eos_id: int | None
    special_ids: frozenset[int]
    chat_template: ChatTemplate | None = None
    _leading_spaces: int  # how many spaces at the start of a text are the tokenizer's own and not the writer's

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, in which the text of special and added tokens stands for these tokens.

        `add_special_tokens` adds what the tokenizer puts around a text (usually BOS in front); a rendered chat template
        has it already. Raises UsageError for text that is not valid Unicode (a lone surrogate), and PpsdError when the
        tokenizer itself fails.
        """
        check_unicode(text)
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`, exactly as the `IncrementalDecoder` of `stream` gives it piece by piece."""
        stream = self.stream(skip_special_tokens=skip_special_tokens)
        return "".join([stream.push(id) for id in ids] + [stream.flush()])

    def stream(self, *, skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for one answer that is still being written.

        Tokenizers that put a space in front of every text take one off the start of the answer. Where the answer goes
        on from a text, that space belongs to it: `follow` that text first.
        """
        skipped: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        return IncrementalDecoder(self._piece, skipped, self._leading_spaces)

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """The id of a token of the vocabulary, None for any other string."""

    @abstractmethod
    def id_to_token(self, id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġhello`, `▁hello`, `<0x0A>`), None for an id outside of it."""

    def token_bytes(self, id: int) -> bytes:
        """What a token stands for inside a text, special tokens included; nothing for an id outside the vocabulary."""
        return self._piece(id, False) or b""

    @abstractmethod
    def _encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def _piece(self, id: int, first: bool) -> bytes | None: ...


class IncrementalDecoder:
    """Turns the ids of one answer into text as they come; made by `Tokenizer.stream`.

    What `push` returns is final. A character that spans tokens is held back until its last byte is there, which holds
    back at most three bytes and costs the same at every length of the answer. Bytes that are not UTF-8 never wait for
    better ones: as soon as a byte cannot continue a character, what was held becomes one U+FFFD (the substitution that
    Unicode recommends), so endless invalid bytes come out as U+FFFD one push later at most. This agrees with the
    `tokenizers` library for all ids of byte-level tokenizers. With byte-fallback tokenizers the library replaces every
    byte of a run of byte tokens when any of them is invalid, which no stream can do; here the valid characters stay.

    Ids outside the vocabulary, and special tokens if they are skipped, stand for nothing at all.
    """

    def __init__(self, piece: _Piece, skipped: frozenset[int], leading_spaces: int) -> None:
        self._piece = piece
        self._skipped = skipped
        self._leading_spaces = leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = True

    def push(self, id: int) -> str:
        """The text that became final with this id, possibly empty."""
        if id in self._skipped:
            return ""
        piece = self._piece(id, self._first)
        if piece is None:
            return ""
        self._first = False
        return self._without_leading_spaces(self._utf8.decode(piece))

    def follow(self, ids: Sequence[int]) -> None:
        """As if these had been pushed: the stream goes on from their text. Of a long one only the ends are read."""
        begun = 0
        while begun < len(ids) and (self._first or self._leading_spaces):
            self.push(ids[begun])
            begun += 1
        last, size = len(ids), 0
        while last > begun and size < _UNFINISHED:
            last -= 1
            size += len((ids[last] not in self._skipped and self._piece(ids[last], False)) or b"")
        for id in ids[last:]:  # a character begins anew with its first byte, whatever is before
            self.push(id)

    def flush(self) -> str:
        """What was held back: U+FFFD if the answer ends inside a character, else nothing. The stream ends here."""
        return self._without_leading_spaces(self._utf8.decode(b"", final=True))

    def _without_leading_spaces(self, text: str) -> str:
        spaces = min(len(text) - len(text.lstrip(" ")), self._leading_spaces)
        self._leading_spaces = 0 if len(text) > spaces else self._leading_spaces - spaces
        return text[spaces:]


class _JsonTokenizer(Tokenizer):
    """tokenizer.json through the `tokenizers` library.

    The file rules: whether BOS or EOS is added is what its post-processor says (as in transformers 5, `add_bos_token`
    of tokenizer_config.json has no say), and its truncation and padding are switched off.
    """

    def __init__(
        self, path: Path, files: TokenFiles, made: tokenizers.Tokenizer | None = None, *, normalized: bool = True
    ) -> None:
        """made: in place of what is in `path`. normalized: what other files add may be found in normalised text."""
        text = "" if made else read_text(path, MOST_BYTES)
        with _library_errors(path):
            self._tokenizer = made or tokenizers.Tokenizer.from_str(text)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.encode("")  # a broken post-processor shows here instead of in the first prompt
            added = self._tokenizer.get_added_tokens_decoder()
            decoder = self._tokenizer.decoder
            state = None if decoder is None else json.loads(decoder.__getstate__())
            if made is None:
                self.base_size = max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1) + 1
            else:  # of a list
                self.base_size = made.get_vocab_size(with_added_tokens=False)
        self._path = path
        self._pieces: dict[tuple[int, bool], bytes] = {}  # that have been asked for
        names, given = files.names, _added_tokens(files, normalized)
        end = names.get("eos_token")
        if end and self.token_to_id(end) is None and all(token.content != end for token in given.values()):
            raise unfit(path, "its vocabulary", f"without the eos_token {end!r} of tokenizer_config.json")
        self._add_tokens(files, given)
        known = self._tokenizer.get_added_tokens_decoder()
        self._bytes_of, self._leading_spaces = _compiled_decoder(state, path, {each.content for each in known.values()})
        special = {token.content for token in known.values() if token.special}
        # A token that one file calls special stays so, whatever another one says.
        special |= {token.content for token in added.values() if token.special}
        self.vocab_size = max(self.base_size, *(id + 1 for id in known), 0)
        self.bos_id, self.eos_id = (self.token_to_id(names.get(f"{end}_token", "")) for end in ("bos", "eos"))
        ends = [self.bos_id, self.eos_id]
        self.special_ids = frozenset(id for id in [*map(self.token_to_id, special), *ends] if id is not None)

    def _add_tokens(self, files: TokenFiles, listed: dict[int, AddedToken]) -> None:
        """What the other files say of tokens: some that tokenizer.json lacks, and flags, which win over its own.

        In the order, and by the calls, of `TokenizersBackend.__init__` of transformers 5.
        """
        before = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        given = [token for _, token in sorted(listed.items())]
        texts = before | {token.content for token in given}
        given += [AddedToken(text, special=True) for text in _all_special(files) if text not in texts]
        for token in given:
            token.special = token.special or token.content in files.names.values()
        with _library_errors(files.place / "tokenizer_config.json"):
            self._tokenizer.add_tokens(given)
        self._tokenizer.encode_special_tokens = files.config.get("split_special_tokens") is True

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        return self._tokenizer.id_to_token(id) if 0 <= id < self.vocab_size else None

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with _library_errors(self._path):
            if len(text) < _LONG:
                return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
            # `encode` keeps the interpreter's lock all the while.
            return list(self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)

    def _piece(self, id: int, first: bool) -> bytes | None:
        known = self._pieces.get((id, first))
        if known is None and (token := self.id_to_token(id)) is not None:
            known = self._pieces[id, first] = self._bytes_of(token, first)
        return known


class _SentencePieceTokenizer(_JsonTokenizer):
    """tokenizer.model, as transformers' LlamaTokenizer uses it: every text starts with a space of SentencePiece's own.

    The flag `legacy` of tokenizer_config.json (true where it is missing) says which stretches count as texts:

    - legacy: each between special tokens, so a space comes after every one, too (`<s>[INST]` is `<s>`, `▁[`, ...);
    - else: the whole text is one, and only its start gets the space, unless it starts with an added token.
      `add_prefix_space` (by default what the model was trained with) says whether there is a space at all.

    `add_bos_token` is true and `add_eos_token` false where tokenizer_config.json does not say.
    """

    def __init__(self, path: Path, files: TokenFiles) -> None:
        read = Reader(files.config, files.place / "tokenizer_config.json")
        legacy, prefix = read.boolean("legacy", True), read.raw.get("add_prefix_space")
        prefix = None if prefix is None else read.boolean("add_prefix_space")
        with _library_errors(path):
            pieces, made = read_sentencepiece(path, legacy, prefix)
        super().__init__(path, files, made, normalized=False)
        self.bos_id = self.token_to_id("<s>") if self.bos_id is None else self.bos_id
        self.eos_id = self.token_to_id("</s>") if self.eos_id is None else self.eos_id
        self.special_ids |= {id for id in (self.bos_id, self.eos_id) if id is not None}
        around = ((self.bos_id, "add_bos_token", True), (self.eos_id, "add_eos_token", False))
        surround(made, *(self._token(id) if read.boolean(key, usual) else None for id, key, usual in around))
        self._prefix = " " if pieces.prefix and not legacy else ""
        self._added = tuple(token.content for token in made.get_added_tokens_decoder().values())

    def _token(self, id: int | None) -> str | None:
        return None if id is None else self.id_to_token(id)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        prefix = "" if not text or text.startswith(self._added) else self._prefix
        return super()._encode(prefix + text, add_special_tokens)


def _added_tokens(files: TokenFiles, normalized: bool = True) -> dict[int, AddedToken]:
    """The tokens that tokenizer_config.json adds, by id; where it has no such table, those of added_tokens.json."""
    path, entries = files.place / "tokenizer_config.json", files.config.get("added_tokens_decoder")
    if entries is None:
        path, special = files.place / "added_tokens.json", _all_special(files)
        entries = {str(id): {"content": content, "special": content in special} for content, id in files.added.items()}
    added = {}
    for id, entry in entries.items() if isinstance(entries, dict) else [("added_tokens_decoder", entries)]:
        content, number = token_content(entry), int(id) if str(id).isdecimal() and len(str(id)) < 19 else -1
        if content is None or number < 0 or isinstance(entry, str):
            raise unfit(path, f"the added token {shown(id)}", shown(entry), 'an object with an id and "content"')
        flags = {name: entry.get(name) is True for name in ("special", "lstrip", "rstrip", "single_word")}
        usual = entry["normalized"] is True if "normalized" in entry else not flags["special"]
        added[number] = AddedToken(content, **flags, normalized=normalized and usual)
    return added


def _all_special(files: TokenFiles) -> list[str]:
    """The texts of all tokens that a model folder calls special, named ones first, in the order of transformers."""
    order = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    texts = [files.names[key] for key in (*order, *sorted(files.names.keys() - order)) if key in files.names]
    for values in (files.special, files.config):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            extra = values.get(key) or []
            contents = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
            texts += [content for content in map(token_content, contents) if content is not None]
    return list(dict.fromkeys(texts))


@contextmanager
def _library_errors(path: Path) -> Iterator[None]:
    """One line for whatever a tokenizer library raises."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, PpsdError):
        raise
    except BaseException as error:  # a panic inside the tokenizers library is not an Exception
        raise unfit(path, "its vocabulary", f"of no use ({one_line(error)})") from error


def _compiled_decoder(
    state: dict[str, Any] | None, path: Path, added: Set[str]
) -> tuple[Callable[[str, bool], bytes], int]:
    """What the "decoder" of a tokenizer.json makes of one token, and how many leading spaces of the text it strips.

    added: tokens that are cut out of a text before its bytes get letters, so they are text where all others are bytes.
    Raises PpsdError for decoders whose result for a token depends on its neighbours; no Llama-family model has one.
    """
    steps: list[Callable[[str, bool], str | bytes]] = []
    leading_spaces = 0
    fused = False
    for spec in _flat(state):
        match spec:
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                leading_spaces += start
            case {"type": "ByteLevel"} if not fused:
                steps.append(lambda token, first: token.encode() if token in added else _byte_level(token))
                fused = True
            case {"type": "ByteFallback"} if not fused:
                steps.append(lambda token, first: bytes.fromhex(token[3:5]) if _BYTE_TOKEN.fullmatch(token) else token)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                steps.append(_replacement(old, new))
            case {"type": "Metaspace", "replacement": str(mark)} if not fused:
                steps.append(_metaspace(mark, drops_first=spec.get("prepend_scheme") != "never"))
            case _:
                raise unfit(path, "its decoder", shown(state))

    def bytes_of(token: str, first: bool) -> bytes:
        value: str | bytes = token
        for step in steps:
            if isinstance(value, bytes):
                break
            value = step(value, first)
        return value if isinstance(value, bytes) else value.encode()

    return bytes_of, leading_spaces


def _flat(state: dict[str, Any] | None) -> list[Any]:
    if state is not None and state.get("type") == "Sequence":
        return [spec for inner in state["decoders"] for spec in _flat(inner)]
    return [state]


def _byte_level(token: str) -> bytes:
    """The inverse of the byte-level alphabet; a token with other characters is its own text."""
    values = [_BYTE_OF.get(character, -1) for character in token]
    return token.encode() if -1 in values else bytes(values)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that GPT-2's byte-level alphabet uses for each byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _replacement(old: str, new: str) -> Callable[[str, bool], str]:
    return lambda token, first: token.replace(old, new)


def _metaspace(mark: str, drops_first: bool) -> Callable[[str, bool], str]:
    return lambda token, first: token.replace(mark, "" if first and drops_first else " ")
