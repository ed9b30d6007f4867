"""Log-probabilities in OpenAI's two forms: one object for each token of a chat, columns for a text completion."""

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel

from ..models.tokenizer import Tokenizer
from ..pipeline.rounds import Logprob

_LEAST = -9999.0  # JSON has no infinity; OpenAI writes this

Chosen = Iterable[tuple[int, Logprob]]  # committed ids, with what is reported of each


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(tokenizer: Tokenizer, chosen: Chosen) -> ChatLogprobs:
    def one(id: int, logprob: float) -> dict[str, Any]:
        found = tokenizer.token_bytes(id)
        return {"token": _text(found), "logprob": max(logprob, _LEAST), "bytes": list(found)}

    return ChatLogprobs(
        content=[
            TokenLogprob(**one(id, said.logprob), top_logprobs=[TopLogprob(**one(*top)) for top in said.top])
            for id, said in chosen
        ]
    )


class Offsets:
    """Where the tokens of an answer begin in its text: that of a part of a character is the character's."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decoder, self._text = tokenizer.stream(), 0
        self._decoder.follow(prompt)

    def next(self, id: int) -> int:
        """Of the answer's next token, in characters."""
        offset = self._text
        self._text += len(self._decoder.push(id))
        return offset


def completion_logprobs(
    tokenizer: Tokenizer, chosen: Iterable[tuple[int, Logprob | None]], offsets: Offsets
) -> CompletionLogprobs:
    """Of tokens that come after those which `offsets` has been asked for. None: of the first token of an echo."""
    columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for id, said in chosen:
        columns.tokens.append(_name(tokenizer, id))
        columns.token_logprobs.append(None if said is None else max(said.logprob, _LEAST))
        top = None if said is None else {_name(tokenizer, top): max(logprob, _LEAST) for top, logprob in said.top}
        columns.top_logprobs.append(top)
        columns.text_offset.append(offsets.next(id))
    return columns


def _name(tokenizer: Tokenizer, id: int) -> str:
    """The token's text; parts of characters as OpenAI spells them here, for two of them must not be the same key."""
    found = tokenizer.token_bytes(id)
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)


def _text(found: bytes) -> str:
    """Part of a character becomes U+FFFD; `bytes` says what it is."""
    return found.decode("utf-8", "replace")
