"""Chat templates against transformers, for the template texts of well-known models, and what can go wrong in one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.models.chat_template import ChatTemplate

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

LLAMA_3_2 = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- This block extracts the system message, so we can slot it into the right place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""  # noqa: E501 - as the model has it


# Not of any model: blocks for training, loop controls, JSON with HTML characters, undefined variables.
HELPERS = """{% for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {% generation %}{{ m.content | tojson }}|{{ m | tojson(indent=2) }}{% endgeneration %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}{{ pad_token }}{{ tools is none }}{{ documents is none }}{{ nowhere }}{{ messages[0].nothing }}"""

TEMPLATES = {"smollm2": SMOLLM2, "llama-2": LLAMA_2, "llama-3.2": LLAMA_3_2, "helpers": HELPERS}

Chat = list[dict[str, str]]

CHATS: dict[str, Chat] = {
    "one": [{"role": "user", "content": "Hello, how are you?"}],
    "system": [
        {"role": "system", "content": "  Answer in <b>French</b> & nothing else.\n"},
        {"role": "user", "content": "What's 2 < 3?\n\n\tTell me."},
    ],
    "long": [
        {"role": "user", "content": "你好 😀 <s> </s> {{ bos_token }} {% if %}"},
        {"role": "assistant", "content": " مرحبا "},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": 'quote " and \\ and \u2028'},
        {"role": "user", "content": "bye"},
    ],
}


@pytest.fixture(scope="session")
def judge() -> Any:
    """A tokenizer of transformers: only its chat template matters."""
    transformers = pytest.importorskip("transformers", reason="transformers is the judge of this test")
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=library, **VARIABLES)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_agrees_with_transformers(judge: Any, name: str, chat: str, add_generation_prompt: bool) -> None:
    def ours() -> str:
        return ChatTemplate(TEMPLATES[name], VARIABLES).render(CHATS[chat], add_generation_prompt=add_generation_prompt)

    before = ours()
    expected = judge.apply_chat_template(
        CHATS[chat], chat_template=TEMPLATES[name], tokenize=False, add_generation_prompt=add_generation_prompt
    )
    assert expected in (before, ours())  # twice: the date may change while the test runs
    assert next(message["content"] for message in CHATS[chat] if message["role"] == "user").split()[0] in expected


@settings(UNHURRIED, max_examples=25)
@given(contents=st.lists(st.text(max_size=30), min_size=1, max_size=4))
@pytest.mark.parametrize("name", ["smollm2", "llama-2", "helpers"])
def test_any_content_agrees_with_transformers(judge: Any, name: str, contents: list[str]) -> None:
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": content} for place, content in enumerate(contents)
    ]
    expected = judge.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False)
    assert ChatTemplate(TEMPLATES[name], VARIABLES).render(messages, add_generation_prompt=False) == expected


def test_refusal_of_the_template(judge: Any) -> None:
    messages = [{"role": "assistant", "content": "I begin"}]
    with pytest.raises(Exception, match="must alternate"):
        judge.apply_chat_template(messages, chat_template=LLAMA_2, tokenize=False)
    with pytest.raises(PpsdError, match=r"the chat template in here refuses the messages: .* roles must alternate"):
        ChatTemplate(LLAMA_2, VARIABLES, origin="here").render(messages)


def test_input_is_not_changed() -> None:
    messages = copy.deepcopy(CHATS["long"])
    ChatTemplate(LLAMA_3_2, VARIABLES).render(messages)
    assert messages == CHATS["long"]
    for attack in ("{{ messages.pop() }}", "{{ messages[0].update(content='x') }}", "{{ messages.append(1) }}"):
        with pytest.raises(PpsdError, match="SecurityError"):
            ChatTemplate(attack).render(messages)
    assert messages == CHATS["long"]


# --- where templates come from ---

SAID = "{{ messages[-1].content }}"


def write(folder: Path, **files: object) -> None:
    for name, value in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_sources_in_order(tmp_path: Path) -> None:
    messages = CHATS["one"]

    def rendered() -> str:
        template = ChatTemplate.from_folder(tmp_path)
        assert template is not None
        return template.render(messages)

    assert ChatTemplate.from_folder(tmp_path) is None
    write(tmp_path, tokenizer_config__json={"chat_template": None}, special_tokens_map__json={"bos_token": "<s>"})
    assert ChatTemplate.from_folder(tmp_path) is None
    write(tmp_path, chat_template__json={"chat_template": "from json {{ bos_token }}" + SAID})
    assert rendered() == "from json <s>Hello, how are you?"
    config = {
        "chat_template": "config {{ bos_token }}" + SAID,
        "bos_token": {"content": "<b>"},
        "added_tokens_decoder": {},
    }
    write(tmp_path, tokenizer_config__json=config)
    assert rendered() == "config <b>Hello, how are you?"
    write(tmp_path, chat_template__jinja="\ufefffile {{ bos_token }}" + SAID)  # with a mark at its head
    assert rendered() == "file <b>Hello, how are you?"


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("form", ["list", "object", "files"])
@pytest.mark.parametrize("names", [("rag", "default", "tool_use"), ("tool_use", "rag"), ("default",)])
def test_tool_use_is_for_requests_with_tools(
    tmp_path: Path, judge: Any, form: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' rule: `tool_use` where there are tools, else `default`, else a refusal that names what there is."""
    templates = {name: f"{name} {{{{ tools|tojson }}}}{SAID}" for name in names}
    if form == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        for name, template in templates.items():
            place = "chat_template" if name == "default" else f"additional_chat_templates/{name}"
            (tmp_path / f"{place}.jinja").write_text(template)
    else:
        listed = [{"name": name, "template": template} for name, template in templates.items()]
        write(tmp_path, tokenizer_config__json={"chat_template": listed if form == "list" else templates})
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    monkeypatch.setattr(judge, "chat_template", templates)
    for tools in (None, TOOLS):
        try:
            expected = judge.apply_chat_template(CHATS["one"], tools=tools, tokenize=False)
        except ValueError:
            with pytest.raises(PpsdError, match="has the chat templates .*, and none named default"):
                template.render(CHATS["one"], template_variables={"tools": tools})
        else:
            assert template.render(CHATS["one"], template_variables={"tools": tools}) == expected
    assert ("tool_use {" in template.every_source) == ("tool_use" in names)


# --- what is said is what the prompt has ---

PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
EITHER = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{{ m.content[0].text }}{% endif %}{% endfor %}"
)
MIXED = (  # typed where the user speaks alone
    "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text if m.role == 'user' else m.content }}{% endfor %}"
)


@pytest.mark.parametrize("source", [PARTS, EITHER, MIXED])
def test_typed_content_where_a_template_reads_nothing_else(source: str) -> None:
    said = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "again")]
    messages = [{"role": role, "content": content} for role, content in said]
    template = ChatTemplate(source)
    assert template.render(messages) == "".join(f"<{role}>{content}" for role, content in said)
    assert template.render(messages[:3], continue_final=True) == "<system>s<user>u<assistant>a"


def test_template_that_loses_what_is_said() -> None:
    source = "{% for c in messages[0].content %}{% if c.kind == 'text' %}{{ c.text }}{% endif %}{% endfor %}"
    with pytest.raises(PpsdError, match="the chat template in here does not show what a user says: mend it"):
        ChatTemplate(source, origin="here").render(CHATS["one"])


@pytest.mark.parametrize("text", ["e", "m", "|", "", " ", "Because ", "  x\n", "assistant", "\ufdd1", "</s>"])
@pytest.mark.parametrize("name", ["smollm2", "llama-2", "llama-3.2", "trimmed"])
def test_answer_goes_on_after_its_own_text(name: str, text: str) -> None:
    """Wherever the same letters stand in the template, and with the blanks that it leaves."""
    source = (TEMPLATES | {"trimmed": "{{ messages[0].content }}\n\n{{ messages[-1].content | trim }} </s>"})[name]
    chat = [{"role": "user", "content": "Name a letter."}, {"role": "assistant", "content": text}]
    kept = text if name == "smollm2" else text.strip()
    made = ChatTemplate(source, VARIABLES).render(chat, continue_final=True)
    before = ChatTemplate(source, VARIABLES).render([chat[0], {**chat[1], "content": "#"}], continue_final=True)
    assert made == before.removesuffix("#") + kept
    assert before.endswith("#")


def test_last_message_that_is_not_shown() -> None:
    with pytest.raises(UsageError, match="changes the last message: it cannot be continued"):
        ChatTemplate("{{ messages[0].content }}").render(
            [*CHATS["one"], {"role": "assistant", "content": "x"}], continue_final=True
        )


THINKING = (
    "{% set shown = enable_thinking is not defined or enable_thinking %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if shown %}<think>{% endif %}{{ date_string or strftime_now('%Y') if shown else '' }}{{ bos_token }}"
)


def test_variables_that_a_template_reads() -> None:
    template = ChatTemplate(THINKING, {"bos_token": "<s>"})
    assert template.reads == ["bos_token", "date_string", "enable_thinking"]
    messages = [{"role": "user", "content": "hi"}]
    given = {"date_string": "today"}
    assert template.render(messages, template_variables=given) == "hi<think>today<s>"
    assert template.render(messages, template_variables={"enable_thinking": False}) == "hi<s>"
    template.set("enable_thinking", False)
    assert template.render(messages) == "hi<s>"
    assert template.render(messages, template_variables={"enable_thinking": True, **given}) == "hi<think>today<s>"
    for name in ("enable_thinkin", "messages", "shown"):
        with pytest.raises(UsageError, match=f"does not read '{name}'; it reads bos_token, date_string, enable_th"):
            template.set(name, 1)


# --- what can go wrong inside ---


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% for m in messages %}", "cannot be compiled (Unexpected end of template"),
        ("{% generation %}x", "cannot be compiled"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot be compiled"),
        ("{{ raise_exception('first\nsecond') }}", "refuses the messages: first second"),
        ("{{ nowhere.deeper }}", "UndefinedError: 'nowhere' is undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% include 'other' %}", "fails (TypeError"),
    ],
)
def test_failures_are_one_line(source: str, complaint: str) -> None:
    template = ChatTemplate(source, VARIABLES, origin="some/file")
    with pytest.raises(PpsdError) as caught:
        template.render(CHATS["one"])
    message = str(caught.value)
    assert complaint in message
    assert "some/file" in message
    assert "\n" not in message
    assert len(message) < 600


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "the list of messages is empty"),
        ("hello", "the messages must be a list, not str"),
        ({"role": "user", "content": "x"}, "the messages must be a list, not dict"),
        (["hello"], 'message 1 must be an object with "role" and "content", not str'),
        ([{"role": "user", "content": "x"}, {"content": "x"}], '"role" of message 2 must be a string'),
        ([{"role": "user"}], '"content" of message 1 must be a string'),
        ([{"role": "user", "content": None}], '"content" of message 1 must be a string, not NoneType'),
        ([{"role": "user", "content": [{"type": "text"}]}], '"content" of message 1 must be a string, not list'),
    ],
)
def test_bad_messages(messages: Any, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        ChatTemplate(SMOLLM2).render(messages)
    assert complaint in str(caught.value)


def test_special_token_variables(tmp_path: Path, judge: Any) -> None:
    """Tokens that are not set are undefined for the template, as in transformers, and not None."""
    source = "{{ bos_token }}{{ pad_token }}{{ unk_token is defined }}{{ additional_special_tokens is defined }}" + SAID
    write(
        tmp_path,
        tokenizer_config__json={"chat_template": source, "bos_token": "<s>", "pad_token": None, "add_bos_token": True},
        special_tokens_map__json={"eos_token": "</s>"},
    )
    template = ChatTemplate.from_folder(tmp_path)
    assert template is not None
    assert template.variables == VARIABLES
    assert template.render(CHATS["one"]).startswith("<s>False")
    assert judge.apply_chat_template(CHATS["one"], chat_template=source, tokenize=False).startswith("<s>False")
