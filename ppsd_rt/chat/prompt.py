"""From messages and tools to the ids of a prompt."""

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..arguments import check_unicode
from ..errors import UsageError
from ..models.tokenizer import Tokenizer
from ..sampling.grammar import Grammar
from ..sampling.params import SamplingParams
from .reader import Reader
from .tools import MISTRAL, MISTRAL_11, Json, Syntax, Tools, syntax_of

_CUT = f"\ufdd0{secrets.token_hex()}"  # in no text: where a special token in a user's text is cut in two

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

    def __init__(self, tokenizer: Tokenizer) -> None:
        source = tokenizer.chat_template.every_source if tokenizer.chat_template else ""  # none: `text` says so
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
        chat = [self._message(message, f"messages[{number}]") for number, message in enumerate(messages)]
        for number, message in enumerate(chat):
            check_unicode(message["content"], f"messages[{number}]")
            if plain:
                message["content"] = self._cut(message["content"])
        goes_on = not generation_prompt and chat[-1]["role"] == "assistant"
        if not self._knows_tools:
            chat = _explained(chat, shown)
        given = {"tools": shown, **({"xml_tools": shown} if self._xml_tools else {}), **variables}
        return template.render(
            chat, add_generation_prompt=generation_prompt, continue_final=goes_on, template_variables=given
        )

    def ids(self, text: str) -> list[int]:
        return [id for part in text.split(_CUT) for id in self._tokenizer.encode(part, add_special_tokens=False)]

    def held(self, params: SamplingParams, tools: Tools, inside: bool) -> SamplingParams:
        """With the grammar that calls keep to, and with special tokens in the text where these show calls."""
        given = params.grammar
        schema = given.schema() if given is not None and given.kind == "json_schema" else None
        lark = tools.grammar(self.syntax, self._tokenizer, inside, schema)
        marks = map(self._tokenizer.token_to_id, self.syntax.marks)
        shows = bool(tools.functions) and any(mark in self._tokenizer.special_ids for mark in marks)
        params = replace(params, grammar=Grammar.lark(lark)) if lark else params
        return replace(params, skip_special_tokens=False) if shows else params

    def reader(self, tools: Tools, inside: bool) -> Reader:
        """inside: the prompt has ended with `<think>`, as `inside` says."""
        return Reader(self.syntax if tools.functions else None, tools.names, self.thinks, inside, tools.most == 1)

    def inside(self, text: str) -> bool:
        """Has this prompt begun what the model thinks?"""
        return self.thinks and text.rstrip().endswith("<think>")

    def _message(self, message: Json, where: str) -> Json:
        role, id = message.get("role"), message.get("tool_call_id")
        if not isinstance(role, str) or not isinstance(message.get("content", ""), str | None):
            raise UsageError(f"{where} must have a role and a content, which are texts")
        if "content" not in message and not message.get("tool_calls"):
            raise UsageError(f"{where} has no content")
        try:
            calls = [
                {
                    "id": self._id(call.get("id") or ""),
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": _object(call["function"].get("arguments")),
                    },
                }
                for call in message.get("tool_calls") or ()
            ]
        except (AttributeError, KeyError, TypeError):
            raise UsageError(f"{where}.tool_calls must be calls as OpenAI writes them") from None
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
        content = message["content"]
        for call in message.pop("tool_calls", ()):
            written = json.dumps(call["function"], ensure_ascii=False)
            gap = "\n" if content else ""
            content += f"{gap}<tool_call>\n{written}\n</tool_call>"
        if message["role"] == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if made and made[-1].get("role") == "user" and made[-1].pop("answered", False):
                made[-1] |= {"content": f"{made[-1]['content']}\n{content}", "answered": True}
                continue
            message = {"role": "user", "answered": True}
        made.append({**message, "content": content})
    if tools:
        text = _EXPLAINED.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if made[0]["role"] == "system":
            made[0] = made[0] | {"content": f"{made[0]['content']}\n\n{text}"}
        else:
            made.insert(0, {"role": "system", "content": text})
    return made
