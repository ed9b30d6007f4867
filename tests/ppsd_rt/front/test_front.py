"""A front and engines in one process: connections are cut after so many rounds, and nobody who asked sees it."""

import logging
import socket
import threading
from contextlib import contextmanager

import pytest
from grammar_support import GRAMMARS
from serve_support import HANG, NAME, Log, serving
from support import write_model

from ppsd_rt import Engine, PpsdError, RunOptions, SamplingParams, UsageError
from ppsd_rt.engine import open_model
from ppsd_rt.front import work as engine_side
from ppsd_rt.front.asks import Lost, facts_of
from ppsd_rt.front.backend import MOST_LOSSES, FrontBackend
from ppsd_rt.front.engines import Engines
from ppsd_rt.front.wire import Line
from ppsd_rt.serve.run import listen

KEY = "a key"
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

    def __init__(self, folder, engine):
        self._folder, self._engine = folder, engine
        self.listener = listen("127.0.0.1", 0)
        self.engines = Engines(self.listener, KEY, HANG)
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


def test_silence_is_a_loss():
    """A limit that passes; nobody measures how soon."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(_Quiet(ours), 0.05)
        with pytest.raises(Lost, match=r"it has been silent for 0\.05 s"):
            line.read()
        assert line.silent


class _Quiet:
    """A socket of a pair, which has no options of TCP."""

    def __init__(self, wrapped):
        self._wrapped = wrapped

    def __getattr__(self, name):
        return getattr(self._wrapped, name)

    def setsockopt(self, *_):
        pass


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
