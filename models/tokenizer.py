"""Text to token ids and back: one interface over `tokenizer.json` and SentencePiece `tokenizer.model` files.

Decoding does not go through the two libraries. Both have decoders that only take the whole answer, so that showing an
answer while it is written means decoding it again and again. Here every token stands for some bytes, and an answer is
their concatenation read as UTF-8: the whole decoder state of a stream is an unfinished character. `decode` is a stream
that is given everything at once, so the two can never differ.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken

from ..arguments import check_unicode
from ..errors import PpsdError
from .chat_template import ChatTemplate, special_tokens, token_content
from .files import AnyFile, AnyFolder, HeldFolder, is_gguf, one_line, read_bytes, read_json_object, read_text, shown

if TYPE_CHECKING:
    from .gguf_model import GgufModel

_METASPACE = "▁"
_MOST_BYTES = 1 << 28  # of tokenizer.json or tokenizer.model; vocabularies of 256 000 tokens take an eighth of it
_DAMAGED = "the file is damaged or incomplete: download it again"

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
        said = HeldFolder(folder, {"tokenizer_config.json": json.dumps(gguf.tokenizer_config()).encode()})
        path, tokenizer = folder, _JsonTokenizer(said, gguf.tokenizer())
    elif not folder.is_dir():
        raise PpsdError(f"there is no folder {folder}: give the folder of a model")
    elif json_path.exists():
        path, tokenizer = json_path, _JsonTokenizer(folder)
    elif model_path.exists():
        path, tokenizer = model_path, _SentencePieceTokenizer(model_path)
    else:
        raise PpsdError(f"{folder} has neither tokenizer.json nor tokenizer.model: copy one from the model's source")
    if vocab_size is not None and tokenizer.base_size > vocab_size:
        raise PpsdError(
            f"{path} has token ids up to {tokenizer.base_size - 1}, but the model's vocabulary ends at "
            f"{vocab_size - 1}: take the tokenizer that belongs to this model"
        )
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
    chat_template: ChatTemplate | None
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

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.token_to_id(token)

    def _end_of(self, names: dict[str, str], path: AnyFile) -> int | None:
        """The id of a folder's eos_token. PpsdError where that is no token."""
        token = names.get("eos_token")
        if token is not None and self.token_to_id(token) is None:
            raise PpsdError(
                f"the eos_token {one_line(token)!r} is not in the vocabulary of {path}, so answers would never end: "
                "correct it in tokenizer_config.json"
            )
        return self._id_of(token)

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

    def __init__(self, folder: AnyFolder, made: tokenizers.Tokenizer | None = None) -> None:
        """made: in place of tokenizer.json."""
        path = folder / "tokenizer.json"
        text = "" if made else read_text(path, _MOST_BYTES)
        with _library_errors(f"cannot load {path}", _DAMAGED), _panic_reports_dropped():
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
        names = special_tokens(folder)
        if all(token.content != names.get("eos_token") for token in _added_tokens(folder).values()):
            self._end_of(names, path)  # before it gets an id like the others
        self._add_tokens(folder, names)
        known = self._tokenizer.get_added_tokens_decoder()
        self._bytes_of, self._leading_spaces = _compiled_decoder(state, path, {each.content for each in known.values()})
        special = {token.content for token in known.values() if token.special}
        # A token that one file calls special stays so, whatever another one says.
        special |= {token.content for token in added.values() if token.special}
        self.vocab_size = max(self.base_size, *(id + 1 for id in known), 0)
        self.bos_id = self._id_of(names.get("bos_token"))
        self.eos_id = self._id_of(names.get("eos_token"))
        ends = [self.bos_id, self.eos_id]
        self.special_ids = frozenset(id for id in [*map(self.token_to_id, special), *ends] if id is not None)
        self.chat_template = ChatTemplate.from_folder(folder)

    def _add_tokens(self, folder: AnyFolder, names: dict[str, str]) -> None:
        """What the other files say of tokens: some that tokenizer.json lacks, and flags, which win over its own.

        In the order, and by the calls, of `TokenizersBackend.__init__` of transformers 5.
        """
        config = read_json_object(folder / "tokenizer_config.json", missing_ok=True)
        before = {token.content for token in self._tokenizer.get_added_tokens_decoder().values()}
        given = [token for _, token in sorted(_added_tokens(folder).items())]
        texts = before | {token.content for token in given}
        given += [AddedToken(text, special=True) for text in _all_special(folder, names) if text not in texts]
        for token in given:
            token.special = token.special or token.content in names.values()
        with _library_errors(f"cannot add the tokens of {folder / 'tokenizer_config.json'}", _DAMAGED):
            self._tokenizer.add_tokens(given)
        self._tokenizer.encode_special_tokens = config.get("split_special_tokens") is True

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, id: int) -> str | None:
        return self._tokenizer.id_to_token(id) if 0 <= id < self.vocab_size else None

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with _library_errors(f"{self._path} cannot encode this text", "the file does not fit its own vocabulary"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def _piece(self, id: int, first: bool) -> bytes | None:
        known = self._pieces.get((id, first))
        if known is None and (token := self.id_to_token(id)) is not None:
            known = self._pieces[id, first] = self._bytes_of(token, first)
        return known


class _SentencePieceTokenizer(Tokenizer):
    """tokenizer.model through the `sentencepiece` library, as transformers' (slow) LlamaTokenizer uses it.

    Added tokens (tokenizer_config.json, added_tokens.json), the model's control pieces and the named special tokens are
    cut out of the text first; SentencePiece sees what lies between. SentencePiece starts every text with a space of its
    own. The flag `legacy` of tokenizer_config.json (true where it is missing) says which pieces count as texts:

    - legacy: each of them, so a space comes after every special token, too (`<s>[INST]` is `<s>`, `▁[`, ...);
    - else: the whole text is one, and only its start gets the space, unless it starts with an added token.
      `add_prefix_space` (by default what the model was trained with) says whether there is a space at all.

    `add_bos_token` is true and `add_eos_token` false where tokenizer_config.json does not say. The options `lstrip` and
    `rstrip` of added tokens are followed; `single_word` is not.
    """

    def __init__(self, path: Path) -> None:
        folder = path.parent
        keys = ("legacy", "add_prefix_space", "add_bos_token", "add_eos_token")
        legacy, prefix, bos, eos = _flags(folder / "tokenizer_config.json", *keys)
        self._legacy = legacy is not False
        model = read_bytes(path, _MOST_BYTES)
        if _TIKTOKEN_LINE.match(model):
            raise PpsdError(
                f"{path} is in tiktoken's format, not SentencePiece's: take the model's tokenizer.json instead"
            )
        with _library_errors(f"cannot load {path}", f"{_DAMAGED}, or take the tokenizer.json of the same model"):
            self._whole = _processor(model)
            self._inner = self._whole if self._legacy else _processor(model + _NO_DUMMY_PREFIX)
            self._pieces = [self._whole.id_to_piece(id) for id in range(self._whole.get_piece_size())]
            has_prefix = self._whole.normalize("a").startswith(_METASPACE)
        if not self._legacy and prefix is not None:
            has_prefix = prefix
        self._path = path
        self._prefix = " " if has_prefix and not self._legacy else ""
        self._leading_spaces = int(has_prefix)
        self._load_special_tokens(folder, path)
        self._around = (
            [self.bos_id] if bos is not False and self.bos_id is not None else [],
            [self.eos_id] if eos and self.eos_id is not None else [],
        )
        self._bytes = [self._bytes_of(id, piece) for id, piece in enumerate(self._pieces)]
        self.chat_template = ChatTemplate.from_folder(folder)

    def _load_special_tokens(self, folder: Path, path: Path) -> None:
        names = special_tokens(folder)
        self._added = _added_tokens(folder)
        self._added_ids = {token.content: id for id, token in self._added.items()}
        self.base_size = len(self._pieces)
        self.vocab_size = max(len(self._pieces), max(self._added, default=-1) + 1)
        control = [id for id in range(len(self._pieces)) if self._whole.is_control(id) or self._whole.is_unknown(id)]
        flagged = [id for id, token in self._added.items() if token.special]
        named = [id for id in map(self.token_to_id, _all_special(folder, names)) if id is not None]
        self.special_ids = frozenset(control + flagged + named)
        self.bos_id = self._id_of(names.get("bos_token"))
        self.eos_id = self._end_of(names, path)
        if self.bos_id is None and self._whole.bos_id() >= 0:
            self.bos_id = self._whole.bos_id()
        if self.eos_id is None and self._whole.eos_id() >= 0:
            self.eos_id = self._whole.eos_id()
        texts = {self.id_to_token(id) or "": id for id in self.special_ids} | self._added_ids
        texts.pop("", None)
        self._cut_ids = texts
        # The longest one first: where two tokens start at the same character, the longer one is meant.
        longest_first = sorted(texts, key=len, reverse=True)
        self._cut = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if texts else re.compile("(?!)")

    def token_to_id(self, token: str) -> int | None:
        if token in self._added_ids:
            return self._added_ids[token]
        id = int(self._whole.piece_to_id(token))
        return id if self._pieces[id] == token else None  # the library answers the unknown token for what it lacks

    def id_to_token(self, id: int) -> str | None:
        if id in self._added:
            return self._added[id].content
        return self._pieces[id] if 0 <= id < len(self._pieces) else None

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        parts = self._cut.split(text)
        for place in range(1, len(parts), 2):
            added = self._added.get(self._cut_ids[parts[place]])
            if added is not None and added.lstrip:
                parts[place - 1] = parts[place - 1].rstrip()
            if added is not None and added.rstrip:
                parts[place + 1] = parts[place + 1].lstrip()
        if parts[0]:
            parts[0] = self._prefix + parts[0]
        ids: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                ids.append(self._cut_ids[part])
            elif part:
                with _library_errors(f"{self._path} cannot encode this text", _DAMAGED):
                    ids += self._encode_part(part)
        before, after = self._around if add_special_tokens else ([], [])
        return before + ids + after

    def _encode_part(self, part: str) -> list[int]:
        if self._legacy or not part.startswith((" ", _METASPACE)):
            return list(self._inner.encode(part, out_type=int))
        # Models that fold whitespace would drop a leading space, but this one separates words: shelter it.
        return list(self._inner.encode("a" + part, out_type=int)[len(self._inner.encode("a", out_type=int)) :])

    def _piece(self, id: int, first: bool) -> bytes | None:
        if id in self._added:
            return self._added[id].content.encode()
        return self._bytes[id] if 0 <= id < len(self._bytes) else None

    def _bytes_of(self, id: int, piece: str) -> bytes:
        if self._whole.is_byte(id):
            return bytes([int(piece[3:5], 16)])
        if id in self.special_ids:
            return piece.encode()
        return piece.replace(_METASPACE, " ").encode()


_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")

# A protobuf message followed by another is their merge: this is a ModelProto with normalizer_spec (field 3) holding
# add_dummy_prefix (field 3) = false, and spares the dependency on the protobuf package.
_NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


def _processor(model: bytes) -> Any:
    import sentencepiece  # few models need it

    processor = sentencepiece.SentencePieceProcessor()
    processor.load_from_serialized_proto(model)
    return processor


def _flags(path: Path, *keys: str) -> list[bool | None]:
    """What tokenizer_config.json says of each; None: nothing."""
    config = read_json_object(path, missing_ok=True)
    for key in keys:
        if not isinstance(config.get(key), bool | None):
            raise PpsdError(f"{path}: {key} must be true, false or null, not {shown(config[key])}")
    return [config.get(key) for key in keys]


def _added_tokens(folder: AnyFolder) -> dict[int, AddedToken]:
    """The tokens that tokenizer_config.json adds, by id; where it has no such table, those of added_tokens.json."""
    path = folder / "tokenizer_config.json"
    config = read_json_object(path, missing_ok=True)
    added: dict[int, AddedToken] = {}
    entries = config.get("added_tokens_decoder")
    if entries is None:
        path, names = folder / "added_tokens.json", _all_special(folder, special_tokens(folder))
        for content, id in read_json_object(path, missing_ok=True).items():
            added[_valid_id(id, path)] = AddedToken(content, special=content in names)
        return added
    if not isinstance(entries, dict):
        raise PpsdError(
            f"{path}: added_tokens_decoder must be an object from ids to tokens: mend it or download it again"
        )
    for key, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise PpsdError(f'{path}: the added token {one_line(key)} has no "content": mend it or download it again')
        flags = {name: entry.get(name) is True for name in ("special", "lstrip", "rstrip", "single_word")}
        normalized = entry["normalized"] is True if "normalized" in entry else not flags["special"]
        added[_valid_id(key, path)] = AddedToken(entry["content"], **flags, normalized=normalized)
    return added


def _valid_id(value: object, path: AnyFile) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PpsdError(f"{path}: {shown(value)} is not a token id: mend it or download it again")
    return value


def _all_special(folder: AnyFolder, names: dict[str, str]) -> list[str]:
    """The texts of all tokens that a model folder calls special, named ones first, in the order of transformers."""
    order = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
    texts = [names[key] for key in (*order, *sorted(names.keys() - order)) if key in names]
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        values = read_json_object(folder / file, missing_ok=True)
        for key in ("additional_special_tokens", "extra_special_tokens"):
            extra = values.get(key) or []
            contents = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
            texts += [content for content in map(token_content, contents) if content is not None]
    return list(dict.fromkeys(texts))


@contextmanager
def _library_errors(what: str, mend: str) -> Iterator[None]:
    """Turns whatever a tokenizer library raises into one line: `what` (the error): `mend`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:  # a panic inside the tokenizers library is not an Exception
        raise PpsdError(f"{what} ({one_line(error)}): {mend}") from error


_one_redirection = threading.Lock()


@contextmanager
def _panic_reports_dropped() -> Iterator[None]:
    """Keeps the report that a Rust panic writes to file descriptor 2 away from the user, who gets a PpsdError instead.

    What else was written there in the meantime is passed on. Without a standard error, or without a place for
    temporary files, nothing is redirected.
    """
    with _one_redirection, ExitStack() as stack:
        try:
            report = stack.enter_context(tempfile.TemporaryFile())
            stderr = os.dup(2)
        except OSError:
            yield
            return
        stack.callback(os.close, stderr)
        os.dup2(report.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = not isinstance(error, Exception)
            raise
        finally:
            os.dup2(stderr, 2)
            if not panicked:
                report.seek(0)
                with suppress(OSError):  # full, or its reader has gone: what it says is lost, and nothing else
                    os.write(stderr, report.read())


def _compiled_decoder(
    state: dict[str, Any] | None, path: AnyFile, added: Set[str]
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
                steps.append(_byte_fallback)
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                steps.append(_replacement(old, new))
            case {"type": "Metaspace", "replacement": str(mark)} if not fused:
                steps.append(_metaspace(mark, drops_first=spec.get("prepend_scheme") != "never"))
            case None:
                steps.append(_space_between)
            case _:
                kind = one_line(spec.get("type"))
                raise PpsdError(f"{path} has a decoder that is not supported ({kind} in {one_line(state)})")

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


def _byte_fallback(token: str, first: bool) -> str | bytes:
    return bytes([int(token[3:5], 16)]) if _BYTE_TOKEN.fullmatch(token) else token


def _replacement(old: str, new: str) -> Callable[[str, bool], str]:
    return lambda token, first: token.replace(old, new)


def _metaspace(mark: str, drops_first: bool) -> Callable[[str, bool], str]:
    return lambda token, first: token.replace(mark, "" if first and drops_first else " ")


def _space_between(token: str, first: bool) -> str:
    """Without a decoder, the library puts spaces between the tokens."""
    return token if first else f" {token}"
