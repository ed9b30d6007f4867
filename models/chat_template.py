"""Chat templates: the Jinja programs with which model folders turn a list of messages into one prompt.

A template comes with the weights and is foreign code, so it runs in Jinja's immutable sandbox, metered (sandbox.py),
with the settings and helpers that `transformers` gives it. What goes wrong inside it ends as a one-line `PpsdError`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from ..errors import PpsdError, UsageError
from .files import AnyFile, AnyFolder, one_line, read_json_object, read_text
from .sandbox import MeteredEnvironment, TooMuchWork, charge, metered

# A template copies each message once or a few times and adds some text of its own: more than this is a loop gone wrong.
_OUTPUT_ALLOWANCE = 1 << 20
_OUTPUT_PER_INPUT = 16
# Of the sandbox's units: seconds at most for a short conversation, and a hundred times what templates of models take.
_WORK_ALLOWANCE = 1 << 26
_WORK_PER_INPUT = 256
_WORK_PER_MESSAGE = 1 << 16
_LONGEST_SOURCE = 1 << 18  # characters
_MEND = "mend it, or give a plain prompt instead of messages"


def special_tokens(folder: AnyFolder) -> dict[str, str]:
    """The named special tokens of a model folder, such as {"bos_token": "<s>"}.

    They stand in tokenizer_config.json and special_tokens_map.json. As in transformers the latter wins, unless the
    former has an `added_tokens_decoder` and so is the newer one. A token is a string or an object with its text under
    "content". Raises PpsdError for files that are not JSON objects and for a bos_token or eos_token that is neither.
    """
    tokens: dict[str, str] = {}
    config = read_json_object(folder / "tokenizer_config.json", missing_ok=True)
    newer = config.get("added_tokens_decoder") is not None
    files = ("special_tokens_map.json", "tokenizer_config.json")
    for name in files if newer else reversed(files):
        for key, value in read_json_object(folder / name, missing_ok=True).items():
            if not key.endswith("_token") or value is None:
                continue
            content = token_content(value)
            if content is not None:
                tokens[key] = content
            elif key in ("bos_token", "eos_token"):
                raise PpsdError(f'{folder / name}: {key} must be a string or an object with a string "content"')
    return tokens


def token_content(value: object) -> str | None:
    """The text of a token written as a string or as {"content": ...}; None for anything else."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


class ChatTemplate:
    """A chat template and the variables (`bos_token`, `eos_token`, ...) that it may use.

    The source is compiled at the first `render`, so that a broken template does not keep anybody from plain prompts.
    """

    def __init__(
        self, source: str, variables: Mapping[str, Any] | None = None, *, origin: str = "the model folder"
    ) -> None:
        """`origin` names where the source came from, for error messages."""
        self.source = source
        self.variables: dict[str, Any] = dict(variables or {})
        self.origin = origin
        self._problem: str | None = None  # why there is no source, for whoever wants to render it

    @cached_property
    def reads(self) -> list[str]:
        """The variables that the template reads besides those that `render` always gives, such as `enable_thinking`.

        Raises PpsdError where it cannot be compiled.
        """
        self._compiled  # noqa: B018 (says what is wrong)
        environment = _environment()
        free = jinja2.meta.find_undeclared_variables(environment.parse(self.source))
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
    def from_folder(cls, folder: AnyFolder) -> ChatTemplate | None:
        """The chat template of a model folder, or None where it has none.

        Looked for in this order: the file chat_template.jinja; `chat_template` in tokenizer_config.json; the same in
        chat_template.json. In JSON it is a string, a list of {"name", "template"} objects or an object from names to
        templates, of which the one named "default" is taken, else the first. Raises PpsdError for unreadable files; a
        template of another shape keeps nobody from plain prompts, and is refused when it is rendered.
        """
        for name in ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"):
            path, problem = folder / name, None
            try:
                source = _template_key(path) if name.endswith(".json") else read_text(path)
            except FileNotFoundError:
                continue
            except _OfAnotherShape as error:
                source, problem = "", str(error)
            if source is not None:
                template = cls(source, special_tokens(folder), origin=str(path))
                template._problem = problem
                return template
        return None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`, each a mapping with string values for "role" and "content".

        One with "tool_calls" may have a null content or none. template_variables: more of what the template may use,
        such as `tools` and `enable_thinking`. The prompt holds the special tokens as text, BOS included where the
        template writes it, so encode it with `add_special_tokens=False`. The messages are not changed.

        Raises UsageError for messages of another shape, and PpsdError when the template cannot be compiled, refuses
        the messages (`raise_exception`), fails, or does not stop: the output may have at most about a million
        characters more than sixteen times the messages, and the work has a limit of that kind, too (sandbox.py).
        """
        chat = _checked_messages(messages)
        given = dict(template_variables or {})
        size = sum(len(message.get("content") or "") for message in chat)
        try:
            others = [{key: value for key, value in message.items() if key != "content"} for message in chat]
            size += len(json.dumps([given, others]))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"what a chat template is given must be JSON: {one_line(error)}") from None
        limit = _OUTPUT_ALLOWANCE + _OUTPUT_PER_INPUT * size
        work = _WORK_ALLOWANCE + _WORK_PER_INPUT * size + _WORK_PER_MESSAGE * len(chat)
        variables = {
            **self.variables,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **given,
            "messages": chat,
        }
        template = self._compiled
        pieces = []
        try:
            with metered(work):
                for piece in template.generate(variables):
                    pieces.append(piece)
                    limit -= len(piece)
                    if limit < 0:
                        break
        except TooMuchWork:
            raise self._broken("computes without end or needs too much memory") from None
        except _Refused as error:
            raise PpsdError(f"the chat template in {self.origin} refuses the messages: {one_line(error)}") from error
        except Exception as error:  # foreign code may raise anything
            raise self._broken(f"fails ({type(error).__name__}: {one_line(error)})") from error
        if limit < 0:
            raise self._broken("writes without end")
        return "".join(pieces)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if self._problem is not None:
            raise PpsdError(self._problem)
        try:
            if len(self.source) > _LONGEST_SOURCE:
                raise ValueError(f"it has {len(self.source)} characters, and {_LONGEST_SOURCE} are enough for all")
            with metered(_WORK_ALLOWANCE):
                return _environment().from_string(self.source)
        except Exception as error:  # besides TemplateSyntaxError: Python's own limits on nesting and recursion
            place = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise self._broken(f"cannot be compiled ({one_line(error)}{place})") from error

    def _broken(self, how: str) -> PpsdError:
        return PpsdError(f"the chat template in {self.origin} {how}: {_MEND}")


def _template_key(path: AnyFile) -> str | None:
    value = read_json_object(path, missing_ok=True).get("chat_template")
    if value is None or isinstance(value, str):
        return value
    named: dict[str, str] = {}
    if isinstance(value, dict):
        value = [{"name": name, "template": template} for name, template in value.items()]
    for entry in value if isinstance(value, list) else ():
        if isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str):
            named[entry["name"]] = entry["template"]
    if not named:
        raise _OfAnotherShape(
            f'{path}: chat_template must be a string or a list of objects with the strings "name" and "template": '
            + _MEND
        )
    return named.get("default", next(iter(named.values())))


def _checked_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages, which are shown to be what a template expects."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise UsageError(f"the messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise UsageError("the list of messages is empty: give at least one message")
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise UsageError(
                f'message {number} must be an object with "role" and "content", not {type(message).__name__}'
            )
        for key in ("role", "content"):
            if key == "content" and message.get(key) is None and message.get("tool_calls"):
                continue
            if key not in message:
                raise UsageError(f'message {number} has no "{key}"')
            if not isinstance(message[key], str):
                raise UsageError(f'"{key}" of message {number} must be a string, not {type(message[key]).__name__}')
    return [dict(message) for message in messages]


class _OfAnotherShape(Exception):
    """What stands for a template is none."""


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _GenerationBlock(jinja2.ext.Extension):
    """Lets `{% generation %} ... {% endgeneration %}` through: it marks the assistant's text for training only."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


@cache
def _environment() -> MeteredEnvironment:
    return MeteredEnvironment(
        {"raise_exception": _raise_exception, "strftime_now": _strftime_now},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    charge(256 * len(format))  # the most that time.strftime gives
    return datetime.now().strftime(format)
