"""Requests that would hold up everybody: what they may cost is bounded, and nothing is begun before there is room."""

import asyncio
import threading
from unittest.mock import MagicMock

import pytest
from pydantic import ValidationError
from serve_support import HANG, SCHEDULE, USER, Clock, serving

from ppsd_rt import SamplingParams
from ppsd_rt.backend import RunOptions
from ppsd_rt.serve.answers import Answers
from ppsd_rt.serve.messages import MessagesRequest
from ppsd_rt.serve.ollama import OllamaRequest
from ppsd_rt.serve.requests import ChatRequest, CompletionRequest, DetokenizeRequest
from ppsd_rt.serve.responses import ResponsesRequest
from ppsd_rt.serve.run import _Connection
from ppsd_rt.serve.service import Service
from ppsd_rt.serve.settings import Settings

MANY = 1000


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": USER, "tools": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (CompletionRequest, {"prompt": [[]] * MANY + [{}]}),
        (CompletionRequest, {"prompt": [[""] * MANY]}),
        (CompletionRequest, {"prompt": "a", "guided_choice": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(id): "x" for id in range(MANY)}}),
        (DetokenizeRequest, {"tokens": [""] * MANY}),
        (ResponsesRequest, {"input": [1] * MANY}),
        (ResponsesRequest, {"input": "a", "tools": [1] * MANY}),
        (MessagesRequest, {"messages": [{}] * MANY}),
        (OllamaRequest, {"messages": [1] * MANY}),
    ],
)
def test_the_first_error_of_a_list_is_enough(request_, body):
    with pytest.raises(ValidationError) as error:
        request_.model_validate(body)
    assert error.value.error_count() < 20


@pytest.mark.parametrize("depth", [300, 900, 20000])
def test_arguments_of_any_depth_are_no_servers_failure(roomy_served, depth):
    call = {"id": "a", "function": {"name": "a", "arguments": "[" * depth + "]" * depth}}
    said = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    assert roomy_served.post(messages=said).status_code in (200, 400)


def test_prompts_are_counted_before_they_are_encoded(engine, monkeypatch):
    with serving(engine, queue=20) as served:
        monkeypatch.setattr(served.service, "encode", lambda *_: pytest.fail("it was to be refused before"))
        for body in ({"prompt": ["a"] * 21}, {"prompt": ["a"] * 11, "n": 2}):
            reply = served.http.post("/v1/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_answers")


def test_the_time_counts_while_a_prompt_is_encoded(engine, clock, monkeypatch):
    with serving(engine, timeout=30.0, sleep=clock.sleep) as served:
        begun = threading.Semaphore(0)

        async def encode(*_):
            begun.release()
            await asyncio.Event().wait()

        monkeypatch.setattr(served.service, "encode", encode)
        with served.connect({"stream": True}):
            assert begun.acquire(timeout=HANG) and served.service.admission.waiting == 1
            clock.ring(30.0)
            assert served.log.next()["status"] == 504
        assert served.service.admission.waiting == 0


@pytest.mark.parametrize("piece", [b"a" * 1000, b"x: y\r\n" * 200], ids=["one header", "many"])
def test_the_head_of_a_request_has_an_end(served, piece):
    """Before any key is asked for."""
    reply = served.raw("GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + (piece * 70).decode())
    assert reply.startswith(b"HTTP/1.1 400 ") and b"too large" in reply


def test_a_connection_that_says_nothing_is_closed(served):
    """At first, and in the middle of a later request's head; not while a body or an answer is on its way."""
    loop, server = MagicMock(), served.server
    loop.call_later = lambda seconds, close: waits.append((seconds, timer := MagicMock())) or timer
    loop.create_task = lambda coroutine, **_: coroutine.close() or MagicMock()
    waits, seconds = [], server.config.timeout_keep_alive
    connection = _Connection(server.config, server.server_state, {}, loop)
    connection.connection_made(MagicMock())
    for said in (b"", b"GET / HTTP/1.1\r\n"):
        connection.data_received(said)
        assert waits[-1][0] == seconds and not waits[-1][1].cancel.called
    connection.data_received(b"Content-Length: 5\r\nHost: localhost\r\n\r\n")
    assert all(timer.cancel.called for _, timer in waits)


def test_more_ids_than_a_context_holds_are_no_text(served):
    reply = served.http.post("/detokenize", json={"tokens": [5] * (served.service.context + 1)})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_client_that_reads_nothing_is_not_waited_for(engine):
    """What it is sent would be held until its answers end."""
    clock, sending = Clock(), threading.Event()
    service = Service(engine, Settings(schedule=SCHEDULE, sleep=clock.sleep))

    async def asked():
        return [engine.encode(USER)], [SamplingParams(max_tokens=24)]

    async def stuck(*_):
        sending.set()
        await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    async def run():
        answers = Answers(service, asked, 1, RunOptions())
        task = asyncio.create_task(answers.run(stuck, receive, {}))
        await asyncio.to_thread(sending.wait, HANG)
        await asyncio.to_thread(clock.ring, 45.0)
        with pytest.raises(asyncio.CancelledError):
            await task
        return answers.completions

    (completion,) = asyncio.run(run())
    assert completion.finish_reason in ("cancelled", "length") and service.admission.running == 0
