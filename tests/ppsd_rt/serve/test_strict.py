"""What JSON or UTF-8 cannot hold comes in nowhere, goes out nowhere, and ends no stream."""

import json

import pytest
from serve_support import BRIEF, CITY, OPEN, SHUT, UNREADABLE, USER

from ppsd_rt.strict_json import fault, written

TOOL = {"name": "weather", "parameters": CITY}
# A request of each path; `*` is where what it gives back, or hands on, may have anything in it.
PATHS = {
    "/v1/chat/completions": {"messages": USER, "chat_template_kwargs": "*"},
    "/v1/completions": {"prompt": "a", "structured_outputs": "*"},
    "/v1/responses": {"input": "a", "metadata": "*"},
    "/v1/messages": {"messages": USER, "max_tokens": 4, "metadata": "*"},
    "/v1/messages/count_tokens": {"messages": USER, "metadata": "*"},
    "/api/chat": {"messages": USER, "options": "*"},
    "/api/generate": {"prompt": "a", "format": "*"},
    "/tokenize": {"messages": USER, "chat_template_kwargs": "*"},
}
VALUES = [
    '{"a": "\\ud83d"}',
    '{"\\ud83d": 1}',
    '{"a": [NaN]}',
    '{"a": -Infinity}',
    '{"a": 1e999}',
    '{"a": ' * 129 + "1" + "}" * 129,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:20])
@pytest.mark.parametrize("path", PATHS)
def test_requests_are_refused_at_the_door_by_the_fields_name(served, path, value):
    field = next(name for name, given in PATHS[path].items() if given == "*")
    reply = served.http.post(path, content=json.dumps(PATHS[path]).replace('"*"', value).encode())
    assert reply.status_code == 400 and f"'{field}" in reply.text
    assert fault(json.loads(reply.content)) is None


@pytest.mark.parametrize(
    "value", ["1" * 5000, "[" * 100_000, '"\\x"', '"\xff"'], ids=["digits", "deep", "escape", "latin"]
)
def test_and_so_is_what_python_cannot_read(served, value):
    body = f'{{"prompt": "a", "x": {value}}}'.encode("latin-1")
    reply = served.http.post("/v1/completions", content=body)
    assert reply.status_code == 400 and "not JSON" in reply.json()["error"]["message"]


def test_the_writer_cannot_fail():
    value = {"a": ["\ud83d", float("nan"), float("-inf"), "\U0001f600\u2028", "\\ud83d"], "\udc80": 1}
    text = written(value)
    assert text.isascii() and json.loads(text) == {"a": ["?", None, None, "\U0001f600\u2028", "\\ud83d"], "?": 1}


WRITTEN = [text for text in UNREADABLE if len(text) < 99] + [
    f"{OPEN}{BRIEF}{{}}{SHUT}",
    f"{OPEN}{BRIEF}{{}}",
    "[TOOL_CALLS][",
]
ASKED = {"structured_outputs": {}, "max_tokens": 200}
DIALECTS = {
    "/v1/chat/completions": {"messages": USER, "tools": [{"type": "function", "function": TOOL}]},
    "/v1/responses": {"input": "a", "tools": [{"type": "function", **TOOL}]},
    "/v1/messages": {"messages": USER, "tools": [{"name": "weather", "input_schema": CITY}]},
    "/api/chat": {"messages": USER, "tools": [{"type": "function", "function": TOOL}]},
}


@pytest.mark.parametrize("path", DIALECTS)
def test_calls_that_the_model_writes(roomy_served, path):
    """Every stream ends, and every line of it is strict JSON."""
    limit = {"/v1/responses": {"max_output_tokens": 200}, "/api/chat": {"options": {"num_predict": 200}}}
    for text in WRITTEN:
        body = {**DIALECTS[path], **limit.get(path, {"max_tokens": 200}), "structured_outputs": {"choice": [text]}}
        for stream in (False, True):
            reply = roomy_served.http.post(path, json={**body, "stream": stream})
            assert reply.status_code == 200, (text, reply.text)
            lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if not line.startswith("event: ")]
            values = [json.loads(line, parse_constant=pytest.fail) for line in lines if line and line != "[DONE]"]
            assert not any(map(fault, values))
        ends = ("data: [DONE]", '"type":"response.completed"', '"type":"message_stop"', '"done":true')
        assert any(end in reply.text.strip().splitlines()[-1] for end in ends), (text, reply.text[-300:])
        if text.endswith("}}" + SHUT) and "{}" in text and BRIEF in text:
            assert "weather" in reply.text and OPEN not in reply.text
