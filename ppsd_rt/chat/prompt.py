"""From messages and tools to the ids of a prompt."""

import json
import re
from collections.abc import Sequence
from typing import Any

from ..arguments import check_unicode
from ..errors import UsageError
from ..models.tokenizer import Tokenizer
from .tools import MISTRAL, MISTRAL_11, Json, Syntax, Tools, syntax_of

_CUT = "\ufdd0"  # no character: where a special token in a user's text is cut in two
_HERE = "\ufdd1 "  # where the last message goes on; without its blank, the template has stripped the message

_EXPLAINED = """You may call functions. These are their signatures, inside <tools></tools>:
<tools>
{tools}
</tools>
To call one, write a JSON object with its name and arguments inside <tool_call></tool_call>:
<tool_call>
{{"name": "function-name", "arguments": {{...}}}}
</tool_call>"""


class ChatPrompt:
    """What the chat template makes of a request, with or without tools."""

    def __init__(self, tokenizer: Tokenizer, source: str) -> None:
        """source: of the chat template; empty where there is none, which `text` says."""
        self._tokenizer, self._knows_tools = tokenizer, re.search(r"\btools\b", source) is not None
        self._xml_tools = "xml_tools" in source
        self.thinks = "</think>" in source
        self.syntax: Syntax = syntax_of(source)

    def text(
        self, messages: Sequence[Json], tools: Tools, variables: Json, generation_prompt: bool, plain: bool = False
    ) -> str:
        """messages: with role, content (a text), name, reasoning_content, tool_call_id, tool_calls: what there is.
        generation_prompt: false to go on with the last message. plain: special tokens in contents are cut.

        PpsdError where there is no template, or one that refuses; UsageError for text that is no Unicode.
        """
        template = self._tokenizer.chat_template
        if template is None:
            raise UsageError("this model has no chat template: ask /v1/completions")
        shown = tools.for_template()
        chat = [self._message(message) for message in messages]
        for number, message in enumerate(chat):
            check_unicode(message["content"], f"messages[{number}]")
            if plain:
                message["content"] = self._cut(message["content"])
        goes_on = not generation_prompt and chat[-1]["role"] == "assistant"
        if goes_on:
            chat[-1]["content"] += _HERE
        if not self._knows_tools:
            chat = _explained(chat, shown)
        given = {"tools": shown, **({"xml_tools": shown} if self._xml_tools else {}), **variables}
        text = template.render(chat, add_generation_prompt=generation_prompt, template_variables=given)
        if not goes_on:
            return text
        before, found, after = text.rpartition(_HERE.rstrip())
        if not found:
            raise UsageError("the chat template changes the last message: it cannot be continued")
        return before if after.startswith(" ") else before.rstrip()

    def ids(self, text: str) -> list[int]:
        return [id for part in text.split(_CUT) for id in self._tokenizer.encode(part, add_special_tokens=False)]

    def _message(self, message: Json) -> Json:
        role, id = message["role"], message.get("tool_call_id")
        calls = [
            {
                "id": self._id(call.get("id") or ""),
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _object(call["function"].get("arguments"))},
            }
            for call in message.get("tool_calls") or ()
        ]
        made = {
            **message,
            "role": "system" if role == "developer" else role,
            "content": message.get("content") or "",
            "tool_call_id": None if id is None else self._id(id),
            "tool_calls": calls or None,
        }
        return {name: value for name, value in made.items() if value is not None}

    def _id(self, id: str) -> str:
        """Mistral's templates take nine letters and digits only."""
        return re.sub("[^a-zA-Z0-9]", "", id)[-9:].rjust(9, "0") if self.syntax in (MISTRAL, MISTRAL_11) else id

    def _cut(self, content: str) -> str:
        texts = [self._tokenizer.id_to_token(id) or "" for id in self._tokenizer.special_ids]
        content = content.replace(_CUT, "")
        for text in sorted(filter(None, texts), key=len, reverse=True):
            content = content.replace(text, text[0] + _CUT + text[1:])
        return content


def _object(arguments: str | Json | None) -> Any:
    """Templates write arguments as JSON themselves; what is no JSON stays a text."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return arguments


def _explained(chat: list[Json], tools: list[Json] | None) -> list[Json]:
    """For a template that knows no tools: all as text, in Hermes' syntax."""
    made: list[Json] = []
    for message in chat:
        content, called = message["content"], "tool_calls" in message
        for call in message.pop("tool_calls", ()):
            written = json.dumps(call["function"], ensure_ascii=False)
            content += f"\n<tool_call>\n{written}\n</tool_call>"
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if made and made[-1].get("role") == "user" and made[-1].pop("answered", False):
                made[-1] |= {"content": f"{made[-1]['content']}\n{content}", "answered": True}
                continue
            message = {"role": "user", "answered": True}
        made.append({**message, "content": content.removeprefix("\n") if called else content})
    if tools:
        text = _EXPLAINED.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if made[0]["role"] == "system":
            made[0] = made[0] | {"content": f"{made[0]['content']}\n\n{text}"}
        else:
            made.insert(0, {"role": "system", "content": text})
    return made
