"""/v1/messages and its count_tokens, as Anthropic's clients send them."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal
from uuid import uuid4

from pydantic import Field

from ..chat.reader import Block
from .answers import FINISH, Event
from .chat import Chat, OneAnswerShape
from .errors import ApiError, refused
from .requests import Json, Lenient, Limit, Numbers, Text
from .service import Service
from .shape import event_line


class AnthropicMessage(Lenient):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Json], Field(fail_fast=True)]


class MessagesRequest(Numbers):
    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, fail_fast=True)]
    max_tokens: Limit | None = None  # count_tokens has none
    system: str | Annotated[list[Json], Field(fail_fast=True)] | None = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: Json | None = None
    stop_sequences: Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    thinking: Json | None = None
    metadata: Json | None = None
    output_format: Json | None = None
    output_config: Json | None = None

    def chat(self) -> Json:
        """A body for /v1/chat/completions."""
        system = [{"role": "system", "content": _text(self.system, "system")}] if self.system else []
        said = [one for number, message in enumerate(self.messages) for one in _messages(message, number)]
        shown = {"name": "name", "description": "description", "parameters": "input_schema", "strict": "strict"}
        tools = [
            {"type": "function", "function": {ours: tool.get(theirs) for ours, theirs in shown.items()}}
            for tool in self.tools or ()
            if tool.get("type") in (None, "custom")  # of others no model is told
        ]
        choice = self.tool_choice or {}
        kind: Any = choice.get("type", "auto")
        if kind == "any":
            kind = "required"
        elif kind == "tool":
            kind = {"type": "function", "function": {"name": choice.get("name")}}
        return {
            **(self.model_extra or {}),
            **{name: getattr(self, name) for name in ("stream", "thinking", *Numbers.model_fields)},
            "messages": [*system, *said],
            "user": (self.metadata or {}).get("user_id"),
            "max_tokens": self.max_tokens,
            "tools": tools or None,
            "tool_choice": kind,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "stop": self.stop_sequences or None,
            "response_format": self.output_format or (self.output_config or {}).get("format"),
            "continue_final_message": self.messages[-1].role == "assistant",
        }


def _messages(message: AnthropicMessage, number: int) -> list[Json]:
    """Results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, calls, texts, thoughts = [], [], [], []
    for place, block in enumerate(message.content):
        kind, where = block.get("type"), f"messages[{number}].content[{place}]"
        if kind == "tool_result":
            content = _text(block.get("content") or "", where)
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "function": function})
        elif kind == "thinking":
            thoughts.append(_text([{"type": "text", "text": block.get("thinking")}], where))
        elif kind != "redacted_thinking":
            texts.append(_text([block], where))
    made: Json = {"role": message.role, "content": "".join(texts), "tool_calls": calls or None}
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    return [*results, *([made] if texts or calls or not results else [])]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            kind = block.get("type") if isinstance(block, dict) else block
            raise refused(where, f"this server reads text, and no {kind!r}")
    return "".join(block["text"] for block in content)


class MessagesShape(OneAnswerShape):
    def __init__(self, service: Service, chat: Chat) -> None:
        super().__init__(service, chat)
        self.id = f"msg_{uuid4().hex}"

    def whole(self) -> Json:
        content = [_content(block) for what, block, _ in self.read_whole() if what == "end"]
        return self._message(content, **self._stop())

    def lines(self, index: int, events: Sequence[Event]) -> str:
        made: list[Json] = []
        if self._reader is None:
            begun = self._message([], stop_reason=None, stop_sequence=None)
            made.append({"type": "message_start", "message": begun})
        made += [_event(*step) for step in self.read(events)]
        return "".join(map(event_line, made))

    def end(self) -> str:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return event_line(delta) + event_line({"type": "message_stop"})

    def error(self, error: ApiError) -> str:
        return event_line(error.reply("/v1/messages"))

    def _stop(self) -> Json:
        calls = any(block.kind == "call" for block in self._blocks.all)
        reason = {"stop": "end_turn", "length": "max_tokens"}[FINISH[self.completion.finish_reason]]
        if self.completion.stop is not None:
            reason = "stop_sequence"
        elif calls and reason == "end_turn":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": self.completion.stop}

    def _message(self, content: list[Json], **fields: Any) -> Json:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._model}
        return {**head, "content": content, **fields, "usage": self._usage()}

    def _usage(self) -> Json:
        usage = self.answers.usage()
        return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


def _content(block: Block) -> Json:
    if block.kind == "call":
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": json.loads(block.text or "{}")}
    if block.kind == "thought":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _event(what: str, block: Block, text: str) -> Json:
    if what == "begin":
        empty = _content(Block(block.kind, block.index, name=block.name, id=block.id))
        return {"type": "content_block_start", "index": block.index, "content_block": empty}
    if what == "end":
        return {"type": "content_block_stop", "index": block.index}
    key = {"call": "partial_json", "thought": "thinking", "said": "text"}[block.kind]
    kind = {"call": "input_json_delta", "thought": "thinking_delta", "said": "text_delta"}[block.kind]
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, key: text}}
