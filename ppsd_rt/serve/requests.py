"""What clients may send. Fields, defaults and ranges are OpenAI's; those of vLLM and llama.cpp are marked as ours.

Fields that would change the answer and that are not done here are refused by name. Unknown ones, and those that change
no answer (user, metadata, ...), are taken and have no effect; `ignored` names them.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..chat.tools import NAME
from ..sampling.params import NO_LIMIT, RANGES
from .errors import ApiError, refused

MOST_STOPS = 16


def _whole(value: object) -> object:
    """JSON has one kind of number: 5.0 is 5."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
Id = Annotated[Whole, Field(ge=0, lt=2**31)]


def _all_whole(value: object) -> object:
    """The same of a list, which may have millions: at once, where any is no whole number as it stands."""
    return [*map(_whole, value)] if isinstance(value, list) and float in set(map(type, value)) else value


Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True), BeforeValidator(_all_whole)]
Some = Annotated[Ids, Field(min_length=1)]


def within(name: str) -> Any:
    """The range of a number."""
    least, most = RANGES[name]
    return Field(ge=least, le=most)


def _first_wrong(given: object) -> object:
    """Of biases: as of lists the first error is enough."""
    if not isinstance(given, dict):
        return given
    least, most = RANGES["logit_bias"]
    wrong = (
        id
        for id, bias in given.items()
        if not (id.isdecimal() and len(id) < 10 and type(bias) in (int, float) and least <= bias <= most)
    )
    return given if (id := next(wrong, None)) is None else {id: given[id]}


Biases = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, within("logit_bias")]],
    BeforeValidator(_first_wrong),
]
Limit = Annotated[Whole, within("max_tokens")]
Text = Annotated[str, Field(min_length=1)]
Json = dict[str, Any]


_FORMATS = "type: text, json_object, json_schema (with json_schema.schema); ours: regex, lark (with a key of that name)"

# Names that others have for ours.
_ALIASES = {"repeat_penalty": "repetition_penalty", "n_predict": "max_tokens", "stop_sequences": "stop"}
# What asks for nothing: any other value of these fields changes the answer, and is not done here.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "background": (False,),
    "bad_words": ([],),
    "chat_template": ("",),
    "container": ("",),
    "context": ([],),
    "conversation": (),
    "documents": ([],),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "image_data": ([],),
    "images": ([],),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "lora": ([],),
    "mcp_servers": ([],),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n_probs": (0,),
    "prompt": ("",),
    "prompt_logprobs": (0, False),
    "raw": (False,),
    "repeat_last_n": (NO_LIMIT,),
    "suffix": ("",),
    "t_max_predict_ms": (0, NO_LIMIT),
    "template": ("",),
    "tfs_z": (1,),
    "thinking_token_budget": (NO_LIMIT,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "truncate_prompt_tokens": (NO_LIMIT,),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "web_search_options": ({},),
    "xtc_probability": (0,),
}
# Known, and without effect on an answer here.
_HARMLESS = {"metadata", "service_tier", "prediction", "prompt_cache_key", "prompt_cache_retention"}
_HARMLESS |= {"safety_identifier", "verbosity", "cache_prompt", "reasoning_effort", "spaces_between"}
_HARMLESS |= {"include_obfuscation", "request_id", "priority", "parallel_tool_calls", "strict", "name", "id", "index"}
_HARMLESS |= {"include", "truncation", "thinking", "reasoning", "enable_thinking", "type", "context_management"}
_HARMLESS |= {"keep_alive", "truncate", "shift", "think", "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu"}
_HARMLESS |= {"num_thread", "numa", "low_vram", "use_mmap", "use_mlock", "f16_kv", "penalize_newline"}
_HARMLESS |= {"mirostat_tau", "mirostat_eta"}


class Lenient(BaseModel):
    """Takes unknown fields, too. Of a list the first error says enough: there may be 100,000 of them (fail_fast)."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def ignored(request: object, path: str = "") -> Iterator[str]:
    """Names of the fields that are taken and have no effect, such as `messages[].annotations`."""
    if isinstance(request, list):
        for one in request:
            yield from ignored(one, f"{path}[]")
    elif isinstance(request, Lenient):
        inner = f"{path}." if path else ""
        for name in request.model_extra or {}:
            if name not in _HARMLESS and name not in _NEUTRAL and name not in _ALIASES:
                yield f"{inner}{name}"
        for name in request.model_fields_set & type(request).model_fields.keys():
            yield from ignored(getattr(request, name), f"{inner}{name}")


class StreamOptions(Lenient):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: every chunk has the usage so far


class Part(Lenient):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class Called(Lenient):
    name: str
    arguments: str | Json | None = None


class ToolCall(Lenient):
    id: str | None = None
    function: Called


class Message(Lenient):
    """With function_call and the role function, as before there were tools, it becomes one of today."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    function_call: Called | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None  # the answer goes on with this message, the last one, as with Mistral and DeepSeek

    @model_validator(mode="after")
    def _of_today(self) -> Self:
        if self.role == "function":
            self.role, self.tool_call_id = "tool", ""
        if self.function_call is not None and not self.tool_calls:
            self.tool_calls = [ToolCall(id="", function=self.function_call)]
        return self

    def for_prompt(self) -> Json:
        """As `ChatPrompt.text` takes it."""
        said = self.model_dump(include={"role", "name", "reasoning_content", "tool_call_id", "tool_calls"})
        parts = self.content if isinstance(self.content, list) else ()
        text = "".join(part.text or part.refusal or "" for part in parts)
        return said | {"content": text or (self.content if isinstance(self.content, str) else self.refusal) or ""}


class Function(Lenient):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Lenient):
    """type: others than `function` are ignored; no model is told of them."""

    type: str
    function: Function | None = None


class Numbers(Lenient):
    """How tokens are chosen: of every dialect."""

    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    top_k: Annotated[Whole, within("top_k"), Field(description="0 or -1: all")] | None = None
    n: Annotated[Whole, within("n")] | None = None


class Generate(Numbers):
    """What both kinds of request have."""

    model: str | None = None
    user: str | None = None
    max_tokens: Limit | None = None
    stop: Text | Annotated[list[Text], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    seed: Annotated[Whole, within("seed"), Field(description="-1: none")] | None = None
    presence_penalty: Annotated[float, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Biases | None = None
    response_format: Annotated[Json, Field(description=_FORMATS)] | None = None
    store: Annotated[bool, Field(description="false: --learn keeps nothing of it")] | None = None
    # ours
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    min_tokens: Annotated[Whole, within("min_tokens")] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Id], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    structured_outputs: Json | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    json_schema: Json | None = None  # llama.cpp's
    unbounded_json: Annotated[bool, Field(description="numbers and white space without end")] | None = None
    return_tokens: Annotated[bool, Field(description="chunks say how each token came about")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_other_names(cls, given: Any) -> Any:
        if isinstance(given, dict):
            names = [name for name in _ALIASES if name in given and given.get(_ALIASES[name]) is None]
            given = given | {_ALIASES[name]: given[name] for name in names}
        return given

    @property
    @abstractmethod
    def most_probable(self) -> int | None:
        """How many tokens to report beside each of the answer; None: no log-probabilities at all."""

    @property
    @abstractmethod
    def most_tokens(self) -> int | None:
        """Of an answer; None: what the context holds."""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)

    @property
    def with_every_usage(self) -> bool:
        return self.with_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def format(self) -> Json | None:
        """response_format, or what others call the same."""
        guided = self.structured_outputs or {}
        schema = self.guided_json or guided.get("json") or self.json_schema
        choice = guided.get("choice") if self.guided_choice is None else self.guided_choice
        if schema is not None:
            strict = (self.model_extra or {}).get("strict")
            return {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}
        if choice is not None:
            return {"type": "choice", "choice": choice}
        if regex := self.guided_regex or guided.get("regex"):
            return {"type": "regex", "regex": regex}
        if lark := self.guided_grammar or guided.get("grammar"):
            return {"type": "lark", "lark": lark}
        if guided.get("json_object"):
            return {"type": "json_object"}
        return self.response_format

    def refuse(self) -> None:
        """ApiError for what is set and not done here. Values that ask for nothing are taken."""
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "it goes with stream: true")
        others = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        if self.repetition_penalty in (None, 1) and not (self.presence_penalty or self.frequency_penalty):
            others.pop("repeat_last_n", None)  # a window of nothing
        for name, value in others.items():
            if name in _NEUTRAL and value not in _NEUTRAL[name]:
                raise refused(name, "this server cannot do that")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name, None) == 0 and not getattr(self, "echo", False):
                raise ApiError(400, f"Invalid value for '{name}': should be at least 1, or -1", "invalid_value", name)


class ChatRequest(Generate):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, within("logprobs")] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], Field(fail_fast=True)] | None = None  # what tools were called once
    function_call: str | Json | None = None
    # ours
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Json | None = None

    @model_validator(mode="after")
    def _functions_as_tools(self) -> Self:
        if self.tools:
            self.functions = None
        elif self.functions:
            self.tools = [Tool(type="function", function=one) for one in self.functions]
            self.tool_choice, self.parallel_tool_calls = self.function_call, False
        return self

    @property
    def most_probable(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_tokens(self) -> int | None:
        given = self.max_completion_tokens or self.max_tokens
        return None if given == NO_LIMIT else given

    @property
    def template_variables(self) -> Json:
        """For the chat template; what turns thinking off elsewhere does so here."""
        extra, given = self.model_extra or {}, dict(self.chat_template_kwargs or {})
        effort = (extra.get("reasoning") or {}).get("effort") if isinstance(extra.get("reasoning"), dict) else None
        if isinstance(extra.get("enable_thinking"), bool):
            given.setdefault("enable_thinking", extra["enable_thinking"])
        elif "none" in (effort, extra.get("reasoning_effort")) or extra.get("thinking") == {"type": "disabled"}:
            given.setdefault("enable_thinking", False)
        return given

    def refuse(self) -> None:
        super().refuse()
        for number, message in enumerate(self.messages):
            if (message.model_extra or {}).get("images"):
                raise refused(f"messages[{number}].images", "this server reads text, and no images")
            if message.content is None and message.role != "assistant":
                where = f"messages[{number}].content"
                raise ApiError(400, f"Missing required parameter: '{where}'", "missing_required_parameter", where)
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "it goes with logprobs: true")


class CompletionRequest(Generate):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Some
        | Annotated[list[Some], Field(min_length=1, fail_fast=True)]
    )
    logprobs: Annotated[Whole, Field(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[Whole, within("best_of")] | None = None

    @property
    def most_probable(self) -> int | None:
        return self.logprobs

    @property
    def most_tokens(self) -> int | None:
        return 16 if self.max_tokens is None else None if self.max_tokens == NO_LIMIT else self.max_tokens

    @property
    def echoes(self) -> int | None:
        """How many tokens to report beside each of the prompt; None: no log-probabilities of it."""
        return self.logprobs if self.echo else None

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        several = isinstance(given, list) and isinstance(given[0], str | list)
        return given if several else [given]

    def refuse(self) -> None:
        super().refuse()
        if self.best_of not in (None, 0, 1, self.n):
            raise refused("best_of", "every answer is returned: leave it out, or give what n is")


class TokenizeRequest(Lenient):
    """A text or messages, as vLLM's /tokenize takes them; beside messages what else a chat has."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Lenient):
    model: str | None = None
    tokens: Ids
