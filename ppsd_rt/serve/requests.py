"""What clients may send. Fields, defaults and ranges are OpenAI's; those of vLLM that OpenAI lacks are marked as ours.

Fields that would change the answer and that are not done here are refused by name, and unknown ones as OpenAI refuses
them. Those that change no answer (user, metadata, ...) are taken and have no effect.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from .errors import refused

MOST_CHOICES = 16
MOST_STOPS = 16


def _whole(value: object) -> object:
    """JSON has one kind of number: 5.0 is 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Id = Annotated[Whole, Field(ge=0, lt=2**31)]
IdText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Tokens = Annotated[Whole, Field(ge=1, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]


_FORMATS = "type: text, json_object, json_schema (with json_schema.schema); ours: regex, lark (with a key of that name)"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # against observers of a network's traffic; there is none


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """tool_calls and their kin are not here: no model is told of tools."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None

    def for_template(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class Generate(Strict):
    """What both kinds of request have."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[Whole, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        None
    )
    user: str | None = None
    response_format: Annotated[dict[str, Any], Field(description=_FORMATS)] | None = None
    # ours
    top_k: Annotated[Whole, Field(ge=-1, lt=2**31, description="0 or -1: all")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MOST_STOPS)] | None = None
    return_tokens: Annotated[bool, Field(description="chunks say how each token came about")] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def refuse(self) -> None:
        """ApiError for what is set and not done here. Values that ask for nothing are taken."""
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "it goes with stream: true")


class ChatRequest(Generate):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=20)] | None = None
    # without effect on an answer here
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prediction: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    # refused
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None

    @property
    def most_probable(self) -> int | None:
        """How many tokens to report beside each of the answer; None: no log-probabilities at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    def refuse(self) -> None:
        super().refuse()
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise refused("max_tokens", "it is the old name of max_completion_tokens; give one of the two")
        for name in ("tools", "functions"):
            if getattr(self, name):
                raise refused(name, "this server calls no tools")
        for name in ("tool_choice", "function_call"):
            if getattr(self, name) not in (None, "none", "auto"):
                raise refused(name, "this server calls no tools")
        if self.modalities not in (None, ["text"]):
            raise refused("modalities", "this server answers with text only")
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "it goes with logprobs: true")
        for name in ("audio", "web_search_options"):
            if getattr(self, name) is not None:
                raise refused(name, "this server answers with text only")


class CompletionRequest(Generate):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[Id], Field(min_length=1)]
        | Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1)]
    )
    max_tokens: Tokens | None = 16
    logprobs: Annotated[Whole, Field(ge=0, le=5)] | None = None
    # refused
    echo: bool | None = None
    suffix: str | None = None
    best_of: Whole | None = None

    @property
    def most_probable(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        several = isinstance(given, list) and isinstance(given[0], str | list)
        return given if several else [given]

    def refuse(self) -> None:
        super().refuse()
        if self.echo:
            raise refused("echo", "answers come without their prompt")
        if self.suffix:
            raise refused("suffix", "this server only continues a text")
        if self.best_of not in (None, 1, self.n):
            raise refused("best_of", "every answer is returned: leave it out, or give what n is")


class TokenizeRequest(Strict):
    """A text or messages, as vLLM's /tokenize takes them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
