"""Log-probabilities in OpenAI's two forms: one object for each token of a chat, columns for a text completion."""

from collections.abc import Iterable
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
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
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


def completion_logprobs(tokenizer: Tokenizer, chosen: Chosen, offset: int) -> CompletionLogprobs:
    """offset: characters of the tokens before these, as they are spelled here."""
    columns = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for id, said in chosen:
        columns.tokens.append(_name(tokenizer, id))
        columns.token_logprobs.append(max(said.logprob, _LEAST))
        columns.top_logprobs.append({_name(tokenizer, top): max(logprob, _LEAST) for top, logprob in said.top})
        columns.text_offset.append(offset)
        offset += len(columns.tokens[-1])
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
