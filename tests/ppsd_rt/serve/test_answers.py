"""What comes over HTTP is what the engine gives alone: the real `openai` client against a server in a thread."""

import asyncio
import json
from itertools import pairwise

import pytest
from serve_support import NAME, SCHEDULE, USER, alone, openai

from ppsd_rt import Committed, RunOptions, SamplingParams
from ppsd_rt.sampling.grammar import Grammar
from ppsd_rt.serve.answers import Answers
from ppsd_rt.serve.chat import Chat, ChatShape
from ppsd_rt.serve.requests import ChatRequest


def text_of(stream):
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 11}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": -0.4}
OURS = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, SAMPLED, SAMPLED | OURS, PENALTIES], ids=["greedy", "sampled", "ours", "penalties"]
)
def test_chat(served, engine, params):
    ours = {name: value for name, value in params.items() if name in OURS}
    theirs = {name: value for name, value in params.items() if name not in OURS}
    reply = served.chat(max_tokens=24, **theirs, extra_body=ours)
    expected = alone(engine, USER, max_tokens=24, **params)
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    assert reply.model == NAME and reply.object == "chat.completion"
    streamed = list(served.chat(max_tokens=24, stream=True, **theirs, extra_body=ours))
    assert text_of(streamed) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1].choices[0].finish_reason == "length"
    assert streamed[0].choices[0].delta.role == "assistant" and streamed[1].choices[0].delta.role is None
    assert len({chunk.id for chunk in streamed}) == 1


def test_usage_counts_tokens_and_drafts(served, engine):
    expected = alone(engine, USER, max_tokens=24)
    s = expected.statistics
    chunks = list(served.chat(max_tokens=24, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for usage in (served.chat(max_tokens=24).usage, chunks[-1].usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected.prompt_ids), 24)
        assert usage.total_tokens == len(expected.prompt_ids) + 24
        details = usage.completion_tokens_details
        assert details.accepted_prediction_tokens == s.accepted > 0
        assert details.rejected_prediction_tokens == s.judged - s.accepted > 0
    assert chunks[-1].choices == []


def test_contents_of_several_parts_and_the_developer_role(served, engine):
    parts = [{"type": "text", "text": "Why is "}, {"type": "text", "text": "the sky blue?"}]
    told = {"role": "developer", "content": "Be brief."}
    reply = served.chat(messages=[told, {"role": "user", "content": parts}], max_tokens=8)
    expected = alone(engine, [{"role": "system", "content": "Be brief."}, *USER], max_tokens=8)
    assert reply.choices[0].message.content == expected.text


@pytest.mark.parametrize("prompt", ["Once upon", [79, 110, 99, 101]], ids=["text", "ids"])
def test_completion(served, engine, prompt):
    reply = served.complete(prompt)
    assert reply.choices[0].text == alone(engine, prompt, max_tokens=16).text  # 16: OpenAI's default
    assert "".join(c.choices[0].text for c in served.complete(prompt, stream=True)) == reply.choices[0].text
    assert reply.object == "text_completion"


@pytest.mark.parametrize("prompts", [["Once", "upon"], [[79, 110], [99, 101]]], ids=["texts", "ids"])
def test_several_prompts_and_several_answers_of_each(served, engine, prompts):
    reply = served.complete(prompts, n=2, seed=5, temperature=0.8, max_tokens=6)
    params = [{"max_tokens": 6, "temperature": 0.8, "seed": 5, "index": index} for index in (0, 1)]
    expected = [alone(engine, prompt, **one) for prompt in prompts for one in params]
    assert [choice.text for choice in reply.choices] == [answer.text for answer in expected]
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert reply.usage.completion_tokens == sum(len(answer.ids) for answer in expected)
    assert reply.usage.prompt_tokens == sum(len(engine.encode(prompt)) for prompt in prompts)


def test_seeds(served):
    def say(**seed):
        return served.chat(temperature=1, max_tokens=24, **seed).choices[0]

    assert say(seed=-3).message.content == say(seed=-3).message.content != say(seed=4).message.content
    assert say().seed != say().seed, "without a seed every answer has one of its own"


def test_stop_strings_and_ends(served, engine):
    whole = alone(engine, USER, max_tokens=24).text
    stop = whole[7:9]
    for given in (stop, [stop, "never"]):
        choice = served.chat(max_tokens=24, stop=given).choices[0]
        assert (choice.message.content, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
    streamed = list(served.chat(max_tokens=24, stop=stop, stream=True))
    assert text_of(streamed) == whole[: whole.index(stop)]
    assert streamed[-1].choices[0].finish_reason == "stop"
    ids = alone(engine, USER, max_tokens=24).ids
    choice = served.chat(max_tokens=24, extra_body={"stop_token_ids": [ids[5]]}).choices[0]
    assert choice.finish_reason == "stop"


def test_rounds_that_come_together_have_one_chunk(served, engine):
    request = ChatRequest(messages=USER, stream=True, return_tokens=True)
    options = RunOptions(report_drafts=True)
    with engine.generate(USER, SamplingParams(max_tokens=24), SCHEDULE, options) as generation:
        events = list(generation.events())
    rounds = [event for event in events if isinstance(event, Committed)]
    answers = Answers(served.service, lambda: pytest.fail("nothing is begun"), 1, options)

    def made():
        shape = ChatShape(served.service, Chat(served.service, request))
        shape.answers = answers
        return shape

    shape = made()
    (chunk,) = shape.chunks(0, rounds)
    choice = chunk["choices"][0]
    assert choice["delta"] == {"role": "assistant", "content": generation.completion.text}
    assert [token["id"] for token in choice["tokens"]] == list(generation.completion.ids)
    assert list(shape.chunks(0, [])) == []

    shape = made()
    mixed = list(shape.chunks(0, [*events, generation.completion]))
    changes = sum(type(one) is not type(other) for one, other in pairwise(events))
    drafts = [chunk for chunk in mixed if "drafted" in chunk["choices"][0]]
    assert len(drafts) == len(events) - len(rounds) > 0
    assert len(drafts) < len(mixed) <= len(drafts) + 2 + changes
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in mixed)
    assert text == generation.completion.text and mixed[-1]["choices"][0]["finish_reason"] == "length"


def test_chunks_say_how_each_token_came_about(served, engine):
    chunks = list(served.chat(max_tokens=24, stream=True, extra_body={"return_tokens": True}))
    choices = [chunk.choices[0] for chunk in chunks]
    tokens = [token for choice in choices for token in getattr(choice, "tokens", [])]
    expected = alone(engine, USER, max_tokens=24)
    assert tuple(token["id"] for token in tokens) == expected.ids
    assert [token["position"] for token in tokens] == list(
        range(len(expected.prompt_ids), len(expected.prompt_ids) + 24)
    )
    assert "".join(token["text"] for token in tokens) == expected.text
    assert sum(token["origin"] == "accepted" for token in tokens) == expected.statistics.accepted
    drafted = [draft for choice in choices for draft in getattr(choice, "drafted", [])]
    assert len(drafted) >= expected.statistics.accepted
    assert all(not hasattr(chunk.choices[0], "tokens") for chunk in served.chat(max_tokens=4, stream=True))


def test_sixteen_clients_get_what_each_would_get_alone(served, engine):
    asked = [{"prompt": f"Number {i}", "seed": i, "temperature": 0.8 * (i % 2), "max_tokens": 6 + i} for i in range(16)]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(client.completions.create(model=NAME, **one) for one in asked))

    expected = [
        alone(engine, one["prompt"], **{name: one[name] for name in ("seed", "temperature", "max_tokens")}).text
        for one in asked
    ]
    assert [reply.choices[0].text for reply in asyncio.run(ask_all())] == expected


COLOURS = {"enum": ["red", "green", "a long colour that drafts may help with"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": COLOURS, "strict": True}}


def test_answers_by_a_json_schema(served, engine):
    grammar = Grammar.json_schema(COLOURS)
    for params in ({"temperature": 0.0}, SAMPLED):
        expected = alone(engine, USER, max_tokens=200, grammar=grammar, **params)
        reply = served.chat(max_tokens=200, response_format=FORMAT, **params)
        streamed = list(served.chat(max_tokens=200, response_format=FORMAT, stream=True, **params))
        assert reply.choices[0].message.content == text_of(streamed) == expected.text
        assert json.loads(expected.text) in COLOURS["enum"]
        assert reply.choices[0].finish_reason == "stop"
    assert served.chat(max_tokens=3, response_format={"type": "text"}).choices[0].finish_reason == "length"
    begun = served.chat(max_tokens=3, response_format={"type": "json_object"}).choices[0].message.content
    assert begun.startswith("{")


def test_logprobs_of_a_chat(served, engine):
    expected = alone(engine, USER, max_tokens=24, logprobs=2)
    whole = served.chat(max_tokens=24, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    chunks = list(served.chat(max_tokens=24, logprobs=True, top_logprobs=2, stream=True))
    streamed = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert streamed == whole
    assert b"".join(bytes(one.bytes) for one in whole) == b"".join(
        engine.tokenizer.token_bytes(id) for id in expected.ids
    )
    assert [one.logprob for one in whole] == [said.logprob for said in expected.logprobs]
    for one, said in zip(whole, expected.logprobs, strict=True):
        assert [top.logprob for top in one.top_logprobs] == [logprob for _, logprob in said.top]
        assert one.token == bytes(one.bytes).decode("utf-8", "replace")
    assert served.chat(max_tokens=2, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert served.chat(max_tokens=2).choices[0].logprobs is None


def test_logprobs_of_a_completion(served, engine):
    expected = alone(engine, "Once", max_tokens=16, logprobs=2)
    whole = served.complete("Once", logprobs=2).choices[0].logprobs
    assert whole.token_logprobs == [said.logprob for said in expected.logprobs]
    assert [max(top.values()) for top in whole.top_logprobs] == [said.top[0][1] for said in expected.logprobs]
    assert all(len(top) == 2 for top in whole.top_logprobs), "parts of characters are told apart"
    assert any(token.startswith("bytes:") for token in whole.tokens), "parts of characters, whose names are longer"
    stream, length, offsets = engine.tokenizer.stream(), 0, []
    for id in expected.ids:
        offsets.append(length)
        length += len(stream.push(id))
    assert whole.text_offset == offsets
    text = served.complete("Once", logprobs=2).choices[0].text
    for token, offset in zip(whole.tokens, whole.text_offset, strict=True):
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)
    pieces = [chunk.choices[0].logprobs for chunk in served.complete("Once", logprobs=2, stream=True)]
    for column in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for piece in pieces if piece for one in getattr(piece, column)] == getattr(whole, column)


def test_models(served):
    assert [model.id for model in served.client.models.list()] == [NAME]
    assert served.client.models.retrieve(NAME).max_model_len == 512
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        served.client.models.retrieve("other/model")


def test_tokenize(served, engine):
    reply = served.http.post("/tokenize", json={"prompt": "ab<|im_end|>", "return_token_strs": True}).json()
    assert reply == {
        "count": 3,
        "max_model_len": 512,
        "tokens": engine.encode("ab<|im_end|>"),
        "token_strs": ["a", "b", "<|im_end|>"],
    }
    assert served.http.post("/tokenize", json={"messages": USER}).json()["tokens"] == engine.encode(USER)
    assert served.http.post("/tokenize", json={"prompt": "a" * 1000}).json()["count"] == 1000
    assert served.http.post("/tokenize", json={}).json()["error"]["message"].startswith("give a prompt, or messages")
