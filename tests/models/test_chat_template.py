"""Chat templates against transformers, for the template texts of well-known models, and what can go wrong in one."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.models import chat_template
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


# Not of any model: blocks for training, loop controls, JSON with HTML characters, undefined variables.
HELPERS = """{% for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {% generation %}{{ m.content | tojson }}|{{ m | tojson(indent=2) }}{% endgeneration %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}{{ pad_token }}{{ tools is none }}{{ documents is none }}{{ nowhere }}{{ messages[0].nothing }}"""

TEMPLATES = {"smollm2": SMOLLM2, "llama-2": LLAMA_2, "llama-3.2": LLAMA_3_2, "mistral": MISTRAL, "helpers": HELPERS}

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
    config = {"chat_template": "config {{ bos_token }}", "bos_token": {"content": "<b>"}, "added_tokens_decoder": {}}
    write(tmp_path, tokenizer_config__json=config)
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
    assert source({"rag": "R", "default": "D"}) == "D"


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
        ("{% for a in range(90000) %}{% for b in range(90000) %}{{ 'x' }}{% endfor %}{% endfor %}", "without end"),
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


NEST = "{% set ns = namespace(x=(1,), y=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% set ns.y = (ns.y, ns.y) %}{% endfor %}"  # noqa: E501
LONG = "{% set a = 'a' * 100000 %}"
FOR = "{% for i in range(99999) %}"
END = "{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 20000000000 }}",
        "{{ 20000000000 * [0] }}",
        FOR + FOR + END + END,
        FOR + "{% for j in range(99999) if false %}{% endfor %}" + END,
        FOR + "{% set x = i.a or i.b or i.c %}" + END,
        FOR + "{% set x = range(99999) | list %}" + END,
        FOR + "{% set x = [] | map('join', *range(99999)) %}" + END,
        FOR + "{% set c = cycler(*range(99999)) %}" + END,
        "{% set x %}" + FOR + "some text" + END + "{% endset %}",
        "{% filter upper %}" + FOR + "some text" + END + "{% endfilter %}",
        "{% for x in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 3 }}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
        "{% set ns = namespace(x='ab') %}" + FOR + "{% set ns.x = ns.x ~ ns.x %}" + END,
        "{% set ns = namespace(x='ab') %}" + FOR + "{% set ns.x = ns.x + ns.x %}" + END,
        "{% set ns = namespace(x=[1]) %}" + FOR + "{% set ns.x = ns.x + ns.x %}" + END,
        "{% set ns = namespace(x='ab') %}" + FOR + "{% set ns.x = '%s%s' % (ns.x, ns.x) %}" + END,
        "{% set ns = namespace(x='ab') %}" + FOR + "{% set ns.x = [ns.x, ns.x] | join %}" + END,
        "{% set ns = namespace(x=1) %}" + FOR + "{% set ns.x = namespace(a=ns.x, b=ns.x) %}" + END + "{{ ns.x }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}",
        NEST + "{{ ns.x }}",
        NEST + "{{ ns.x | tojson }}",
        NEST + "{{ ns.x | string | length }}",
        NEST + "{% set x = ns.x ~ 'a' %}",
        NEST + "{% if ns.x == ns.y %}{% endif %}",
        NEST + "{% if ns.x is eq(ns.y) %}{% endif %}",
        NEST + "{% set x = {ns.x: 1} %}",
        NEST + "{% set x = {}[ns.x] %}",
        NEST + "{% set x = {}.get(ns.x) %}",
        NEST + "{% set x = raise_exception(ns.x) %}",
        NEST + "{% set x = [ns.x, ns.y] | sort %}",
        "{{ 'a\nb' | indent(10000000000) }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%10000000000d' | format(1) }}",
        "{{ '%10000000000d' is odd }}",
        "{{ ['%10000000000d'] | select('divisibleby', 3) | list }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:.10000000000f}'.format(1) }}",
        LONG + "{{ ('{0}' * 1000).format(a) }}",
        LONG + "{{ a.replace('a', a) }}",
        LONG + "{{ a | replace('', a) }}",
        LONG + "{{ a.join(['b'] * 10000) }}",
        LONG + "{{ (['b'] * 10000) | join(a) }}",
        LONG + "{{ a.strip('c' * 100000 + 'a') }}",
        LONG + "{{ a | trim('c' * 100000 + 'a') }}",
        LONG + "{{ a.rfind('b' + a) }}",
        LONG + "{{ a.split('a') * 10 }}",
        LONG + FOR + "{% if a == a ~ '' %}{% endif %}" + END,
        LONG + FOR + "{% set b = a.upper() %}" + END,
        LONG + FOR + "{% set b = a[1:] %}" + END,
        "{{ ([{}] * 1000) | map(attribute='a' ~ '.a' * 10000) | list }}",
        "{{ (['a' * 100] * 1000) | tojson(indent=60) | length }}",
        FOR + "{% set x = strftime_now('%c' * 100) %}" + END,
    ],
)
def test_work_without_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine: work is counted."""
    monkeypatch.setattr(chat_template, "_WORK_ALLOWANCE", 1 << 21)
    with pytest.raises(PpsdError) as caught:
        ChatTemplate(source, origin="here").render(CHATS["one"])
    assert str(caught.value).startswith("the chat template in here computes without end or needs too much memory: mend")


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ 'a'.center(10000000000) }}", "SecurityError: str.center is not available"),
        ("{{ 'a'.encode() }}", "SecurityError: str.encode is not available"),
        ("{{ '%*d' % (10000000000, 1) }}", "SecurityError: a width in a format"),
        ("{{ '{:{}}'.format(1, 10000000000) }}", "SecurityError: a width in a format"),
        ("{{ '{0[}]:{1}}'.format({'}': 1}, 10000000000) }}", "SecurityError: a width in a format"),
        ("{{ 'x'.format_map({}) }}", "SecurityError: str.format_map is not available"),
        ("{{ 1 | tojson(indent=10000000000) }}", "SecurityError: JSON with an indent"),
        ("{{ lipsum(1000000000) }}", "'lipsum' is undefined"),
        ("{{ (1).to_bytes(10000000000, 'big') }}", "SecurityError: builtin_function_or_method objects"),
        ("{{ 'ab' | wordwrap(1) }}", "No filter named 'wordwrap'"),
        ("{{ 10 ** (10 ** 10) }}", "OverflowError: a number of more than 4096 bits"),
        ("{{ 10 ** 1000 * 10 ** 1000 }}", "OverflowError: a number of more than 4096 bits"),
        ("{{ ('9' * 4000) | int }}", "OverflowError: a number of more than 4096 bits"),
        ("{{ 0x" + "f" * 5000 + " }}", "a number of more than 4096 bits"),
        ("{{ 1 }}" + " " * (1 << 18), "262151 characters"),
    ],
)
def test_what_has_no_known_cost(source: str, complaint: str) -> None:
    with pytest.raises(PpsdError) as caught:
        ChatTemplate(source).render(CHATS["one"])
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ 'in %s: %(x)s' % {'x': 1} if false else '%s of 2024: %5.1f' % ('a', 2.25) }}", "a of 2024:   2.2"),
        ("{{ '**%s**' % 'a' }}{{ 'Date: {}, {x:>4}'.format(1, x='b') }}", "**a**Date: 1,    b"),
        ("{{ ' a b '.strip().split(' ') | map('upper') | join('-') }}{{ 'abc'[::-1] }}", "A-Bcba"),
        ("{{ messages | map(attribute='content') | map('length') | list }}", "[19]"),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].role }}", "user"),
        ("{{ (messages | rejectattr('role', 'in', ['user']) | list) | length }}", "0"),
        ("{% for k, v in {'b': 1, 'a': 2} | dictsort %}{{ loop.index }}{{ k }}{{ v }}{{ loop.last }}{% endfor %}",
         "1a2False2b1True"),
        ("{% for x in [1, 2, 3, 4] if x % 2 %}{{ x }}{% else %}none{% endfor %}", "13"),
        ("{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% macro m(a, b='c') %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}{% call m(1) %}d{% endcall %}", "1cd"),
        ("{% block a %}x{% endblock %}{{ self.a() }}{% filter upper %}b{% endfilter %}", "xxB"),
        ("{% set c = cycler('a', 'b') %}{% set j = joiner() %}{{ c.next() }}{{ c.next() }}{{ j() }}{{ j() }}", "ab, "),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x ~ 2 }}{{ {'k': [1, none]} | tojson(indent=1) }}",
         'a12{\n "k": [\n  1,\n  null\n ]\n}'),
    ],
)  # fmt: skip
def test_what_templates_do_is_as_in_plain_jinja(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(CHATS["one"]) == expected
    plain = jinja2.Environment()
    plain.filters["tojson"] = lambda value, **options: json.dumps(value, **options)
    assert plain.from_string(source).render(messages=CHATS["one"]) == expected


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "the list of messages is empty"),
        ("hello", "the messages must be a list, not str"),
        ({"role": "user", "content": "x"}, "the messages must be a list, not dict"),
        (["hello"], 'message 1 must be an object with "role" and "content", not str'),
        ([{"role": "user", "content": "x"}, {"content": "x"}], 'message 2 has no "role"'),
        ([{"role": "user"}], 'message 1 has no "content"'),
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
