"""/v1/responses, as OpenAI's clients send it: items in, items out, and a store of the last ones to go on from."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from ..chat.reader import Block
from .answers import FINISH, Event
from .chat import Chat, OneAnswerShape
from .errors import ApiError, refused
from .requests import Json, Limit, Numbers
from .service import Service
from .shape import event_line

_MOST_STORED = 1000
_MOST_CHARACTERS = 64 << 20


class ResponsesRequest(Numbers):
    model: str | None = None
    input: str | Annotated[list[Json], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Limit | None = None
    text: Json | None = None
    reasoning: Json | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: Json | None = None
    include: list[str] | None = None

    def refuse(self) -> None:
        if "message.output_text.logprobs" in (self.include or ()):
            raise refused("include", "ask /v1/chat/completions for log-probabilities")

    def chat(self, before: list[Json]) -> Json:
        """A body for /v1/chat/completions. before: messages of the responses that this one follows."""
        same = ("stream", "parallel_tool_calls", "store", "reasoning", *Numbers.model_fields)
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        shown = ("name", "description", "parameters", "strict")
        tools = [
            {"type": "function", "function": {name: tool[name] for name in shown if name in tool}}
            for tool in self.tools or ()
            if tool.get("type") == "function"  # of others no model is told
        ]
        form = (self.text or {}).get("format") or {"type": "text"}
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        return {
            **(self.model_extra or {}),
            **{name: getattr(self, name) for name in same},
            "messages": [*first, *before, *_messages(items)],
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools or None,
            "tool_choice": self.tool_choice,
            "response_format": form,
        }


def _messages(items: Sequence[Json]) -> list[Json]:
    """Of input items, or of output items that were sent back."""
    made: list[Json] = []
    for number, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            made.append({"role": item.get("role", "user"), "content": item.get("content")})
        elif kind == "function_call":
            call = {
                "id": item.get("call_id"),
                "function": {"name": item.get("name"), "arguments": item.get("arguments")},
            }
            if not made or made[-1]["role"] != "assistant":
                made.append({"role": "assistant", "content": None})
            made[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            raise refused(f"input[{number}]", f"this server takes no items of type {kind!r}")
    return made


class Store:
    """The newest responses, with the messages that led to each; bounded in number and in characters."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[list[Json], Json, int]] = OrderedDict()
        self._characters = 0

    def put(self, id: str, messages: list[Json], reply: Json) -> None:
        size = len(repr(messages)) + len(repr(reply))
        self._kept[id] = messages, reply, size
        self._characters += size
        while len(self._kept) > _MOST_STORED or self._characters > _MOST_CHARACTERS:
            self._characters -= self._kept.popitem(last=False)[1][2]

    def delete(self, id: str) -> None:
        self.reply(id)
        self._characters -= self._kept.pop(id)[2]

    def messages(self, id: str | None) -> list[Json]:
        return [] if id is None else self._found(id, "previous_response_id")[0]

    def reply(self, id: str) -> Json:
        return self._found(id, "response_id")[1]

    def _found(self, id: str, param: str) -> tuple[list[Json], Json, int]:
        if id not in self._kept:
            raise ApiError(404, f"there is no response '{id}' (any more)", "response_not_found", param)
        return self._kept[id]


class ResponsesShape(OneAnswerShape):
    def __init__(self, service: Service, request: ResponsesRequest, chat: Chat, store: Store) -> None:
        super().__init__(service, chat)
        self.id, self._created = f"resp_{uuid4().hex}", int(service.settings.now())
        self._request, self._store, self._sampling = request, store, {"top_p": 1.0} | service.sampling
        self._items, self._number = list[Json](), 0

    def whole(self) -> Json:
        for step in self.read_whole():
            self._events(*step)
        return self._ended()

    def lines(self, index: int, events: Sequence[Event]) -> str:
        made: list[Json] = []
        if self._reader is None:
            made += [self._event(f"response.{name}", response=self._reply()) for name in ("created", "in_progress")]
        for step in self.read(events):
            made += self._events(*step)
        return "".join(map(event_line, made))

    def end(self) -> str:
        reply = {**self._ended(), **self.unheld()}
        return event_line(self._event(f"response.{reply['status']}", response=reply))

    def error(self, error: ApiError) -> str:
        said = {"code": "server_error", "message": error.detail}
        return event_line(self._event("response.failed", response=self._reply(status="failed", error=said)))

    def _events(self, what: str, block: Block, text: str) -> list[Json]:
        """Of a step; and the items at their newest."""
        if what == "begin":
            self._items.append(_item(block, f"{_PREFIX[block.kind]}_{uuid4().hex}", "in_progress"))
        item, said = self._items[block.index], block.kind == "said"
        place: Json = {"item_id": item["id"], "output_index": block.index}
        part: Json = {"content_index": 0, **place}
        event, where = f"response.{_EVENTS[block.kind]}", place if block.kind == "call" else part
        more: Json = {"logprobs": []} if said else {}
        if what == "begin":
            begin = [self._event("response.output_item.added", output_index=block.index, item=item)]
            return [*begin, self._event("response.content_part.added", **part, part=_text(""))] if said else begin
        if what == "more":
            return [self._event(f"{event}.delta", **where, delta=text, **more)]
        self._items[block.index] = item = _item(block, item["id"], "completed")
        whole: Json = {"name": block.name, "arguments": block.text} if block.kind == "call" else {"text": block.text}
        ends = [self._event(f"{event}.done", **where, **whole, **more)]
        if said:
            ends.append(self._event("response.content_part.done", **part, part=_text(block.text)))
        return [*ends, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _ended(self) -> Json:
        usage, whole = self.answers.usage(), FINISH[self.completion.finish_reason] != "length"
        used = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }
        reply = self._reply(
            status="completed" if whole else "incomplete",
            incomplete_details=None if whole else {"reason": "max_output_tokens"},
            usage=used,
        )
        if self._request.store is not False:
            said = [message.model_dump(exclude_none=True) for message in self._chat.request.messages]
            kept = said[1:] if self._request.instructions else said  # they hold for one response
            self._store.put(self.id, [*kept, *_messages(self._items)], reply)
        return reply

    def _reply(self, **fields: Any) -> Json:
        request = self._request
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": list(self._items),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": request.store is not False,
            "temperature": self._sampling["temperature"] if request.temperature is None else request.temperature,
            "text": request.text or {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
            "top_p": self._sampling["top_p"] if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "usage": None,
            **fields,
        }


_PREFIX = {"said": "msg", "thought": "rs", "call": "fc"}
_EVENTS = {"said": "output_text", "thought": "reasoning_text", "call": "function_call_arguments"}


def _item(block: Block, id: str, status: str) -> Json:
    if block.kind == "call":
        call = {"call_id": block.id, "name": block.name, "arguments": block.text}
        return {"type": "function_call", "id": id, "status": status, **call}
    if block.kind == "thought":
        content = [{"type": "reasoning_text", "text": block.text}]
        return {"type": "reasoning", "id": id, "status": status, "summary": [], "content": content}
    content = [_text(block.text)] if status == "completed" else []
    return {"type": "message", "id": id, "status": status, "role": "assistant", "content": content}


def _text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
