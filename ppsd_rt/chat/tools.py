"""How families of models write calls of tools, and grammars that hold an answer to it.

A family's chat template shows its syntax. transformers' `parse_response` parses whole answers by a schema that hardly
any model has, mistral_common knows one family, and vLLM's and SGLang's parsers do not come without their servers: so
the parser is our own (reader.py).
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError
from ..models.tokenizer import Tokenizer
from ..printable import quoted
from ..sampling.grammar import schema_of

Json = dict[str, Any]

NAME = "^[a-zA-Z0-9_.:/-]{1,128}$"  # of a function
_MOST_CALLS = 16  # of one answer that has to make some
_WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Tokens of their own, in some models.
_MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class Syntax:
    """Calls are `head call between call ... tail`. call: with NAME, JSON_NAME and ARGUMENTS in their places.

    marks: what shows that calls begin. close: what ends them besides. bare: an answer that begins as a call is calls.
    """

    call: str
    between: str = ""
    head: str = ""
    tail: str = ""
    marks: tuple[str, ...] = ()
    close: str = ""
    bare: bool = False


FENCE = "```"
# Qwen, SmolLM, Hermes (also in a fence, or bare, as llama.cpp reads it); Llama from 3.1 on; Mistral; Mistral since its
# version 11
HERMES = Syntax(
    '<tool_call>\n{"name": JSON_NAME, "arguments": ARGUMENTS}\n</tool_call>',
    "\n",
    marks=("<tool_call>", FENCE),
    close="</tool_call>",
    bare=True,
)
LLAMA = Syntax('{"name": JSON_NAME, "parameters": ARGUMENTS}', "; ", marks=("<|python_tag|>",), bare=True)
MISTRAL = Syntax('{"name": JSON_NAME, "arguments": ARGUMENTS}', ", ", "[TOOL_CALLS][", "]", marks=("[TOOL_CALLS]",))
MISTRAL_11 = Syntax("[TOOL_CALLS]NAME[ARGS]ARGUMENTS", marks=("[TOOL_CALLS]",))


def syntax_of(template: str) -> Syntax:
    """Of the source of a chat template. Hermes' where it knows no tools: prompt.py explains that to the model."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL_11 if "[ARGS]" in template else MISTRAL
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": ' in template):
        return LLAMA
    return HERMES


def functions_of(tools: Iterable[Any]) -> list[Json]:
    """name, description, parameters, strict: of tools in OpenAI's form, of what these have under `function`, or of
    pydantic classes, which may be the parameters alone, too. UsageError for what is none."""
    made = []
    for number, tool in enumerate(tools):
        if isinstance(tool, type):
            tool = {"name": tool.__name__, "description": tool.__doc__, "parameters": tool}
        one = tool.get("function", tool) if isinstance(tool, Mapping) else tool
        name = one.get("name") if isinstance(one, Mapping) else None
        if not isinstance(name, str) or not re.fullmatch(NAME, name):
            raise UsageError(f"tools[{number}] must be a function with a name of letters, not {quoted(tool)}")
        one = {**one, "parameters": schema_of(one.get("parameters"))}
        if not isinstance(one["parameters"], Mapping | None):
            raise UsageError(f"tools[{number}]: parameters must be a schema, not {quoted(one['parameters'])}")
        made.append({key: value for key, value in one.items() if value is not None})
    return made


@dataclass(frozen=True)
class Tools:
    """What one request offers. functions: none where no call is wanted. least: calls that the answer must have."""

    functions: tuple[Json, ...] = ()  # name, description, parameters, strict: what there is of them
    least: int = 0
    most: int = _MOST_CALLS

    @classmethod
    def of(cls, functions: Sequence[Json], choice: Any = None, parallel: bool | None = None) -> "Tools":
        """choice, parallel: OpenAI's tool_choice and parallel_tool_calls. UsageError for a choice that is none."""
        offered, choice, least, most = tuple(functions), choice or "auto", 0, _MOST_CALLS
        if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools", choice)
            if not isinstance(allowed, Mapping) or not isinstance(allowed.get("tools", []), list):
                raise UsageError("tool_choice: its allowed_tools must have a list of tools")
            names = [_named(tool) for tool in allowed.get("tools", ())]
            offered, choice = tuple(one for one in offered if one["name"] in names), allowed.get("mode", "auto")
        if isinstance(choice, Mapping):
            name = _named(choice)
            offered, least, most = tuple(one for one in offered if one["name"] == name)[:1], 1, 1
            if not offered:
                raise UsageError(f"tool_choice: it names {quoted(name)}, and no tool has this name")
        elif choice == "none":
            offered = ()
        elif choice in ("required", "any"):
            least = 1
            if not offered:
                raise UsageError("tool_choice: a call is required, and there are no tools")
        elif choice != "auto":
            raise UsageError("tool_choice: it is none, auto, required, or an object that names a function")
        return cls(offered, least, 1 if parallel is False else most)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(function["name"] for function in self.functions)

    def for_template(self) -> list[Json] | None:
        empty: Json = {"parameters": {"type": "object", "properties": {}}}
        shown = [{key: value for key, value in one.items() if key != "strict"} for one in self.functions]
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
        elif not self.least and not any(one.get("strict") for one in self.functions):
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
            names = {"JSON_NAME": json.dumps(one["name"]), "NAME": one["name"]}
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


def _schema(function: Json, held: bool) -> Json:
    """Of the arguments; written as Python writes JSON, as the models have seen it. To many clients it is a hint: what
    cannot be held is left out, and told by the title."""
    schema = dict(function.get("parameters") or {}) if held or function.get("strict") else {}
    options = {"lenient": not function.get("strict"), **_WRITTEN}
    return {"type": "object", **schema, "title": function["name"], "x-guidance": options}


def _named(choice: Any) -> object:
    choice = choice if isinstance(choice, Mapping) else {}
    inner = choice.get("function")
    return inner.get("name") if isinstance(inner, Mapping) else choice.get("name")
