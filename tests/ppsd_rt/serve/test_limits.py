"""Keys, sizes, queues, times, clients that go away, and the end: with a clock and answers that the tests hold."""

import signal
import socket
import threading

import httpx2
import pytest
from serve_support import HANG, USER, openai, serving

from ppsd_rt import Grammar
from ppsd_rt.errors import GrammarFailed, UsageError
from ppsd_rt.sampling.grammar import TokenMask


def test_the_key_guards_all_but_the_page_and_the_health(engine):
    with serving(engine, api_key="sésame") as served:
        assert served.http.get("/health").status_code == served.http.get("/").status_code == 200
        wrong = ("Basic sésame", "Bearer wrong", "Bearer", "Bearer sés", "Bearer sésames")
        for headers in ({}, {"x-api-key": "other"}, *({"Authorization": each.encode()} for each in wrong)):
            for path in ("/v1/models", "/metrics", "/openapi.json"):
                reply = served.http.get(path, headers=headers)
                assert (reply.status_code, reply.headers["WWW-Authenticate"]) == (401, "Bearer")
                assert reply.json()["error"]["code"] == "invalid_api_key"
        for name, value in (
            ("Authorization", "Bearer sésame"),
            ("x-api-key", "sésame"),
        ):  # the latter: Anthropic's clients
            assert served.http.get("/v1/models", headers={name: value.encode()}).status_code == 200


def test_sizes(engine):
    with serving(engine, max_body=2000, max_prompt=50, max_answer=8) as served:
        sized = served.http.post("/v1/completions", json={"prompt": "a" * 3000})
        unsized = served.http.post(
            "/v1/completions",
            content=iter([b"{", b" " * 1500, b" " * 1500]),
            headers={"Content-Type": "application/json"},
        )
        for reply in (sized, unsized):
            assert reply.status_code == 413
            assert "--max-body" in reply.json()["error"]["message"]
        error = served.http.post("/v1/completions", json={"prompt": "a" * 60}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        assert "60 tokens; this server takes 50" in error["message"]
        body = {"prompt": "a", "max_tokens": 100, "ignore_eos": True}
        assert served.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 8


def test_a_full_queue_says_when_to_come_again(holding):
    with serving(holding, queue=1) as served:
        streams = [served.chat(max_tokens=8, stream=True) for _ in range(2)]  # each has its first token: none waits
        assert served.http.get("/health").json() | {"model": ""} == {
            "status": "ok", "model": "", "waiting": 0, "running": 2, "acceptance_by_day": {},
        }  # fmt: skip
        reply = served.post(n=2)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_answers")
        served.service.admission.waiting += 1  # one that has no token yet
        with pytest.raises(openai.RateLimitError, match="1 answers are waiting already") as refused:
            served.chat()
        with pytest.raises(openai.RateLimitError):  # not within the stream: nothing has been sent yet
            served.chat(stream=True)
        assert 1 <= int(refused.value.response.headers["Retry-After"]) <= 60
        served.service.admission.waiting -= 1
        holding.release()
        assert all(list(stream)[-1].choices[0].finish_reason == "length" for stream in streams)
        assert served.post(max_tokens=1).status_code == 200


def test_a_client_that_goes_away_in_a_stream_ends_its_answers(holding):
    with serving(holding) as served:
        stream = served.chat(max_tokens=24, n=2, stream=True)
        next(stream)
        stream.close()
        entry = served.answered()
        assert (entry["finish"], entry["error"]) == ("cancelled,cancelled", "the client has gone")
        assert len(holding.held) == 2
        assert (served.service.admission.waiting, served.service.admission.running) == (0, 0)


def test_a_client_that_goes_away_while_it_waits_ends_its_answer(holding):
    with serving(holding) as served, served.chat(max_tokens=4, stream=True) as other, served.connect({}) as connection:
        for _ in range(2):
            assert holding.begun.acquire(timeout=HANG)
        connection.shutdown(socket.SHUT_RDWR)
        entry = served.answered()
        assert (entry["status"], entry["finish"]) == (499, "cancelled")
        holding.release()
        assert list(other)[-1].choices[0].finish_reason == "length"


def test_an_answer_that_takes_too_long_is_ended(holding, clock):
    with serving(holding, timeout=30.0, sleep=clock.sleep) as served:
        stream = served.chat(max_tokens=24, stream=True)
        next(stream)
        clock.ring(30.0)
        with pytest.raises(openai.APIError, match="longer than 30 s"):
            list(stream)
        assert served.answered()["finish"] == "cancelled"


def test_an_answer_that_takes_too_long_before_anything_is_sent_has_a_status_of_its_own(holding, clock):
    with serving(holding, timeout=30.0, sleep=clock.sleep) as served:
        with served.connect({}) as connection:
            assert holding.begun.acquire(timeout=HANG)  # till then it is the body that has so long
            clock.ring(30.0)
            assert connection.recv(1000).startswith(b"HTTP/1.1 504 ")
        assert served.answered()["status"] == 504


def test_a_text_that_cannot_fit_is_not_tokenised(served, engine, monkeypatch):
    longest = max(len(engine.tokenizer.id_to_token(id) or "") for id in range(engine.tokenizer.vocab_size))
    text = "a" * (engine.config.max_position_embeddings * longest + 1)
    monkeypatch.setattr(type(engine.tokenizer), "_encode", lambda *_: pytest.fail("it was tokenised"))
    messages = [{"role": "user", "content": text}]
    bodies = {"/v1/chat/completions": {"messages": messages}, "/v1/completions": {"prompt": text}}
    bodies |= {"/v1/responses": {"input": text}, "/v1/messages": {"messages": messages, "max_tokens": 1}}
    for path, body in {**bodies, "/api/generate": {"prompt": text, "raw": True}}.items():
        reply = served.http.post(path, json=body)
        assert reply.status_code == 400 and "the prompt has at least 51" in reply.text, path


def test_a_long_prompt_holds_up_nobody(served, engine, monkeypatch):
    encode, begun, go = type(engine.tokenizer)._encode, threading.Event(), threading.Event()

    def slow(self, text, special):
        if len(text) > 70_000:
            begun.set()
            assert go.wait(HANG)
        return encode(self, text, special)

    monkeypatch.setattr(type(engine.tokenizer), "_encode", slow)
    long = threading.Thread(target=served.http.post, args=("/tokenize",), kwargs={"json": {"prompt": "a" * 80_000}})
    long.start()
    try:
        assert begun.wait(HANG)
        assert served.http.get("/health").status_code == 200 and served.post().status_code == 200
    finally:
        go.set()
        long.join(HANG)


def test_a_body_that_does_not_come_is_not_waited_for(engine, clock):
    with serving(engine, timeout=30.0, sleep=clock.sleep) as served:
        with served.connect({}, sent=10) as connection:
            clock.ring(30.0)
            assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")
        assert served.log.next()


def test_a_server_that_stops_lets_answers_end(holding, clock, caplog):
    caplog.set_level("INFO")
    with serving(holding, grace=7.0, sleep=clock.sleep) as served:
        stream = served.chat(max_tokens=24, stream=True)
        next(stream)
        served.server.should_exit = True
        assert served.log.next("stopping")["running"] == 1
        assert "1 answer has 7 s; Ctrl-C again ends it now" in caplog.text
        assert served.thread.is_alive()
        holding.release()
        assert list(stream)[-1].choices[0].finish_reason == "length"
        served.thread.join(HANG)
        assert served.log.next("stopped")


def test_a_server_that_stops_ends_answers_after_the_grace(holding, clock):
    with serving(holding, grace=7.0, sleep=clock.sleep) as served:
        stream = served.chat(max_tokens=24, stream=True)
        next(stream)
        served.server.should_exit = True
        served.log.next("stopping")
        assert served.service.admission.stopping
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            served.chat()  # nobody listens any more, or very soon
        clock.ring(7.0)
        with pytest.raises(openai.APIError, match="the server is stopping"):
            list(stream)
        served.thread.join(HANG)
        assert not served.thread.is_alive()


def test_requests_on_open_connections_are_refused_while_it_stops(served):
    served.http.get("/health")
    served.service.admission.stopping = True
    try:
        assert served.http.get("/health").status_code == 503
        assert served.post().json()["error"]["code"] == "stopping"
    finally:
        served.service.admission.stopping = False


HOPELESS = {
    "type": "lark",
    "lark": "start: A\nA: " + " & ".join(f"/(a{{{p}}})*/" for p in (2, 3, 5, 7, 11, 13, 17, 19)),
}


@pytest.fixture
def patient(engine, monkeypatch):
    """An engine on which a grammar in Lark compiles until the test ends; `asked` says that one does."""
    engine.compile(Grammar.json())
    trials, asked, ended = engine._grammars._trials, threading.Event(), threading.Event()
    run = trials.run

    def waits(kind, text):
        if kind != "lark":
            return run(kind, text)
        asked.set()
        ended.wait(HANG)
        raise UsageError("hopeless")  # which is not kept

    monkeypatch.setattr(trials, "run", waits)
    engine.asked = asked
    yield engine
    ended.set()


def ask(served, **body):
    """From a thread: the reply, or None where the connection ended without one."""
    replies = []

    def post():
        try:
            replies.append(
                served.http.post(
                    "/v1/chat/completions", json={"messages": USER, "max_tokens": 24, "temperature": 0} | body
                )
            )
        except httpx2.TransportError:
            replies.append(None)

    thread = threading.Thread(target=post)
    thread.start()
    return thread, replies


def test_neither_others_nor_a_client_that_goes_wait_for_a_grammar_that_compiles(patient):
    with serving(patient) as served:
        with served.connect({"response_format": HOPELESS}) as connection:
            assert patient.asked.wait(HANG)
            assert served.post().status_code == served.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
            assert served.post(response_format={"type": "regex", "regex": "[a-c]{2}"}).status_code == 200
            connection.shutdown(socket.SHUT_RDWR)
            while served.log.next()["status"] != 499:
                pass
        assert (served.service.admission.waiting, served.service.admission.running) == (0, 0)


@pytest.mark.parametrize("signals", [1, 2], ids=["after the grace", "at once"])
def test_a_server_that_stops_ends_a_grammar_that_compiles(patient, clock, signals):
    with serving(patient, grace=7.0, sleep=clock.sleep) as served:
        thread, replies = ask(served, response_format=HOPELESS)
        assert patient.asked.wait(HANG)
        served.server.handle_exit(signal.SIGTERM, None)
        assert served.log.next("stopping")["waiting"] == 1
        if signals == 2:
            served.server.handle_exit(signal.SIGTERM, None)
        else:
            clock.ring(7.0)
        served.thread.join(HANG)
        assert not served.thread.is_alive()
        thread.join(HANG)
        assert replies[0] is None or replies[0].json()["error"]["code"] == "stopping"


def test_a_grammar_that_gives_up_in_the_answer_is_the_requests_fault(served, monkeypatch):
    """Clients try a 500 again."""

    def gives_up(*_):
        raise GrammarFailed("too many states")

    monkeypatch.setattr(TokenMask, "fill", gives_up)
    reply = served.post(response_format={"type": "json_object"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "grammar_failed")
