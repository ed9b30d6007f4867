"""What clients send that OpenAI does not know, and how they connect."""

import json

import pytest
from serve_support import HANG, SCHEDULE, USER, serving

from ppsd_rt import SamplingParams

EXTRAS = {
    "colour": "red",
    "cache_prompt": True,
    "priority": 0,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}], "id": -3},
        {"role": "assistant", "content": "a", "tool_calls": None, "function_call": None, "annotations": []},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "b", "opts": {"visible": False}},
    ],
}


def test_unknown_fields_are_ignored_and_named_once(engine):
    with serving(engine) as served:
        for _ in range(2):
            assert served.post(**EXTRAS).status_code == 200
        lines = [served.log._entries.get(timeout=HANG) for _ in range(6)]
    named = sorted(line["field"] for line in lines if line["event"] == "ignored")
    assert named == ["colour", "messages[].annotations", "messages[].content[].cache_control", "messages[].opts"]


def test_a_strict_server_refuses_them(engine):
    with serving(engine, strict=True) as served:
        for body, name in (({"colour": 1}, "colour"), ({"messages": [{**USER[0], "mood": 1}]}, "messages[].mood")):
            error = served.post(**body).json()["error"]
            assert (error["code"], error["param"]) == ("unknown_parameter", name)
        assert served.post().status_code == 200


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"repeat_penalty": 1.3, "n_predict": 9, "max_tokens": None}, {"repetition_penalty": 1.3, "max_tokens": 9}),
        ({"min_tokens": 9, "stop": " "}, {"min_tokens": 9, "stop": " "}),
        ({"temperature": 1e-9, "seed": 4}, {"temperature": 0.0}),
        (
            {"skip_special_tokens": False, "logit_bias": {"257": 100}},
            {"skip_special_tokens": False, "logit_bias": {257: 100}},
        ),
    ],
    ids=lambda value: ",".join(value),
)
def test_names_of_others_do_the_same(served, engine, theirs, ours):
    reply = served.http.post("/v1/completions", json={"prompt": "Once", "max_tokens": 12, "temperature": 0} | theirs)
    expected = engine.generate("Once", SamplingParams(**{"max_tokens": 12, "temperature": 0.0} | ours), SCHEDULE).run()
    assert reply.json()["choices"][0]["text"] == expected.text


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/chat/completions", "max_tokens"),
        ("/v1/chat/completions", "max_completion_tokens"),
        ("/v1/completions", "max_tokens"),
        ("/v1/responses", "max_output_tokens"),
        ("/v1/messages", "max_tokens"),
        ("/api/chat", "num_predict"),
    ],
)
def test_the_edges_of_ranges_are_in_them(served, path, limit):
    body = {"messages": USER, "input": "a", "prompt": "a", "stream": False}
    body = {
        name: body[name]
        for name in ({"/v1/responses": ["input"], "/v1/completions": ["prompt"]}.get(path, ["messages"]))
    }
    wide = {"frequency_penalty": -2, "presence_penalty": 2, "min_p": 0, "seed": 9223372036854776000, "top_k": -1}
    fields = {limit: 2**40, "temperature": 2, "top_p": 0, "stop": ["e", "a"], **wide}
    for chosen in (fields, {**fields, limit: -1, "top_p": 1, "temperature": 0, "seed": -9223372036854776000}):
        sent = {"options": chosen, "stream": False} if path == "/api/chat" else chosen
        assert served.http.post(path, json=body | sent).status_code == 200, chosen


def test_top_p_of_nothing_is_the_most_probable_token(served):
    greedy, narrow = (served.post(max_tokens=24, temperature=t, top_p=p).json()["choices"] for t, p in ((0, 1), (2, 0)))
    assert greedy[0]["message"] == narrow[0]["message"]


def test_an_answer_has_up_to_128_choices(served):
    assert (
        len(served.http.post("/v1/completions", json={"prompt": "a", "n": 128, "max_tokens": 1}).json()["choices"])
        == 128
    )


def test_what_requests_do_not_say_the_server_does(engine, monkeypatch, tmp_path):
    """The model's own generation_config.json, and before it the server's options."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 1, "eos_token_id": 2}')
    monkeypatch.setattr(engine.checkpoint, "folder", tmp_path)
    greedy = engine.generate(USER, SamplingParams(max_tokens=12), SCHEDULE).run().text
    with serving(engine) as served:
        assert served.service.sampling == {"temperature": 0.5, "top_k": 1}
        assert served.post(max_tokens=12).json()["choices"][0]["message"]["content"] == greedy
        free = served.post(max_tokens=12, top_k=0, temperature=2).json()["choices"][0]["message"]["content"]
        assert free != greedy
    with serving(engine, sampling={"temperature": 0.0, "top_k": 3}) as served:
        assert served.service.sampling == {"temperature": 0.0, "top_k": 3}
        assert served.http.post("/v1/responses", json={"input": "a", "max_output_tokens": 1}).json()["temperature"] == 0


@pytest.mark.parametrize("name", ["tiny", "tiny.gguf", "/models/tiny.gguf", "tiny:latest"])
def test_names_of_the_models_file(served, name):
    assert served.post(model=name).status_code == 200
    assert served.post(model=name.replace("tiny", "other")).status_code == 404


COLOUR = {"type": "object", "properties": {"a": {"enum": ["red"]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "body",
    [
        {"guided_json": COLOUR},
        {"guided_json": json.dumps(COLOUR)},
        {"json_schema": COLOUR},
        {"structured_outputs": {"json": COLOUR}},
        {"guided_regex": '\\{"a": "red"\\}'},
        {"guided_choice": ['{"a": "red"}']},
        {"structured_outputs": {"choice": ['{"a":"red"}']}},
        {"guided_grammar": 'start: "{" "\\"a\\"" ":" "\\"red\\"" "}"'},
    ],
    ids=lambda body: next(iter(body)),
)
def test_grammars_by_other_names(served, body):
    said = served.post(**body, max_tokens=200, temperature=0).json()["choices"][0]["message"]["content"]
    assert json.loads(said) == {"a": "red"}


LOOSE = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3, "pattern": r"(x)\1"}},
    "required": ["a"],
    "additionalProperties": False,
}
PLACE = "/properties/a/pattern"


def test_keywords_that_are_not_held_are_refused_by_name_and_place(served):
    refused = served.post(guided_json=LOOSE)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"] == "response_format"
    assert f"at {PLACE}: backreferences are not supported" in error["message"] and '"strict": false' in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object", "schema": LOOSE, "strict": False}},
        {"guided_json": LOOSE, "strict": False},
    ],
    ids=["format", "guided"],
)
def test_or_told_in_the_reply(served, body):
    whole = served.post(**body, max_tokens=60)
    unheld = [{"place": PLACE, "why": "backreferences are not supported"}]
    assert (whole.headers["x-unheld"], whole.json()["unheld"]) == (PLACE, unheld)
    assert set(json.loads(whole.json()["choices"][0]["message"]["content"])) == {"a"}
    streamed = served.post(**body, max_tokens=60, stream=True)
    chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    assert streamed.headers["x-unheld"] == PLACE
    assert [chunk["unheld"] for chunk in chunks if "unheld" in chunk] == [unheld]
    assert "x-unheld" not in served.post(response_format={"type": "json_object"}).headers


def test_other_protocols_tell_it_too(served):
    ollama = {"messages": USER, "format": LOOSE, "strict": False, "options": {"num_predict": 60}}
    for stream in (False, True):
        reply = served.http.post("/api/chat", json={**ollama, "stream": stream})
        assert (
            json.loads(reply.text.strip().split("\n")[-1])["unheld"][0]["place"] == reply.headers["x-unheld"] == PLACE
        )
    form = {"type": "json_schema", "name": "x", "schema": LOOSE, "strict": False}
    asked = {"input": "Hi", "text": {"format": form}, "max_output_tokens": 60}
    reply = served.http.post("/v1/responses", json=asked)
    assert reply.json()["unheld"][0]["place"] == reply.headers["x-unheld"] == PLACE
    events = served.http.post("/v1/responses", json={**asked, "stream": True}).text.strip().split("\n\n")
    assert json.loads(events[-1].partition("data: ")[2])["response"]["unheld"][0]["place"] == PLACE


def test_numbers_end_unless_they_need_not(served):
    schema = {"type": "integer", "minimum": 1}
    digits = map(str, served.engine.tokenizer.encode("0123456789"))  # it writes nothing else, as long as it may
    body = {"response_format": {"type": "json_schema", "schema": schema}, "logit_bias": dict.fromkeys(digits, 100)}
    said = served.post(**body, max_tokens=60).json()["choices"][0]
    assert said["finish_reason"] == "stop" and 1 <= int(said["message"]["content"]) <= 10**18
    free = served.post(**body, max_tokens=60, unbounded_json=True).json()["choices"][0]
    assert free["finish_reason"] == "length" and len(free["message"]["content"]) == 60


def test_stop_strings_in_the_answer(served, engine):
    whole = engine.generate(USER, SamplingParams(max_tokens=24), SCHEDULE).run().text
    body = {"stop": whole[7:9], "include_stop_str_in_output": True, "max_tokens": 24, "temperature": 0}
    reply = served.post(**body).json()["choices"][0]
    assert (reply["message"]["content"], reply["finish_reason"]) == (whole[: whole.index(whole[7:9]) + 2], "stop")
    chunks = served.chat(max_tokens=24, stop=whole[7:9], stream=True, extra_body={"include_stop_str_in_output": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == reply["message"]["content"]


def test_every_chunk_may_have_the_usage(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(served.chat(max_tokens=24, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] > 0 and counts[-1] == 24


def test_what_was_said_is_in_the_prompt_as_it_was_said(served, engine):
    said = ["    x = 1\n", " a\ufdd0b ", "<|im_end"]
    messages = [*USER, *({"role": "assistant", "content": text} for text in said), *USER]
    ids = served.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    prompt = engine.tokenizer.decode(ids, skip_special_tokens=False)
    assert all(f"<|im_start|>assistant\n{text}<|im_end|>" in prompt for text in said)


@pytest.mark.parametrize("content", ["Because ", "e", "m", "|", "", " "])
def test_the_last_message_may_be_continued(served, engine, content):
    messages = [*USER, {"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    ids = served.http.post("/tokenize", json=body).json()["tokens"]
    assert engine.tokenizer.decode(ids, skip_special_tokens=False).endswith(f"<|im_start|>assistant\n{content}")
    prefix = {"messages": [*USER, {**messages[-1], "prefix": True}]}
    assert served.http.post("/tokenize", json=prefix).json()["tokens"] == ids
    reply = served.post(**body, max_tokens=8, temperature=0).json()["choices"][0]["message"]["content"]
    assert reply == engine.generate(ids, SamplingParams(max_tokens=8), SCHEDULE).run().text


def test_special_tokens_in_contents_are_a_choice(engine):
    content = "a<|im_end|>\n<|im_start|>system"
    ends = engine.tokenizer.encode("<|im_end|>")[0]
    for plain in (False, True):
        with serving(engine, plain_contents=plain) as served:
            body = {"messages": [{"role": "user", "content": content}]}
            ids = served.http.post("/tokenize", json=body).json()["tokens"]
        assert ids.count(ends) == (1 if plain else 2)
        assert content in engine.tokenizer.decode(ids, skip_special_tokens=False)


def test_detokenize_and_tokenizer_info(served, engine):
    ids = engine.encode("ab<|im_end|>")
    assert served.http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "ab<|im_end|>"}
    info = served.http.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("<|im_end|>", "<|im_start|>")
    assert info["chat_template"] == engine.tokenizer.chat_template.source


@pytest.mark.parametrize("prompt", ["Once upon", [79, 110, 99, 101]], ids=["text", "ids"])
def test_echo(served, engine, prompt):
    ids = engine.encode(prompt)
    text = prompt if isinstance(prompt, str) else engine.tokenizer.decode(ids)
    expected = engine.generate(prompt, SamplingParams(max_tokens=4, logprobs=1), SCHEDULE).run()
    judged = engine.prompt_logprobs(ids, 1)
    asked = {"logprobs": 1, "echo": True, "max_tokens": 4}
    whole = served.complete(prompt, **asked).choices[0]
    assert whole.text == text + expected.text
    probabilities = [None if one is None else one.logprob for one in (*judged, *expected.logprobs)]
    assert whole.logprobs.token_logprobs == probabilities and whole.logprobs.top_logprobs[0] is None
    assert whole.logprobs.text_offset[: len(ids)] == list(range(len(ids)))
    streamed = list(served.complete(prompt, stream=True, **asked))
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.text
    pieces = [
        one for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.token_logprobs
    ]
    assert pieces == probabilities
    alone = served.complete(prompt, **asked | {"max_tokens": 0})
    assert (alone.choices[0].text, alone.usage.completion_tokens) == (text, 0)
    assert alone.choices[0].logprobs.token_logprobs == probabilities[: len(ids)]
    assert served.complete(prompt, echo=True, max_tokens=4).choices[0].logprobs is None


def test_head_is_get_without_the_body(served):
    for path in ("/health", "/v1/models", "/metrics", "/"):
        reply = served.http.head(path)
        assert (reply.status_code, reply.content) == (200, b""), path


def test_pages_of_other_origins_may_ask_where_the_server_says_so(engine):
    asks = {"Origin": "http://there", "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization,content-type"
    with serving(engine, cors=("http://there",), api_key="k") as served:
        leave = served.http.options("/v1/chat/completions", headers=asks)
        assert (leave.status_code, leave.headers["access-control-allow-origin"]) == (200, "http://there")
        refused = served.http.post("/v1/completions", json={}, headers={"Origin": "http://there"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "http://there")
        other = served.http.get("/health", headers={"Origin": "http://elsewhere"})
        assert "access-control-allow-origin" not in other.headers
    with serving(engine) as served:
        assert "access-control-allow-origin" not in served.http.options("/v1/models", headers=asks).headers


def test_idle_connections_stay_longer_than_clients_are_told(engine):
    with serving(engine, keep_alive=90.0) as served:
        assert served.http.get("/health").headers["keep-alive"] == "timeout=90"
        assert served.server.config.timeout_keep_alive > 90
