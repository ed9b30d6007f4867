"""OpenAI's responses, Anthropic's messages and Ollama's paths: with their own clients where these are light."""

import json

import pytest
from serve_support import CITY, HANG, NAME, USER, alone, anthropic, openai

from ppsd_rt.serve import responses

ARGUMENTS = ({"city": "Rome"}, {"city": "Bern"})


@pytest.fixture
def served(roomy_served):
    return roomy_served


@pytest.fixture(scope="module")
def claude(roomy_served):
    with anthropic.Anthropic(base_url=roomy_served.url, api_key="none", max_retries=0, timeout=HANG) as client:
        yield client


FUNCTION = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}


def test_a_response_and_the_next_one(served, roomy):
    ask = served.client.responses.create
    first = ask(model=NAME, input="Hi", instructions="Be brief.", max_output_tokens=8, temperature=0)
    told = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    expected = alone(roomy, told, max_tokens=8)
    assert first.output_text == expected.text
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (first.usage.input_tokens, first.usage.output_tokens) == (len(expected.prompt_ids), 8)
    second = ask(model=NAME, input="Go on", previous_response_id=first.id, max_output_tokens=8, temperature=0)
    said = [told[1], {"role": "assistant", "content": expected.text}, {"role": "user", "content": "Go on"}]
    assert second.output_text == alone(roomy, said, max_tokens=8).text, "instructions hold for one response"
    assert served.client.responses.retrieve(first.id).output_text == first.output_text
    served.client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        ask(model=NAME, input="Go on", previous_response_id=first.id)


def test_the_store_is_bounded(monkeypatch):
    store = responses.Store()
    monkeypatch.setattr(responses, "_MOST_STORED", 3)
    for number in range(5):
        store.put(str(number), [{"content": "a"}], {})
    assert store.messages("2") and list(store._kept) == ["2", "3", "4"]
    monkeypatch.setattr(responses, "_MOST_CHARACTERS", 100)
    store.put("long", [{"content": "a" * 70}], {})
    assert list(store._kept) == ["long"] and store._characters <= 100


def test_events_of_a_response(served):
    with served.client.responses.stream(model=NAME, input="Hi", max_output_tokens=12, temperature=0) as stream:
        events = list(stream)
        whole = stream._response
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert (
        text
        == events[-1].response.output_text
        == served.client.responses.create(model=NAME, input="Hi", max_output_tokens=12, temperature=0).output_text
    )
    assert whole.headers["content-type"].startswith("text/event-stream")


def test_calls_of_a_response_and_their_results(served):
    asked = {"model": NAME, "tools": [FUNCTION, {"type": "web_search"}], "temperature": 0, "max_output_tokens": 400}
    reply = served.client.responses.create(input="Weather?", tool_choice="required", parallel_tool_calls=False, **asked)
    [call] = reply.output
    assert (call.type, call.name) == ("function_call", "weather") and json.loads(call.arguments) in ARGUMENTS
    with served.client.responses.stream(
        input="Weather?", tool_choice={"type": "function", "name": "weather"}, **asked
    ) as stream:
        events = list(stream)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) in ARGUMENTS
    assert events[-1].type == "response.completed"
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert served.client.responses.create(input=history, **asked | {"max_output_tokens": 4}).output_text


TOOL = {"name": "weather", "description": "of a city", "input_schema": CITY}


def test_a_message(claude, roomy):
    reply = claude.messages.create(
        model=NAME,
        max_tokens=8,
        system=[{"type": "text", "text": "Be brief."}],
        messages=USER,
        extra_body={"temperature": 0},
    )
    expected = alone(roomy, [{"role": "system", "content": "Be brief."}, *USER], max_tokens=8)
    assert (reply.content[0].text, reply.stop_reason) == (expected.text, "max_tokens")
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len(expected.prompt_ids), 8)
    count = claude.messages.count_tokens(model=NAME, system="Be brief.", messages=USER)
    assert count.input_tokens == len(expected.prompt_ids)
    stop = expected.text[4:6]
    stopped = claude.messages.create(
        model=NAME,
        max_tokens=8,
        system="Be brief.",
        messages=USER,
        stop_sequences=[stop],
        extra_body={"temperature": 0},
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


def test_a_message_that_has_been_begun(claude, roomy):
    begun = [*USER, {"role": "assistant", "content": "Because"}]
    count = claude.messages.count_tokens(model=NAME, messages=begun).input_tokens
    assert count == len(roomy.encode(USER)) + len("Because")


def test_events_of_a_message(claude):
    asked = {"model": NAME, "max_tokens": 12, "messages": USER, "extra_body": {"temperature": 0}}
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[0].text == whole.content[0].text and final.stop_reason == "max_tokens"
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert final.usage.output_tokens == 12


def test_tools_of_a_message(claude):
    asked = {"model": NAME, "max_tokens": 400, "tools": [TOOL], "extra_body": {"temperature": 0}}
    one = {"type": "any", "disable_parallel_tool_use": True}
    reply = claude.messages.create(messages=USER, tool_choice=one, **asked)
    [call] = reply.content
    assert (call.type, call.name, reply.stop_reason) == ("tool_use", "weather", "tool_use")
    assert call.input in ARGUMENTS
    with claude.messages.stream(messages=USER, tool_choice={"type": "tool", "name": "weather"}, **asked) as stream:
        assert stream.get_final_message().content[0].input in ARGUMENTS
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    history = [*USER, {"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    assert claude.messages.create(messages=history, **asked | {"max_tokens": 4}).content


def test_what_a_message_cannot_have(claude):
    picture = {"type": "image", "source": {"type": "url", "url": "data:,"}}
    with pytest.raises(anthropic.BadRequestError, match="reads text"):
        claude.messages.create(model=NAME, max_tokens=4, messages=[{"role": "user", "content": [picture]}])
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="claude", max_tokens=4, messages=USER)
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "not_found_error"


def lines(reply):
    return [json.loads(line) for line in reply.text.splitlines()]


def test_a_chat_as_ollamas_clients_ask(served, roomy):
    options = {"temperature": 0, "num_predict": 8, "num_ctx": 2048}
    expected = alone(roomy, USER, max_tokens=8).text
    streamed = served.http.post("/api/chat", json={"model": f"{NAME}:latest", "messages": USER, "options": options})
    assert streamed.headers["content-type"] == "application/x-ndjson"
    assert "".join(line["message"]["content"] for line in lines(streamed)) == expected
    last = lines(streamed)[-1]
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 8)
    body = {"model": NAME, "prompt": USER[0]["content"], "options": options, "stream": False}
    assert served.http.post("/api/generate", json=body).json()["response"] == expected
    tool = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": ARGUMENTS[0]}}],
    }
    history = [*USER, called, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    body = {"messages": history, "tools": [tool], "stream": False, "options": options}
    assert served.http.post("/api/chat", json=body).json()["done"]
    held = {"messages": USER, "format": CITY, "options": {"num_predict": 99}, "stream": False}
    assert json.loads(served.http.post("/api/chat", json=held).json()["message"]["content"]) in ARGUMENTS


def test_what_ollamas_clients_are_told(served, roomy):
    [tag], [loaded] = (served.http.get(f"/api/{path}").json()["models"] for path in ("tags", "ps"))
    size = (roomy.checkpoint.folder / "model.safetensors").stat().st_size
    for model in (tag, loaded):
        assert (model["name"], model["size"], len(model["digest"])) == (NAME, size, 64)
        assert model["details"]["format"] == "safetensors" and model["details"]["parameter_size"].endswith("M")
    assert loaded["context_length"] == 4096
    shown = served.http.post("/api/show", json={"model": NAME}).json()
    assert shown["model_info"][f"{shown['model_info']['general.architecture']}.context_length"] == 4096
    assert served.http.post("/api/show", json={"model": "other"}).status_code == 404
    version = [int(part) for part in served.http.get("/api/version").json()["version"].split(".")]
    assert version >= [0, 6, 4], "VS Code takes none before"


def test_ollamas_durations_are_those_of_the_answer(served):
    body = {"prompt": "Hi", "stream": False, "options": {"num_predict": 40, "ignore_eos": True}}
    told = served.http.post("/api/generate", json=body).json()
    parts = told["prompt_eval_duration"] + told["eval_duration"]
    assert told["prompt_eval_duration"] > 0 and 0 < told["eval_duration"] < parts <= told["total_duration"]


def test_a_raw_prompt_has_no_template(served, roomy):
    body = {"prompt": "1, 2, 3,", "raw": True, "stream": False, "options": {"num_predict": 6, "temperature": 0}}
    told = served.http.post("/api/generate", json=body).json()
    expected = alone(roomy, "1, 2, 3,", max_tokens=6)
    assert (told["response"], told["prompt_eval_count"]) == (expected.text, len(expected.prompt_ids))


def test_a_request_without_a_prompt_loads_the_model(served):
    for path, body in (("chat", {"messages": []}), ("chat", {}), ("generate", {}), ("generate", {"prompt": ""})):
        told = served.http.post(f"/api/{path}", json=body).json()
        assert (told["done"], told["done_reason"]) == (True, "load")


def test_an_answer_that_ollamas_clients_have_begun_goes_on(served):
    begun = [*USER, {"role": "assistant", "content": "Because "}]
    body = {"messages": begun, "stream": False, "options": {"num_predict": 1}}
    asked = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    count = served.http.post("/tokenize", json=asked).json()["count"]
    assert served.http.post("/api/chat", json=body).json()["prompt_eval_count"] == count


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/api/generate", {"suffix": "}"}),
        ("/api/generate", {"template": "{{ .Prompt }}"}),
        ("/api/generate", {"context": [1, 2]}),
        ("/api/generate", {"images": ["aGk="]}),
        ("/api/generate", {"raw": True, "system": "Be brief."}),
        ("/api/generate", {"format": "xml"}),
        ("/api/generate", {"logprobs": True}),
        ("/api/generate", {"options": {"mirostat": 1}}),
        ("/api/generate", {"options": {"repeat_last_n": 8, "repeat_penalty": 1.1}}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}),
        ("/v1/responses", {"conversation": "conv_1"}),
        ("/v1/responses", {"prompt": {"id": "pmpt_1"}}),
        ("/v1/responses", {"include": ["message.output_text.logprobs"]}),
        ("/v1/responses", {"n": 2}),
        ("/v1/responses", {"background": True}),
        ("/v1/responses", {"input": [{"type": "computer_call"}]}),
        ("/v1/responses", {"text": {"format": {"type": "xml"}}}),
        ("/v1/messages", {"mcp_servers": [{"type": "url"}]}),
        ("/v1/messages", {"n": 2}),
        ("/v1/messages", {"tool_choice": {"type": "any"}}),
        ("/v1/responses", {"tool_choice": "required", "tools": [{"type": "web_search"}]}),
        ("/v1/chat/completions", {"chat_template": "{{ messages }}"}),
        ("/v1/chat/completions", {"documents": [{"text": "a"}]}),
        ("/v1/chat/completions", {"truncate_prompt_tokens": 4}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_fields_that_would_change_the_answer_are_refused(served, path, fields):
    body = {"input": "a"} if "responses" in path else {"prompt": "a"} if "generate" in path else {"messages": USER}
    reply = served.http.post(path, json={**body, **fields})
    names = [*fields, *fields.get("options", ()), "images"]
    assert reply.status_code == 400 and any(name in reply.text for name in names)


def test_fields_that_change_none_are_taken(served):
    options = {"num_ctx": 512, "num_thread": 2, "mirostat": 0, "repeat_last_n": 64, "top_k": -1, "num_predict": 0}
    idle = {"keep_alive": "5m", "context": [], "images": [], "suffix": "", "template": "", "format": "", "raw": False}
    body = {"prompt": "a", "stream": False, **idle, "options": {**options, "stop": ["e", "a", " "], "seed": 3}}
    assert served.http.post("/api/generate", json=body).json()["done_reason"] in ("stop", "length")


def test_a_message_by_a_schema(served):
    form = {"type": "json_schema", "schema": CITY}
    for fields in ({"output_format": form}, {"output_config": {"format": form}}):
        reply = served.http.post("/v1/messages", json={"messages": USER, "max_tokens": 99, **fields}).json()
        assert json.loads(reply["content"][0]["text"]) in ARGUMENTS
