"""/v1/completions: a text in, its continuation out."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..generation import Completion
from ..models.tokenizer import Tokenizer
from ..pipeline.rounds import Logprob
from .answers import FINISH
from .chat import whole_text
from .requests import CompletionRequest
from .service import Service
from .shape import LEAST_LOGPROB, OpenAIShape


class CompletionShape(OpenAIShape):
    prefix, object, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, service: Service, request: CompletionRequest) -> None:
        super().__init__(service, request)
        self._echo, self._nothing_more = bool(request.echo), request.max_tokens == 0
        self._given = request.prompts
        self._each = request.n or 1
        self._offsets: dict[int, Offsets] = {}  # of each answer

    def usage(self) -> dict[str, Any]:
        usage = super().usage()
        if self._nothing_more:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def choice(self, index: int, completion: Completion) -> tuple[dict[str, Any], str]:
        text = "" if self._nothing_more else whole_text(completion, self._request)
        return {"text": self._begin(index) + text}, FINISH[completion.finish_reason]

    def part(self, index: int, text: str, first: bool) -> dict[str, Any]:
        text = "" if self._nothing_more else text
        return {"text": self._begin(index) + text if first else text}

    def last(self, index: int, completion: Completion, first: bool) -> tuple[dict[str, Any], str]:
        text = (completion.stop or "") if self._request.include_stop_str_in_output else ""
        return {"text": text}, FINISH[completion.finish_reason]

    def logprobs(self, index: int, chosen: Sequence[tuple[int, Logprob]]) -> dict[str, Any]:
        prompt = self.answers.prompts[index]
        told: list[tuple[int, Logprob | None]] = [*(() if self._nothing_more else chosen)]
        if index not in self._offsets:
            self._offsets[index] = Offsets(self._tokenizer, () if self._echo else prompt)
            if self._echo:
                told = [*zip(prompt, self.answers.echoed[tuple(prompt)], strict=True), *told]
        return _columns(self._tokenizer, told, self._offsets[index])

    def _begin(self, index: int) -> str:
        """The prompt, where it is echoed."""
        given = self._given[index // self._each] if self._echo else ""
        return given if isinstance(given, str) else self._tokenizer.decode(given, skip_special_tokens=False)


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


def _columns(
    tokenizer: Tokenizer, chosen: Iterable[tuple[int, Logprob | None]], offsets: Offsets
) -> dict[str, list[Any]]:
    """Of tokens that come after those which `offsets` has been asked for. None: of the first token of an echo."""
    columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for id, said in chosen:
        columns["tokens"].append(_name(tokenizer, id))
        columns["token_logprobs"].append(said and max(said.logprob, LEAST_LOGPROB))
        top = said and {_name(tokenizer, one): max(logprob, LEAST_LOGPROB) for one, logprob in said.top}
        columns["top_logprobs"].append(top)
        columns["text_offset"].append(offsets.next(id))
    return columns


def _name(tokenizer: Tokenizer, id: int) -> str:
    """The token's text; parts of characters as OpenAI spells them here, for two of them must not be the same key."""
    found = tokenizer.token_bytes(id)
    try:
        return found.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)
