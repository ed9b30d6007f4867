"""How families of models write calls of tools, and grammars that hold an answer to it.

A family's chat template shows its syntax. transformers' `parse_response` parses whole answers by a schema that hardly
any model has, mistral_common knows one family, and vLLM's and SGLang's parsers do not come without their servers: so
the parser is our own (reader.py).
"""

import json
import re
from dataclasses import dataclass

from ..models.tokenizer import Tokenizer
from .errors import ApiError
from .requests import ChatRequest, Function, Json

_MOST_CALLS = 16  # of one answer that has to make some
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Tokens of their own, in some models.
_MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class Syntax:
    """Calls are `head call between call ... tail`. call: with NAME, JSON_NAME and ARGUMENTS in their places.

    marks: what shows that calls begin; where there are none, an answer that begins as a call is calls.
    """

    call: str
    between: str = ""
    head: str = ""
    tail: str = ""
    marks: tuple[str, ...] = ()


# Qwen, SmolLM, Hermes; Llama from 3.1 on; Mistral; Mistral since its version 11
HERMES = Syntax('<tool_call>\n{"name": JSON_NAME, "arguments": ARGUMENTS}\n</tool_call>', "\n", marks=("<tool_call>",))
LLAMA = Syntax('{"name": JSON_NAME, "parameters": ARGUMENTS}', "; ", marks=("<|python_tag|>",))
MISTRAL = Syntax('{"name": JSON_NAME, "arguments": ARGUMENTS}', ", ", "[TOOL_CALLS][", "]", marks=("[TOOL_CALLS]",))
MISTRAL_11 = Syntax("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", marks=("[TOOL_CALLS]",))


def syntax_of(template: str) -> Syntax:
    """Of the source of a chat template. Hermes' where it knows no tools: prompt.py explains that to the model."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_11 if "[ARGS]" in template else MISTRAL
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": ' in template):
        return LLAMA
    return HERMES


@dataclass(frozen=True)
class Tools:
    """What one request offers. functions: none where no call is wanted. least: calls that the answer must have."""

    functions: tuple[Function, ...] = ()
    least: int = 0
    most: int = _MOST_CALLS

    @classmethod
    def of(cls, request: ChatRequest) -> "Tools":
        functions = tuple(tool.function for tool in request.tools or () if tool.function is not None)
        choice, least, most = request.tool_choice or "auto", 0, _MOST_CALLS
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools") or choice
            names = [_named(tool) for tool in allowed.get("tools") or ()]
            functions, choice = tuple(one for one in functions if one.name in names), allowed.get("mode", "auto")
        if isinstance(choice, dict):
            name = _named(choice)
            functions, least, most = tuple(one for one in functions if one.name == name)[:1], 1, 1
            if not functions:
                raise _bad_choice(f"it names {name!r}, and no tool has this name")
        elif choice == "none":
            functions = ()
        elif choice in ("required", "any"):
            least = 1
            if not functions:
                raise _bad_choice("a call is required, and there are no tools")
        elif choice != "auto":
            raise _bad_choice("it is none, auto, required, or an object that names a function")
        if request.parallel_tool_calls is False:
            most = 1
        return cls(functions, least, most)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function.name for function in self.functions)

    def for_template(self) -> list[Json] | None:
        empty: Json = {"parameters": {"type": "object", "properties": {}}}
        shown = [one.model_dump(exclude_none=True, exclude={"strict"}) for one in self.functions]
        return [
            {"type": "function", "function": empty | one if "parameters" not in one else one} for one in shown
        ] or None

    def grammar(self, syntax: Syntax, tokenizer: Tokenizer, thinks: bool, schema: Json | None) -> str | None:
        """In llguidance's Lark: calls with arguments by their schemas. None: nothing holds the answer.

        thinks: the answer begins inside of `<think>`. schema: of an answer without calls.
        """
        if schema is not None:
            if not (self.functions or thinks):
                return None
        elif not self.least and not any(one.strict for one in self.functions):
            return None

        def terms(text: str) -> str:
            parts = re.split(f"({'|'.join(map(re.escape, _MARKS))})", text)
            ids = [(part, tokenizer.token_to_id(part) if part in _MARKS else None) for part in parts if part]
            return " ".join(f"<[{id}]>" if id in tokenizer.special_ids else json.dumps(part) for part, id in ids)

        rules, calls = [], []
        whole = syntax.head or syntax.call.partition("NAME")[0]
        mark = next((mark for mark in syntax.marks if whole.startswith(mark)), "")
        inside = not (self.least or schema is not None) and bool(mark)  # calls may begin in the middle of text
        for number, one in enumerate(self.functions):
            call = syntax.call.removeprefix(mark) if inside else syntax.call
            begin, _, end = call.partition("ARGUMENTS")
            names = {"JSON_NAME": json.dumps(one.name), "NAME": one.name}
            begin = re.sub("JSON_NAME|NAME", lambda place: names[place[0]], begin)  # noqa: B023 (called at once)
            calls.append(f"{terms(begin)} arguments_{number} {terms(end)}")
            rules.append(f"arguments_{number}: %json {json.dumps(_schema(one, bool(self.least)))}")
        rules.append(f"call: {' | '.join(calls) or 'text'}")
        head = syntax.head.removeprefix(mark) if inside else syntax.head
        if syntax is LLAMA and schema is not None and not self.least:
            head = syntax.marks[0]  # or nobody could tell a call from other JSON before its name
        more = ""
        if self.most > 1 and (syntax.head or not inside):
            more = f"({terms(syntax.between)} call){{0,{self.most - 1}}}"
        rules.append(f"calls: {terms(head)} call {more} {terms(syntax.tail)}")
        if inside:
            lazy = "[lazy]" if terms(mark).startswith('"') else ""
            rules += [f"begun{lazy}: TEXT {terms(mark)}", r"TEXT: /(.|\n)*/", "rest: TEXT"]
            start = "(begun calls)* rest" if self.most > 1 else "(begun calls)? rest"
        elif self.least:
            start = "calls"
        else:
            start = "calls | text"
            rules.append(f"text: %json {json.dumps(schema)}" if schema is not None else r"text: /([^{](.|\n)*)?/")
        if thinks:
            rules.append('thought[lazy]: /(.|\\n)*/ "</think>"')
            start = rf"thought /\s{{0,4}}/ ({start})"
        return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _schema(function: Function, held: bool) -> Json:
    """Of the arguments; written as Python writes JSON, as the models have seen it. To many clients it is a hint: what
    cannot be held is left out, and told by the title."""
    schema = dict(function.parameters or {}) if held or function.strict else {}
    options = {"lenient": not function.strict, **_WRITTEN}
    return {"type": "object", **schema, "title": function.name, "x-guidance": options}


def _named(choice: Json) -> object:
    inner = choice.get("function")
    return inner.get("name") if isinstance(inner, dict) else choice.get("name")


def _bad_choice(why: str) -> ApiError:
    return ApiError(400, f"Invalid value for 'tool_choice': {why}", "invalid_value", "tool_choice")
