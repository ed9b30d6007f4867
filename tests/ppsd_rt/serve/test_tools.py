"""Tools: what a model writes is read as calls, and calls that have to be made are valid, streamed or not."""

import json

import pytest
from serve_support import BRIEF, CITY, NAME, OPEN, SCHEDULE, SHUT, UNREADABLE, serving
from support import TEMPLATE

from ppsd_rt import Grammar, SamplingParams
from ppsd_rt.chat.prompt import ChatPrompt
from ppsd_rt.chat.reader import Reader
from ppsd_rt.chat.tools import HERMES, LLAMA, MISTRAL, MISTRAL_11, Tools, syntax_of
from ppsd_rt.models.chat_template import ChatTemplate

ASKED = [{"role": "user", "content": "Weather?"}]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
]
TOOLS[1]["function"]["parameters"]["additionalProperties"] = False
NAMES = frozenset({"weather", "clock"})
WEATHER = [["weather", '{"city": "Rome"}']]
CLOCK = [["clock", "{}"]]


CUT = f'{OPEN}{BRIEF}{{"city": "}}\\"'
OTHER = [
    'A set:\n```json\n{"name": "Rome", "size": 3}\n```\nand  \n```python\n{}\n```\n',
    '{"name": "Rome", "arguments": {}}',
    '{"answer": 4} ``` x',
]


def joined(pieces):
    made = []
    for piece in pieces:
        if made and piece.kind == made[-1][0]:
            made[-1][1] += piece.text
        else:
            made.append([piece.name or piece.kind, piece.text])
    return made


@pytest.mark.parametrize(
    ("syntax", "text", "expected"),
    [
        (HERMES, '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>', WEATHER),
        (
            HERMES,
            'So:\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
            '<tool_call>\n{"arguments": {}, "name": "clock"}\n</tool_call>\n',
            [["said", "So:"], *WEATHER, *CLOCK],
        ),
        (
            HERMES,
            "<think>\n<tool_call> or not?\n</think>\n\n"
            'Yes. <tool_call>[{"name": "clock", "arguments": {}}]</tool_call>',
            [["thought", "<tool_call> or not?"], ["said", "Yes."], *CLOCK],
        ),
        (HERMES, "if a <tool or <", [["said", "if a <tool or <"]]),
        (HERMES, "<tool_call> is a mark", [["said", "<tool_call> is a mark"]]),
        (HERMES, '<tool_call>{"name": "wea', [["said", '<tool_call>{"name": "wea']]),
        (HERMES, CUT, [["said", CUT]]),
        # A brace too few, too many, in the middle; a tag that is missing, a quote that is.
        (HERMES, f'{OPEN}{BRIEF}{{"city": "Rome"}}{SHUT}\n{OPEN}{{"name": "clock"}}{SHUT}', [*WEATHER, *CLOCK]),
        (HERMES, f'{OPEN}{BRIEF}{{"city": "Rome"}}}}}}{SHUT} Hm.', [*WEATHER, ["said", "Hm."]]),
        (HERMES, f'{OPEN}{{"name": "clock"}}\n{OPEN}{BRIEF}{{"city": "Rome"}}}}', [*CLOCK, *WEATHER]),
        (
            HERMES,
            f'{OPEN}{{"name": "weather"}}, "arguments": {{}}}}{SHUT}{OPEN}{{"name": "clock"}}{SHUT}',
            [["said", f'{OPEN}{{"name": "weather"}}, "arguments": {{}}}}{SHUT}'], *CLOCK],
        ),
        (
            HERMES,
            f'{OPEN}{BRIEF}{{"city": "Rome}}}}{SHUT}{OPEN}{{"name": "clock"}}{SHUT}',
            [["said", f'{OPEN}{BRIEF}{{"city": "Rome}}}}{SHUT}'], *CLOCK],
        ),
        (HERMES, f"{OPEN}{{'name': 'weather', 'arguments': {{'city': 'Rome',}}}}{SHUT}", WEATHER),
        (HERMES, f'{OPEN}{BRIEF}{{"city": "{SHUT}"}}}}{SHUT}', [["weather", f'{{"city": "{SHUT}"}}']]),
        (
            MISTRAL,
            f'[TOOL_CALLS] [{BRIEF}{{"city": "Rome"}}, {{"name": "clock", "arguments": {{}}}}]',
            [*WEATHER, *CLOCK],
        ),
        (LLAMA, f'{BRIEF}{{"city": "Rome"}}; {{"name": "clock"}}', [*WEATHER, *CLOCK]),
        (MISTRAL_11, '[TOOL_CALLS]weather[ARGS]{"city": "Rome"[TOOL_CALLS]clock[ARGS]{}', [*WEATHER, *CLOCK]),
        # What no strict reader takes.
        *[(HERMES, text, [["said", text]]) for text in UNREADABLE],
        # As llama.cpp reads them: in a fence, and bare.
        (
            HERMES,
            f'So:\n```json\n{BRIEF}{{"city": "Rome"}}}}\n```\nDone',
            [["said", "So:"], *WEATHER, ["said", "Done"]],
        ),
        (HERMES, f'{OPEN}\n```json\n{BRIEF}{{"city": "Rome"}}}}\n```\n{SHUT}', WEATHER),
        (HERMES, f'{BRIEF}{{"city": "Rome"}}}}', WEATHER),
        *[(HERMES, text, [["said", text]]) for text in OTHER],
        # The same call side by side is one.
        (
            HERMES,
            f'{OPEN}{{"name": "clock"}}{SHUT}' * 2 + f'{OPEN}{BRIEF}{{"city": "Rome"}}}}{SHUT}',
            [*CLOCK, *WEATHER],
        ),
        (LLAMA, '{"name": "weather", "parameters": {"city": "Rome"}}', WEATHER),
        (LLAMA, '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}', WEATHER),
        (
            LLAMA,
            '{"name": "weather", "parameters": {"city": "Rome"}}; {"type": "function", "name": "clock"}',
            [*WEATHER, *CLOCK],
        ),
        (LLAMA, '{"name": "Rome", "parameters": {}} is JSON', [["said", '{"name": "Rome", "parameters": {}} is JSON']]),
        (LLAMA, 'Say {"name": "clock"}', [["said", 'Say {"name": "clock"}']]),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock", "arguments": {}}]',
            [*WEATHER, *CLOCK],
        ),
        (
            MISTRAL_11,
            'Well[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]clock[CALL_ID]123456789[ARGS]{}',
            [["said", "Well"], *WEATHER, *CLOCK],
        ),
        (None, "<think>so</think>\n<tool_call>", [["thought", "so"], ["said", "<tool_call>"]]),
    ],
)
def test_answers_are_read_the_same_wherever_they_are_cut(syntax, text, expected):
    for step in (1, 2, 5, len(text)):
        reader = Reader(syntax, NAMES, True, False)
        pieces = [one for start in range(0, len(text), step) for one in reader.push(text[start : start + step])]
        assert joined([*pieces, *reader.end()]) == expected
        ids = [piece.id for piece in pieces if piece.kind == "call"]
        assert len(set(ids)) == len(ids)
        if syntax in (MISTRAL, MISTRAL_11):
            assert all(len(id) == 9 and id.isalnum() for id in ids)


def test_a_call_goes_out_whole_and_other_text_at_once():
    reader = Reader(HERMES, NAMES, False, False)
    assert joined(reader.push('{"na')) == joined(reader.push('me": "Rome')) == []
    assert joined(reader.push('"')) == [["said", '{"name": "Rome"']], "no tool has this name"
    assert joined(reader.push(f" {OPEN}{BRIEF}")) == []
    assert joined(reader.push('{"city": "Rome"}}\n' + SHUT)) == WEATHER


def test_thoughts_that_the_prompt_has_begun():
    reader = Reader(None, NAMES, True, True)
    assert joined([*reader.push("\nhm </thi"), *reader.push("nk>\n\nyes"), *reader.end()]) == [
        ["thought", "hm"],
        ["said", "yes"],
    ]


@pytest.fixture
def served(roomy_served):
    return roomy_served


def called(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
def test_calls_that_are_required_are_made_and_valid(served, choice, sampling):
    asked = {"messages": ASKED, "tools": TOOLS, "tool_choice": choice, "max_tokens": 3000, **sampling}
    reply = served.chat(**asked).choices[0]
    assert (reply.finish_reason, reply.message.content) == ("tool_calls", None)
    calls = called(reply.message)
    assert 1 <= len(calls) <= 16
    for name, arguments in calls:
        assert arguments == {} if name == "clock" else arguments["city"] in ("Rome", "Bern")
    if choice != "required":
        assert [name for name, _ in calls] == ["weather"]
    with served.client.chat.completions.stream(model=NAME, **{"temperature": 0} | asked) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert called(streamed.message) == calls and streamed.finish_reason == "tool_calls"
    assert len(deltas) >= len(calls)
    assert len({call.id for call in streamed.message.tool_calls}) == len(calls)


def test_a_schema_of_arguments_that_is_none(served):
    bad = {"type": "function", "function": {"name": "weather", "parameters": {"type": "strin"}}}
    reply = served.post(tools=[bad], tool_choice="required")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")


def test_functions_as_before_there_were_tools(served, roomy):
    functions = [tool["function"] for tool in TOOLS]
    asked = {"messages": ASKED, "functions": functions, "function_call": {"name": "weather"}, "max_tokens": 900}
    reply = served.chat(**asked).choices[0]
    call = reply.message.function_call
    assert (reply.finish_reason, reply.message.content, reply.message.tool_calls) == ("function_call", None, None)
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Rome", "Bern")
    chunks = [chunk.choices[0] for chunk in served.chat(**asked, stream=True)]
    deltas = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert deltas[0].name == "weather" and chunks[-1].finish_reason == "function_call"
    assert "".join(delta.arguments for delta in deltas) == call.arguments
    assert "function_call" not in served.post(functions=functions, function_call="none").json()["choices"][0]["message"]
    said = reply.message.model_dump()
    history = [*ASKED, said, {"role": "function", "name": "weather", "content": "sunny"}]
    calls = [{"id": "a", "type": "function", "function": said["function_call"]}]
    today = [
        *ASKED,
        {**said, "function_call": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
    ]
    told = [served.http.post("/tokenize", json={"messages": one}).json()["tokens"] for one in (history, today)]
    assert told[0] == told[1] and "<tool_response>\nsunny" in roomy.tokenizer.decode(told[0])


def test_a_function_may_have_any_name(served):
    named = {"type": "function", "function": {"name": "NAME_of_JSON_NAME", "parameters": CITY}}
    reply = served.chat(
        messages=ASKED, tools=[named], tool_choice="required", parallel_tool_calls=False, max_tokens=900
    )
    assert called(reply.choices[0].message) in ([("NAME_of_JSON_NAME", {"city": city})] for city in ("Rome", "Bern"))


def test_drafts_keep_to_the_grammar_of_calls(roomy):
    """The answer is that of plain decoding under the same grammar."""
    lark = offered("required").grammar(HERMES, roomy.tokenizer, False, None)
    params = SamplingParams(max_tokens=300, grammar=Grammar.lark(lark), temperature=1.0, seed=2)
    drafted, plain = (roomy.generate("abc", params, schedule).run() for schedule in (SCHEDULE, "plain"))
    assert drafted.ids == plain.ids and drafted.statistics.accepted > 0


def offered(choice=None, tools=TOOLS):
    return Tools.of([tool["function"] for tool in tools], choice)


def test_which_functions_may_be_called():
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[1]]}}
    tools = offered(allowed)
    assert (tools.names, tools.least) == ({"clock"}, 1)
    assert offered().grammar(HERMES, None, False, None) is None, "nothing holds a free answer"


@pytest.mark.parametrize("syntax", [HERMES, LLAMA, MISTRAL, MISTRAL_11], ids=["hermes", "llama", "mistral", "11"])
def test_what_each_syntax_allows(roomy, syntax):
    """Free text and calls where functions are strict; calls alone where they are required."""

    def allows(lark, text):
        mask = roomy.compile(Grammar.lark(lark))()
        ids = roomy.tokenizer.encode(text, add_special_tokens=False)
        steps = (mask.allowed(0, ids[:place])[id] for place, id in enumerate(ids))
        return all(steps) and bool(mask.allowed(0, ids)[roomy.tokenizer.eos_id])

    def written(*calls):
        made = (
            syntax.call.replace("JSON_NAME", json.dumps(n)).replace("NAME", n).replace("ARGUMENTS", a) for n, a in calls
        )
        return syntax.head + syntax.between.join(made) + syntax.tail

    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    required = offered("required").grammar(syntax, roomy.tokenizer, False, None)
    free = offered(tools=strict).grammar(syntax, roomy.tokenizer, False, None)
    one, bad = written(("weather", '{"city": "Rome"}')), written(("weather", '{"city": "Oslo"}'))
    two = written(("weather", '{"city": "Rome"}'), ("clock", "{}"))
    for lark in (required, free):
        assert allows(lark, one) and allows(lark, two)
        assert not allows(lark, bad) and not allows(lark, one[:-1])
    assert allows(free, "It rains.") and not allows(required, "It rains.")
    assert allows(free, f"So: {one}")
    assert allows(free, f"So: {bad}") == (syntax is LLAMA), "whose calls are whole answers"
    thinking = offered("required").grammar(syntax, roomy.tokenizer, True, None)
    assert allows(thinking, f"Hm.\n</think>\n\n{one}") and not allows(thinking, one)
    schema = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": False}
    either = offered().grammar(syntax, roomy.tokenizer, False, schema)
    marked = f"<|python_tag|>{one}" if syntax is LLAMA else one
    assert allows(either, '{"n": 1}') and allows(either, marked) and not allows(either, "It rains.")


def test_one_call_at_most_where_the_request_says_so(served):
    written = f'{OPEN}{BRIEF}{{"city": "Rome"}}}}{SHUT}\n{OPEN}{{"name": "clock"}}{SHUT}'
    asked = {"tools": TOOLS, "max_tokens": 200, "structured_outputs": {"choice": [written]}}
    for parallel, count in ((None, 2), (True, 2), (False, 1)):
        message = served.post(**asked, parallel_tool_calls=parallel).json()["choices"][0]["message"]
        assert (len(message["tool_calls"]), message["content"]) == (count, None)
    functions = {"functions": [tool["function"] for tool in TOOLS], "max_tokens": 200, "stream": True}
    streamed = served.post(**functions, structured_outputs={"choice": [written]}).text
    assert streamed.count('"function_call":{"name":"weather"') == 1 and "clock" not in streamed


def test_a_history_of_calls(served, roomy):
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call, call], "annotations": [], "audio": None},
        {"role": "tool", "tool_call_id": "a", "content": "sunny"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "warm", "cache_control": None}]},
    ]
    reply = served.http.post("/tokenize", json={"messages": history}).json()
    text = roomy.tokenizer.decode(reply["tokens"], skip_special_tokens=False)
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    answers = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n</tool_response>"
    assert f"assistant\n{written}\n{written}<|im_end|>" in text
    assert f"user\n{answers}<|im_end|>" in text
    assert served.post(messages=history, tools=TOOLS).status_code == 200


QWEN = (
    "{%- if tools %}tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}"
    "{% for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "[{{ call.id }}:{{ call.function.name }}({{ call.function.arguments.city }})]{% endfor %}{% endif %}"
    "{{ message.role }}:{{ message.content or '' }};{% endfor %}{% if enable_thinking is false %}quick{% endif %}"
)


def test_templates_that_know_tools_are_given_them(roomy, monkeypatch):
    monkeypatch.setattr(roomy.tokenizer, "chat_template", ChatTemplate(QWEN))
    prompt = ChatPrompt(roomy.tokenizer)
    call = {"id": "call_12345abcdef", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    text = prompt.text(messages, offered(), {"enable_thinking": False}, True)
    assert text.startswith('tools: {"type": "function", "function": {"name": "weather", "parameters": ')
    assert text.endswith("user:Weather?;[call_12345abcdef:weather(Rome)]assistant:;tool:sunny;quick")


@pytest.mark.parametrize(
    ("source", "syntax"),
    [
        (TEMPLATE, HERMES),
        (QWEN, HERMES),
        ('{{ \'{"name": "\' }}{{ \'"parameters": \' }}<|python_tag|>', LLAMA),
        ("[AVAILABLE_TOOLS][TOOL_CALLS][", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_11),
    ],
)
def test_the_syntax_is_the_templates(source, syntax):
    assert syntax_of(source) is syntax


def test_answers_with_thoughts(roomy, monkeypatch):
    source = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
    monkeypatch.setattr(roomy.tokenizer, "chat_template", ChatTemplate(source + "{# </think> #}"))
    with serving(roomy) as served:
        held = {"type": "lark", "lark": 'start: "I see.\\n</think>\\n\\n" /[0-9]{2}/'}
        reply = served.chat(messages=ASKED, max_tokens=60, response_format=held).choices[0].message
        assert reply.reasoning_content == "I see." and len(reply.content) == 2
        chunks = list(served.chat(messages=ASKED, max_tokens=60, response_format=held, stream=True))
        thought = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert (thought, said) == ("I see.", reply.content)
