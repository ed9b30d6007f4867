"""Chat templates: the Jinja programs with which model folders turn a list of messages into one prompt.

A template comes with the weights and is foreign code, so it runs in Jinja's immutable sandbox, with the settings and
helpers that `transformers` gives it. It may take long, so servers render in a thread; any thread may. What goes wrong
inside it ends as a one-line `PpsdError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import PpsdError, UsageError
from .files import one_line, read_json_object, read_text, shown, unfit

_MEND = "mend it, or give a plain prompt instead of messages"
_MORE_TEMPLATES = "additional_chat_templates"
_MARK = "\ufdd1"  # no character: stands where a text ends, or in place of one
_BLANK = "\v"  # behind the mark: is gone where the template trims what it is given

# Conversations in which each role says something, for `ChatTemplate._typed_roles`.
_CALL = {"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": {}}}
_FUNCTION = {"type": "function", "function": {"name": "f", "description": "f", "parameters": {"type": "object"}}}
_TRIALS: dict[str, tuple[dict[str, Any], ...]] = {
    "user": ({"role": "user"},),
    "system": ({"role": "system"}, {"role": "user"}),
    "assistant": ({"role": "user"}, {"role": "assistant"}, {"role": "user"}),
    "tool": (
        {"role": "user"},
        {"role": "assistant", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": _CALL["id"]},
    ),
}


@dataclass(frozen=True)
class TokenFiles:
    """What a model folder says of its tokens beside the tokenizer; a .gguf file says it all in itself, as `config`."""

    place: Path  # the folder, or the .gguf file
    config: Mapping[str, Any]  # tokenizer_config.json
    special: Mapping[str, Any]  # special_tokens_map.json
    added: Mapping[str, Any]  # added_tokens.json

    @classmethod
    def read(cls, folder: Path) -> TokenFiles:
        """Each may be missing. Raises PpsdError for one that is no JSON object."""
        names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
        return cls(folder, *(read_json_object(folder / name, missing_ok=True) for name in names))

    @cached_property
    def names(self) -> dict[str, str]:
        """The named special tokens, such as {"bos_token": "<s>"}.

        As in transformers special_tokens_map.json wins, unless the other file has an `added_tokens_decoder` and so is
        the newer one. A token is a string or an object with its text under "content". Raises PpsdError for a bos_token
        or eos_token that is neither.
        """
        tokens: dict[str, str] = {}
        files = [("tokenizer_config.json", self.config), ("special_tokens_map.json", self.special)]
        for name, values in reversed(files) if self.config.get("added_tokens_decoder") is not None else files:
            for key, value in values.items():
                content = token_content(value)
                if key.endswith("_token") and content is not None:
                    tokens[key] = content
                elif key in ("bos_token", "eos_token") and value is not None:
                    wanted = 'a string or an object with a string "content"'
                    raise unfit(self.place / name, key, shown(value), wanted)
        return tokens


def token_content(value: object) -> str | None:
    """The text of a token written as a string or as {"content": ...}; None for anything else."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


class ChatTemplate:
    """A model's chat templates and the variables (`bos_token`, `eos_token`, ...) that they may use.

    Of several the one named `tool_use` is for requests with tools, and `default` for the others, as in transformers.
    They are compiled at the first `render`, so that a broken one does not keep anybody from plain prompts.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        variables: Mapping[str, Any] | None = None,
        *,
        origin: str = "the model folder",
    ) -> None:
        """source: of one template, or of several by name. origin: where it came from, for error messages."""
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self.variables: dict[str, Any] = dict(variables or {})
        self.origin = origin
        self._typed: dict[str, frozenset[str]] = {}

    @property
    def source(self) -> str:
        return self.sources.get("default", "")

    @property
    def every_source(self) -> str:
        """The default template and the one for tools: what a model's calls look like shows in one of them."""
        return "\n".join(self.sources[name] for name in ("default", "tool_use") if name in self.sources)

    @cached_property
    def reads(self) -> list[str]:
        """The variables that the templates read besides those that `render` always gives, such as `enable_thinking`.

        Raises PpsdError where one cannot be compiled.
        """
        free: set[str] = set()
        environment = _environment()
        for name in ("default", "tool_use"):
            if name in self.sources:
                self._compiled(name)  # says what is wrong
                free |= jinja2.meta.find_undeclared_variables(environment.parse(self.sources[name]))
        return sorted(free - {*environment.globals, "messages", "tools", "documents", "add_generation_prompt"})

    def set(self, name: str, value: object) -> None:
        """Give a variable of the template a value, in every prompt that does not say otherwise.

        Raises UsageError for one that the template does not read, and PpsdError where it cannot be compiled.
        """
        if name not in self.reads:
            known = ", ".join(self.reads) or "no variables"
            raise UsageError(f"the chat template in {self.origin} does not read {name!r}; it reads {known}")
        self.variables[name] = value

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate | None:
        """The chat templates of a model folder, or None where it has none.

        Looked for in this order: the file chat_template.jinja; `chat_template` in tokenizer_config.json; the same in
        chat_template.json. In JSON it is a string, a list of {"name", "template"} objects or an object from names to
        templates. additional_chat_templates/NAME.jinja are further ones. Raises PpsdError for unreadable files.
        """
        more, variables = sorted((folder / _MORE_TEMPLATES).glob("*.jinja")), TokenFiles.read(folder).names
        named = {path.stem: read_text(path) for path in more}
        for name in ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"):
            path = folder / name
            try:
                found = _template_key(path) if name.endswith(".json") else {"default": read_text(path)}
            except FileNotFoundError:
                continue
            if found:
                return cls(found | named, variables, origin=str(path))
        return cls(named, variables, origin=str(more[0].parent)) if more else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, each a mapping with string values for "role" and "content".

        One with "tool_calls" may have a null content or none. continue_final: the prompt ends with the last message's
        text, which the model goes on with. template_variables: more of what the template may use, such as `tools` and
        `enable_thinking`. The prompt holds the special tokens as text, BOS included where the template writes it, so
        encode it with `add_special_tokens=False`. The messages are not changed. A template that reads contents as
        lists of typed parts alone gets them so.

        Raises UsageError for messages of another shape and a last one that the template does not show, and PpsdError
        when the template cannot be compiled, refuses the messages (`raise_exception`), fails, or shows no user's text.
        """
        chat = _checked_messages(messages)
        given = dict(template_variables or {})
        try:
            json.dumps(
                [given, [{key: value for key, value in message.items() if key != "content"} for message in chat]]
            )
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"what a chat template is given must be JSON: {one_line(error)}") from None
        last = chat[-1].get("content") or ""
        if continue_final:
            chat[-1]["content"] = last + _MARK + _BLANK
        variables = {**self.variables, "tools": None, "documents": None}
        variables |= {"add_generation_prompt": add_generation_prompt and not continue_final, **given}
        name = "tool_use" if variables["tools"] is not None and "tool_use" in self.sources else "default"
        template = self._compiled(name)
        if name not in self._typed:
            self._typed[name] = self._typed_roles(template, [_FUNCTION] if name == "tool_use" else None)
        typed = self._typed[name]
        try:
            text = template.render(variables | {"messages": [_in_parts(message, typed) for message in chat]})
        except _Refused as error:
            raise PpsdError(f"the chat template in {self.origin} refuses the messages: {one_line(error)}") from error
        except Exception as error:  # foreign code may raise anything
            raise self._broken(f"fails ({type(error).__name__}: {one_line(error)})") from error
        return _up_to_mark(text, last) if continue_final else text

    def _typed_roles(self, template: jinja2.Template, tools: list[Any] | None) -> frozenset[str]:
        """The roles whose contents the template reads as lists of typed parts alone: rendered once with each form."""
        typed: set[str] = set()
        given = {**self.variables, "tools": tools, "documents": None, "add_generation_prompt": True}
        for role, trial in _TRIALS.items():
            chat = [{**message, "content": _MARK if message["role"] == role else "text"} for message in trial]
            shows: list[bool | None] = []
            for roles in (typed, typed | {role}):
                try:
                    shows.append(
                        _MARK in template.render({**given, "messages": [_in_parts(one, roles) for one in chat]})
                    )
                except Exception:  # it wants another conversation than this one
                    shows.append(None)
            if shows[1] and not shows[0]:
                typed.add(role)
            elif role == "user" and shows == [False, False]:
                raise self._broken("does not show what a user says")
        return frozenset(typed)

    def _compiled(self, name: str) -> jinja2.Template:
        if name not in self.sources:
            raise PpsdError(
                f"{self.origin} has the chat templates {', '.join(self.sources)}, and none named {name}: {_MEND}"
            )
        try:
            return _compile(self.sources[name])
        except Exception as error:  # besides TemplateSyntaxError: Python's own limits on nesting and recursion
            place = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise self._broken(f"cannot be compiled ({one_line(error)}{place})") from error

    def _broken(self, how: str) -> PpsdError:
        return PpsdError(f"the chat template in {self.origin} {how}: {_MEND}")


def _in_parts(message: dict[str, Any], roles: Set[str]) -> dict[str, Any]:
    """The message with its content as a list of typed parts, where its role is one of these."""
    if message["role"] not in roles or message.get("content") is None:
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _up_to_mark(text: str, last: str) -> str:
    """The last message's text ends there; its own blanks before go where the template has taken off those behind."""
    place = text.rfind(_MARK)
    if place < 0:
        raise UsageError("the chat template changes the last message: it cannot be continued")
    blanks = "" if text.startswith(_BLANK, place + 1) or not last.strip() else last[len(last.rstrip()) :]
    return text[:place].removesuffix(blanks)


def _template_key(path: Path) -> dict[str, str]:
    """The templates by name; none where the file has no such key."""
    value = read_json_object(path, missing_ok=True).get("chat_template")
    if value is None or isinstance(value, str):
        return {} if value is None else {"default": value}
    named: dict[str, str] = {}
    if isinstance(value, dict):
        value = [{"name": name, "template": template} for name, template in value.items()]
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            named[entry["name"]] = entry["template"]
    if not named:
        wanted = 'a string or a list of objects with the strings "name" and "template"'
        raise unfit(path, "chat_template", shown(value), wanted)
    return named


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages, which are shown to be what a template expects."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise UsageError(f"the messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise UsageError("the list of messages is empty: give at least one message")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            what = type(message).__name__
            raise UsageError(f'message {number} must be an object with "role" and "content", not {what}')
        for key in ("role", "content"):
            value = message.get(key)
            if not (isinstance(value, str) or (key == "content" and value is None and message.get("tool_calls"))):
                raise UsageError(f'"{key}" of message {number} must be a string, not {type(value).__name__}')
    return [dict(message) for message in messages]


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationBlock(jinja2.ext.Extension):
    """Lets `{% generation %} ... {% endgeneration %}` through: it marks the assistant's text for training only."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@lru_cache(16)
def _compile(source: str) -> jinja2.Template:
    return _environment().from_string(source)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _tojson
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
