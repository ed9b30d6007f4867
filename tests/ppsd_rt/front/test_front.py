"""A front and engines in one process: connections are cut after so many rounds, and nobody who asked sees it."""

import errno
import logging
import socket
import threading
from contextlib import contextmanager, suppress

import pytest
from serve_support import HANG, NAME, Log, serving
from support import GRAMMARS, write_model

from ppsd_rt import Engine, PpsdError, RunOptions, SamplingParams, UsageError
from ppsd_rt.engine import open_model
from ppsd_rt.front import engines as front_side
from ppsd_rt.front import work as engine_side
from ppsd_rt.front.asks import EngineLost, facts_of
from ppsd_rt.front.backend import MOST_LOSSES, FrontBackend
from ppsd_rt.front.engines import _MOST_STRANGERS, Engines
from ppsd_rt.front.wire import Line
from ppsd_rt.serve.run import listen

KEY = "a key of engines"
PARAMS = SamplingParams(max_tokens=48, temperature=1.1, seed=4, presence_penalty=1.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("front") / "model", num_hidden_layers=3, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def engine(folder):
    engine = Engine.from_pretrained(folder, exit_head="norm:1", backend="cpu", dtype="float32", threads=1)
    engine.name = NAME
    return engine


class Front:
    """A front whose engines are threads, each with a connection that the test can cut."""

    def __init__(self, folder, engine, engines=Engines):
        self._folder, self._engine = folder, engine
        self.listener = listen("127.0.0.1", 0)
        self.engines = engines(self.listener, KEY, HANG)
        self.cuts = []  # of each connection that will come, after how many rounds it is cut; then: never
        self.connections, self._threads = [], []

    def start(self, key=KEY, engine=None):
        """An engine, which comes again whenever it is cut."""
        address = self.listener.getsockname()[:2]

        def come():
            while not self.engines._failure:
                cut = self.cuts.pop(0) if self.cuts else None
                engine_side.work(Cut(engine or self._engine, self.connections, cut), address, key, HANG, once=True)
                if cut is None:
                    return

        thread = threading.Thread(target=come)
        thread.start()
        self._threads.append(thread)

    def engine(self):
        checkpoint, tokenizer = open_model(str(self._folder), "cpu")
        return Engine(checkpoint, tokenizer, FrontBackend(self.engines.first(), self.engines), NAME)

    def close(self):
        self.engines.close()
        self.listener.close()
        for thread in self._threads:
            thread.join(HANG)
            assert not thread.is_alive()


class Cut:
    """An engine that loses its connection after so many rounds of all answers together."""

    name = "cpu"  # of the backend

    def __init__(self, engine, connections, rounds):
        self._engine, self._connections, self._left = engine, connections, rounds
        self.backend = self

    def __getattr__(self, name):
        found = getattr(self._engine, name, None)
        return getattr(self._engine.backend, name) if found is None else found

    def rounds(self, *asked):
        if self._left == 0:
            self._cut()
        for event in self._engine.backend.rounds(*asked):
            yield event
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    self._cut()

    def _cut(self):
        self._connections[-1].shutdown(socket.SHUT_RDWR)


@pytest.fixture
def front(folder, engine, monkeypatch):
    made = Front(folder, engine)
    call = engine_side._call

    def recorded(*given):
        if (connection := call(*given)) is not None:
            made.connections.append(connection)
        return connection

    monkeypatch.setattr(engine_side, "_call", recorded)
    yield made
    made.close()


@pytest.mark.parametrize("cuts", [[], [1], [1, 1, 1, 2, 3], [0, 5, 0, 0, 3]], ids=str)
@pytest.mark.parametrize("schedule", ["plain", "eesd:length=3,stop_rule=fixed", "auto"])
def test_an_answer_goes_on_with_the_same_tokens(front, engine, cuts, schedule):
    front.cuts = list(cuts)
    front.start()
    events = list((answer := front.engine().generate("Once upon a time", PARAMS, schedule)).events())
    undisturbed = engine.generate("Once upon a time", PARAMS, "plain").run()
    assert (answer.completion.ids, answer.completion.text) == (undisturbed.ids, undisturbed.text)
    assert [token.position for event in events for token in event.tokens] == list(range(16, 16 + 48))
    if schedule != "auto":  # whose rounds depend on time: the answer may end before the last cut, or with it
        assert front.cuts == []
        assert len(front.connections) == len(cuts) + 1
    assert sum(event.round.prompt for event in events) <= 1
    seconds = [event.round.seconds for event in events]
    assert seconds == sorted(seconds)


def test_a_grammar_and_probabilities_go_on(front, engine):
    front.cuts = [1, 2, 1, 3]
    front.start()
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=2, grammar=GRAMMARS["schema"], logprobs=3)
    found, undisturbed = (one.generate("x", params, "plain").run() for one in (front.engine(), engine))
    assert (found.ids, found.logprobs) == (undisturbed.ids, undisturbed.logprobs)
    assert front.cuts == []


def test_a_last_token_that_came_before_the_loss_is_the_last(front, engine):
    """All but the engine's word that the answer has ended has come."""
    params = SamplingParams(max_tokens=1)
    front.cuts = [1]
    front.start()
    assert front.engine().generate("x", params, "plain").run().ids == engine.generate("x", params, "plain").run().ids


def test_an_answer_that_ends_every_engine_is_given_up(front):
    front.cuts = [0] * MOST_LOSSES
    front.start()
    with pytest.raises(PpsdError, match=f"{MOST_LOSSES} engines were lost at this answer: its connection closed"):
        front.engine().generate("x", PARAMS, "plain").run()


def test_what_an_engine_refuses_is_not_asked_again(front, engine):
    class Refusing(Cut):
        def rounds(self, *asked):
            raise UsageError("no such thing")
            yield

    front.start(engine=Refusing(engine, front.connections, None))
    with pytest.raises(UsageError, match="no such thing"):
        front.engine().generate("x", PARAMS, "plain").run()
    assert len(front.connections) == 1


def test_probabilities_of_a_prompt(front, engine):
    front.start()
    assert front.engine().prompt_logprobs("Once upon", 2) == engine.prompt_logprobs("Once upon", 2)


def test_an_engine_with_another_key_or_other_bits_does_not_come_in(front, folder, caplog):
    caplog.set_level(logging.WARNING, "ppsd_rt")  # a command line that ran in this process may have set another
    front.start()
    front.engines.first()
    other = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8", threads=1)
    front.start(engine=other)
    front.start(key="another")
    for thread in front._threads[1:]:
        thread.join(HANG)
    assert "gives other bits" in caplog.text
    assert "brings another key: set PPSD_ENGINE_KEY" in caplog.text
    assert len(front.engines._engines) == 1


def test_an_answer_that_nobody_wants_ends_on_the_engine(front, engine):
    front.start()
    with front.engine().generate("x", SamplingParams(max_tokens=900, ignore_eos=True), "plain") as answer:
        next(answer)
    assert front.engine().generate("x", PARAMS, "plain").run().ids == engine.generate("x", PARAMS, "plain").run().ids
    assert [one.running for one in front.engines._engines] == [0]  # so that others may come


def test_who_waits_for_an_engine_can_go(front):
    front.cuts = [1]
    front.start()
    one = front.engine()
    front._threads[0].join(0)
    answer = one.generate("x", PARAMS, "plain")
    answer.cancel()
    assert answer.run().ids == ()


class Link:
    """One end of a connection, in the test's time. sends: bytes a second that the other end takes."""

    def __init__(self, sends=1e9, comes=()):
        self.now, self._sends, self._comes, self._limit, self.sent = 0.0, sends, list(comes), None, b""
        self.shut = self.closed = False

    def clock(self):
        return self.now

    def settimeout(self, seconds):
        self._limit = seconds

    def setsockopt(self, *_):
        pass

    def _pass(self, seconds):
        self.now += min(seconds, self._limit)
        if seconds >= self._limit:
            raise TimeoutError

    def sendall(self, data):
        self._pass(len(data) / self._sends)
        self.sent += data

    def recv(self, _):
        """The next that comes: (seconds until then, bytes)."""
        seconds, data = self._comes.pop(0) if self._comes else (1e9, b"")
        self._pass(seconds)
        return data

    def shutdown(self, _):
        self.shut = True

    def close(self):
        self.closed = True

    def line(self, silence=10.0):
        return Line(self, silence, self.clock)


def test_silence_is_a_loss():
    link = Link(comes=[(9.0, b'{"kind":"alive"}'), (9.0, b'\n{"kind":"x"}\n{"kind":'), (9.0, b'"y"}\n')])
    line = link.line()
    assert [line.read()["kind"] for _ in range(2)] == ["x", "y"]
    with pytest.raises(EngineLost, match=r"it has been silent for 10 s"):
        line.read()
    assert line.silent and link.shut and link.now == 37.0


def test_who_waits_on_a_closed_line_waits_on_no_other_connection():
    """A file that is closed under its reader gives its number to the next who comes: the reader would wait on that."""
    line = (link := Link()).line()
    line.close()
    assert link.shut and not link.closed
    line.release()
    assert link.closed


def test_a_slow_link_is_not_silent():
    """8 MB at 2 Mbit/s take half a minute: each piece of them has its own time."""
    link = Link(sends=250_000)
    line = link.line()
    line.send("head", part="A" * 8_000_000)
    assert len(link.sent) > 8_000_000 and link.now > 30 and not line.silent
    with pytest.raises(EngineLost, match="silent"):
        Link(sends=1000).line().send("head", part="A" * 8_000_000)


def test_who_may_be_anybody_has_one_time_and_little_room():
    drip = Link(comes=[(5.0, b" ")] * 100)
    with pytest.raises(EngineLost, match="silent for 10 s"):
        drip.line().first()
    assert drip.now == 10.0, "however steadily it comes"
    flood = Link(comes=[(0.0, b"[]," * 20_000)] * 1000)
    with pytest.raises(EngineLost, match="it sent what is no message"):
        flood.line().first()
    assert len(flood._comes) > 990, "64 KiB are enough for a hello"


HELLOS = [
    b'{"kind":"hello","key":"\\ud800"}\n',
    b'{"kind":"hello","proof":"\\ud800"}\n',
    b'{"kind":"hello","proof":5}\n',
    b'{"kind":"hello"}\n',
    b"[]\n",
    b'{"kind":["alive"]}\n',
    b'{"kind":1' + b"9" * 5000 + b"}\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * 70_000,
]


def test_strangers_end_neither_the_listener_nor_a_thread_nor_each_other(front, engine, caplog):
    caplog.set_level(logging.WARNING, "ppsd_rt")
    address, before = front.listener.getsockname()[:2], {*threading.enumerate()}  # of tests that have ended, too
    for hello in HELLOS:
        with socket.create_connection(address, HANG) as stranger:
            assert b"nonce" in stranger.recv(1000)
            stranger.sendall(hello)
            with suppress(ConnectionResetError):  # what it has sent is not read to its end
                assert stranger.recv(1000) == b"", hello[:60]
    waiting = [socket.create_connection(address, HANG) for _ in range(3 * _MOST_STRANGERS)]
    for stranger in waiting[: 2 * _MOST_STRANGERS]:  # the oldest are sent away
        with suppress(ConnectionResetError):
            assert stranger.makefile("rb").read().count(b"\n") <= 1
    front.start()
    assert front.engine().generate("x", PARAMS, "plain").run().ids == engine.generate("x", PARAMS, "plain").run().ids
    for stranger in waiting:
        stranger.close()
    while front.engines._strangers or sum(t.name.startswith("engine ") for t in {*threading.enumerate()} - before) > 1:
        pass  # their threads end too


class Accepting:
    """A listener whose system has no more files, and then has."""

    def __init__(self, listener):
        self._listener, self._left = listener, 3

    def accept(self):
        self._left -= 1
        if self._left >= 0:
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)


def test_a_system_without_files_or_threads_does_not_end_the_listener(folder, engine, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "ppsd_rt")
    monkeypatch.setattr("ppsd_rt.front.engines._AGAIN", 0.0)
    full, real = [True, True], front_side.start

    def start(thread):
        if thread.name.startswith("engine ") and full:
            full.pop()
            raise PpsdError("the system starts no more threads")
        real(thread)

    monkeypatch.setattr(front_side, "start", start)
    monkeypatch.setattr(engine_side, "_AGAIN", 0.0)
    front = Front(folder, engine, lambda listener, *rest: Engines(Accepting(listener), *rest))
    for _ in range(2):
        turned_away = socket.create_connection(front.listener.getsockname()[:2], HANG)
        with turned_away, suppress(ConnectionResetError):
            assert turned_away.recv(1000) == b""
    front.start()
    assert front.engines.first()
    assert "no engine can come just now: Too many open files" in caplog.text
    assert "is sent away: the system starts no more threads" in caplog.text
    front.close()


def test_the_key_never_travels_and_a_line_that_was_overheard_is_of_no_use(front, monkeypatch):
    said, send = [], Line.send

    def overheard(line, kind, **fields):
        said.append((kind, fields))
        send(line, kind, **fields)

    monkeypatch.setattr(Line, "send", overheard)
    front.start()
    front.engines.first()
    ((_, hello),) = [one for one in said if one[0] == "hello"]
    assert KEY not in str(said)
    with socket.create_connection(front.listener.getsockname()[:2], HANG) as connection:
        line = Line(connection, HANG)
        line.first()
        line.send("hello", **hello)
        with pytest.raises(EngineLost, match="closed"):
            line.read()
    assert len(front.engines._engines) == 1


def test_facts_and_events_survive_the_wire(front, engine):
    front.start()
    assert front.engines.first() == facts_of(engine)
    options = RunOptions(report_drafts=True)
    schedule = "eesd:length=3,stop_rule=fixed"
    found, direct = (
        [event for event in one.generate("x", PARAMS, schedule, options).events() if not hasattr(event, "round")]
        for one in (front.engine(), engine)
    )
    assert found == direct != []


@contextmanager
def served_by(front):
    with serving(front.engine(), here=lambda: front.engines.here, log=Log().write) as served:
        yield served


def test_streams_pause_and_go_on_and_new_requests_get_503(front, engine):
    asked = {"temperature": 0.9, "seed": 3, "max_tokens": 40, "n": 3, "stop": ["e"], "logprobs": 2}
    with serving(engine) as plainly:
        wanted = plainly.complete("Once upon a time", **asked)
    front.cuts = [2, 1, 4]
    front.start()
    with served_by(front) as served:
        parts = {}
        for chunk in served.complete("Once upon a time", stream=True, **asked):
            for choice in chunk.choices:
                text, _ = parts.get(choice.index, ("", None))
                parts[choice.index] = text + choice.text, choice.finish_reason
        assert parts == {choice.index: (choice.text, choice.finish_reason) for choice in wanted.choices}
        assert front.cuts == []
        assert served.http.get("/health").json()["status"] == "ok"
        front.connections[-1].shutdown(socket.SHUT_RDWR)
        for thread in front._threads:
            thread.join(HANG)
        while front.engines.here:
            pass
        refused = served.post()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["code"] == "no_engine"
        away = served.http.get("/health")
        assert (away.status_code, away.json()["status"]) == (503, "no engine")
        front.start()
        while not front.engines.here:
            pass
        assert served.post().status_code == 200
