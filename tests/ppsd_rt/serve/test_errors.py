"""What is not taken is refused by name, in OpenAI's form."""

import json

import pytest
from serve_support import NAME, USER, openai, serving
from support import tiny_model, write_model

from ppsd_rt import Engine
from ppsd_rt.errors import ContextFull, GrammarFailed, PpsdError, UsageError
from ppsd_rt.pipeline.schedule import PLAIN
from ppsd_rt.serve.errors import from_engine

WEATHER = {"type": "function", "function": {"name": "weather"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({"model": "gpt-9"}, 404, "model_not_found", "model"),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": None}, 400, "invalid_type", "messages"),
        ({"messages": [{"role": "user"}]}, 400, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "a"}]}, 400, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, 400, "invalid_value", "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "invalid_value", "messages[0].content"),
        ({"temperature": 2.5}, 400, "invalid_value", "temperature"),
        ({"top_p": 1.1}, 400, "invalid_value", "top_p"),
        ({"max_completion_tokens": 0}, 400, "invalid_value", "max_completion_tokens"),
        ({"max_tokens": 2.5}, 400, "invalid_type", "max_tokens"),
        ({"n": 129}, 400, "invalid_value", "n"),
        ({"stop": ["a", 3]}, 400, "invalid_type", "stop[1]"),
        ({"seed": 2**70}, 400, "invalid_value", "seed"),
        ({"stream_options": {"include_usage": True}}, 400, "unsupported_parameter", "stream_options"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            400,
            "missing_required_parameter",
            "tools[0].function.name",
        ),
        ({"tools": [WEATHER], "tool_choice": "often"}, 400, "invalid_value", "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
        ({"modalities": ["audio"]}, 400, "unsupported_parameter", "modalities"),
        ({"logit_bias": {"a": 1}}, 400, "invalid_value", "logit_bias.a"),
        ({"logit_bias": {"999": 1}}, 400, "invalid_value", "logit_bias"),
        ({"response_format": {"type": "xml"}}, 400, "invalid_value", "response_format"),
        ({"response_format": {"type": "regex", "regex": "("}}, 400, "invalid_value", "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "invalid_value", "ignore_eos"),
        ({"mirostat": 2}, 400, "unsupported_parameter", "mirostat"),
        ({"top_logprobs": 2}, 400, "unsupported_parameter", "top_logprobs"),
        ({"messages": [{"role": "user", "content": "a" * 600}]}, 400, "context_length_exceeded", "messages"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_chat_requests_that_are_refused(served, body, status, code, param):
    reply = served.http.post(
        "/v1/chat/completions",
        content=json.dumps({"messages": USER, "max_tokens": 4} | body),
        headers={"Content-Type": "application/json"},
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "prompt"),
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": [1, 10**6]}, "invalid_value", "prompt"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
        ({"prompt": "a", "best_of": 3}, "unsupported_parameter", "best_of"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_completion_requests_that_are_refused(served, body, code, param):
    reply = served.http.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["code"], reply.json()["error"]["param"]) == (400, code, param)


@pytest.mark.parametrize("content", [b"{", b"[]", b""], ids=repr)
def test_bodies_that_are_no_request(served, content):
    reply = served.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


def test_bodies_of_another_type(served):
    """As curl sends them. A page of another site could send one without asking the browser's leave."""
    typed = {"Content-Type": "text/plain"}
    taken = served.http.post("/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers=typed)
    assert taken.status_code == 200
    refused = served.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={**typed, "Origin": "http://a"})
    assert (
        refused.status_code == 400 and "the header Content-Type: application/json" in refused.json()["error"]["message"]
    )


def test_paths_and_methods_that_there_are_not(served):
    assert served.http.get("/v2/nothing").json()["error"]["message"] == "there is no GET /v2/nothing"
    reply = served.http.get("/v1/completions")
    assert (reply.status_code, reply.headers["Allow"]) == (405, "POST")
    assert reply.json()["error"]["message"] == "/v1/completions does not take GET"


def test_fields_that_change_no_answer_are_taken(served):
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "prediction": {"type": "content", "content": "x"}}
    nothing = {"tools": [], "tool_choice": "none", "modalities": ["text"], "logprobs": False, "logit_bias": None}
    nothing |= {"response_format": {"type": "text"}, "mirostat": 0, "typical_p": 1.0, "web_search_options": {}}
    assert served.post(**harmless, **nothing).status_code == 200
    assert served.http.post("/v1/completions", json={"prompt": "a", "best_of": 1, "echo": False}).status_code == 200


def test_a_bug_is_told_to_the_log_and_not_to_the_client(engine, caplog):
    class Broken:
        def __getattr__(self, name):
            return getattr(engine, name)

        def agenerate(self, *_):
            raise RuntimeError("a secret")

    with serving(Broken()) as served:
        reply = served.post()
        assert reply.status_code == 500 and "secret" not in reply.text
        assert served.answered()["status"] == 500
        with pytest.raises(openai.InternalServerError):
            served.chat(stream=True)
    assert "a secret" in caplog.text


def test_a_template_that_refuses_is_the_requests_fault(served, engine, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    reply = served.post()
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert "has no chat template" in reply.json()["error"]["message"]


@pytest.mark.parametrize("options", [{}, {"logprobs": True}])
def test_logits_that_are_no_numbers_are_the_servers_failure(tmp_path, options):
    model = tiny_model()
    model.model.layers[3].mlp.down_proj.weight.data.fill_(3e38)
    engine = Engine.from_pretrained(write_model(tmp_path / "model", model), backend="cpu", dtype="float32", threads=1)
    engine.name = NAME
    with serving(engine, schedule=PLAIN) as served:
        for stream in (False, True):
            reply = served.post(max_tokens=4, stream=stream, **options)
            assert reply.status_code == 500
            assert "output is not a number" in reply.json()["error"]["message"]


def test_the_code_is_of_the_error_and_not_of_its_words():
    """A prompt may be quoted in it."""
    said = "it has a context of 64 tokens: the grammar gives up"
    assert from_engine(UsageError(said)).code == "invalid_value"
    assert from_engine(ContextFull("too long")).code == "context_length_exceeded"
    assert from_engine(GrammarFailed("too many states")).status_code == 400
    assert from_engine(PpsdError(said)).status_code == 500
