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

QWEN_2_5 = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""  # noqa: E501 - as the model has it

MISTRAL = r"""{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial system one!") }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501 - as the model has it

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

# Not of any model: blocks for training, loop controls, JSON with HTML characters, undefined variables.
HELPERS = """{% for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {% generation %}{{ m.content | tojson }}|{{ m | tojson(indent=2) }}{% endgeneration %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}{{ pad_token }}{{ tools is none }}{{ documents is none }}{{ nowhere }}{{ messages[0].nothing }}"""

TEMPLATES = {
    "smollm2": SMOLLM2,
    "llama-2": LLAMA_2,
    "llama-3.2": LLAMA_3_2,
    "qwen2.5": QWEN_2_5,
    "mistral": MISTRAL,
    "zephyr": ZEPHYR,
    "helpers": HELPERS,
}

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
        CHATS[chat],
        chat_template=TEMPLATES[name],
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    assert expected in (before, ours())  # twice: the date may change while the test runs
    assert next(message["content"] for message in CHATS[chat] if message["role"] == "user").split()[0] in expected


@settings(UNHURRIED, max_examples=50)
@given(contents=st.lists(st.text(max_size=30), min_size=1, max_size=4))
@pytest.mark.parametrize("name", ["smollm2", "llama-2", "zephyr", "helpers"])
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
    write(tmp_path, chat_template__json={"chat_template": "from json {{ bos_token }}"})
    assert rendered() == "from json <s>"
    write(tmp_path, tokenizer_config__json={"chat_template": "config {{ bos_token }}", "bos_token": {"content": "<b>"}})
    assert rendered() == "config <b>"
    write(tmp_path, chat_template__jinja="file {{ bos_token }}")
    assert rendered() == "file <b>"


def test_named_templates(tmp_path: Path) -> None:
    def source(entries: object) -> str:
        write(tmp_path, tokenizer_config__json={"chat_template": entries})
        template = ChatTemplate.from_folder(tmp_path)
        assert template is not None
        return template.source

    rag = {"name": "rag", "template": "R"}
    assert source([rag, {"name": "default", "template": "D"}]) == "D"
    assert source([rag, {"name": "tool_use", "template": "T"}]) == "R"


@pytest.mark.parametrize("value", [5, {}, [], [1], [{"name": "default"}], {"default": "x"}])
def test_templates_of_another_shape(tmp_path: Path, value: object) -> None:
    write(tmp_path, tokenizer_config__json={"chat_template": value})
    with pytest.raises(PpsdError, match=r"tokenizer_config\.json: chat_template must be a string or a list") as caught:
        ChatTemplate.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("chat_template.jinja", b"\xff\xfe", "chat_template.jinja is not UTF-8 text"),
        ("tokenizer_config.json", b"{'a': 1}", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", b'"text"', "tokenizer_config.json must hold a JSON object, not str"),
        ("chat_template.json", b"", "chat_template.json is not valid JSON"),
        ("chat_template.jinja", None, "chat_template.jinja: Is a directory"),
        ("chat_template.json", None, "chat_template.json: Is a directory"),
    ],
)
def test_unreadable_files(tmp_path: Path, file: str, content: bytes | None, complaint: str) -> None:
    if content is None:
        (tmp_path / file).mkdir()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(PpsdError) as caught:
        ChatTemplate.from_folder(tmp_path)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


# --- what can go wrong inside ---


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{% for m in messages %}", "cannot be compiled (Unexpected end of template"),
        ("a\nb\n{{ 1 + }}", "in line 3"),
        ("{% generation %}x", "cannot be compiled"),
        ("{% unknown_tag %}", "cannot be compiled (Encountered unknown tag 'unknown_tag'"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot be compiled"),
        ("{{ raise_exception('first\nsecond') }}", "refuses the messages: first second"),
        ("{{ nowhere.deeper }}", "UndefinedError: 'nowhere' is undefined"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'x' | nofilter }}", "cannot be compiled (No filter named 'nofilter'"),
        ("{% include 'other' %}", "fails (TypeError"),
        (
            "{% for a in range(90000) %}{% for b in range(90000) %}{{ 'x' * 100 }}{% endfor %}{% endfor %}",
            "without end",
        ),
        ("{{ 'x' * 5000000 }}", "without end"),
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


def test_long_messages_are_not_cut_off() -> None:
    content = "x" * 3_000_000
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}")
    assert template.render([{"role": "user", "content": content}]) == content * 2


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "the list of messages is empty"),
        ("hello", "the messages must be a list, not str"),
        (None, "the messages must be a list, not NoneType"),
        ({"role": "user", "content": "x"}, "the messages must be a list, not dict"),
        (["hello"], 'message 1 must be an object with "role" and "content", not str'),
        ([{"role": "user", "content": "x"}, {"content": "x"}], 'message 2 has no "role"'),
        ([{"role": "user"}], 'message 1 has no "content"'),
        ([{"role": "user", "content": None}], '"content" of message 1 must be a string, not NoneType'),
        ([{"role": 1, "content": "x"}], '"role" of message 1 must be a string, not int'),
        ([{"role": "user", "content": [{"type": "text"}]}], '"content" of message 1 must be a string, not list'),
    ],
)
def test_bad_messages(messages: Any, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        ChatTemplate(SMOLLM2).render(messages)
    assert complaint in str(caught.value)


def test_tuples_and_other_mappings_are_messages() -> None:
    from types import MappingProxyType

    messages = (MappingProxyType({"role": "user", "content": "hi"}),)
    template = ChatTemplate("{{ messages[0].role }}: {{ messages[0] | tojson }}")
    assert template.render(messages) == 'user: {"role": "user", "content": "hi"}'


def test_special_token_variables(tmp_path: Path, judge: Any) -> None:
    """Tokens that are not set are undefined for the template, as in transformers, and not None."""
    source = "{{ bos_token }}{{ pad_token }}{{ unk_token is defined }}{{ additional_special_tokens is defined }}"
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


@pytest.mark.filterwarnings("ignore:invalid escape sequence:DeprecationWarning")  # of Jinja, about half a string
def test_damaged_templates_give_an_error_or_a_text() -> None:
    outcomes = {"error": 0, "works": 0}
    for source in (LLAMA_2, LLAMA_3_2, MISTRAL):
        for length in range(0, len(source), 5):
            for damaged in (source[:length], source[:length] + source[length + 3 :]):
                try:
                    ChatTemplate(damaged, VARIABLES).render(CHATS["long"])
                    outcomes["works"] += 1
                except PpsdError as error:
                    assert "\n" not in str(error)
                    outcomes["error"] += 1
    assert min(outcomes.values()) > 100
