"""What clients get at once, in OpenAI's form; chat.py and completions.py make the chunks of streams."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from .logprobs import ChatLogprobs, CompletionLogprobs

Seed = Annotated[int | None, Field(description="that the answer can be repeated with; null: it is greedy")]
Finish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls", "function_call"]
FINISH: dict[str, Finish] = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class PredictionDetails(BaseModel):
    """Of the draft tokens: those that are in the answer, and those that are not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: PredictionDetails


class FunctionCall(BaseModel):
    name: str
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """reasoning_content, tool_calls: left out where there are none. function_call: for clients that send functions."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = Field(default=None, exclude_if=lambda value: value is None)
    tool_calls: list[ToolCall] | None = Field(default=None, exclude_if=lambda value: value is None)
    function_call: FunctionCall | None = Field(default=None, exclude_if=lambda value: value is None)


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish
    seed: Seed


class ChatReply(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish
    seed: Seed


class CompletionReply(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "ppsd-rt"
    max_model_len: int  # as vLLM has it: prompt and answer together


class Models(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeReply(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(BaseModel):
    prompt: str


class Health(BaseModel):
    status: Literal["ok", "stopping", "no engine"]
    model: str
    waiting: int
    running: int
    acceptance_by_day: dict[str, float]  # of the exit head, with --learn
