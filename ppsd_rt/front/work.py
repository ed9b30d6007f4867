"""An engine that answers for a front, in a process of its own: it may be lost, and another one goes on."""

import logging
import socket
from collections.abc import Callable
from contextlib import closing, suppress
from threading import Event, Thread
from time import sleep
from typing import Any

from ..backend import Cancellation
from ..engine import Engine
from ..errors import PpsdError
from ..pipeline.rounds import Round
from ..ranks.threads import start
from .asks import EngineLost, facts_of, rounds_of
from .learned import Learned
from .wire import Line, Message, ask_of, proof_of

_LOG = logging.getLogger(__name__)
_AGAIN = 0.5  # seconds until the front is called once more
_LOOK = 0.25  # seconds between two looks at the ranks


def work(engine: Engine, front: tuple[str, int], key: str, silence: float, once: bool = False) -> None:
    """Until a signal ends it, or a rank is lost: then PpsdError says which.

    A front that goes away may come back. once: it will not.
    """
    facts, learned = facts_of(engine), Learned(engine)  # which outlives a front
    while True:
        connection = _call(front, silence, engine, once)
        if connection is None:
            return
        line = Line(connection, silence)
        over = Event()
        start(Thread(target=_watch_ranks, args=(engine, line, over), name="watch ranks", daemon=True))
        calls = _Calls(engine, line, learned)
        try:
            line.send("hello", proof=proof_of(key, str(line.first().get("nonce"))), facts=facts, head=learned.hash)
            line.live()
            while True:
                calls.take(line.read())
        except EngineLost as lost:
            _check_ranks(engine)
            _LOG.info("the front at %s:%d is lost: %s", *front, lost)
            if once:
                return
            sleep(_AGAIN)  # it may have sent this engine away
        finally:
            over.set()
            calls.end_all()
            line.release()


def _call(front: tuple[str, int], silence: float, engine: Engine, once: bool) -> socket.socket | None:
    """None: nobody is there, and nobody is waited for."""
    told = False
    while True:
        _check_ranks(engine)
        try:
            return socket.create_connection(front, silence)
        except OSError as error:
            if once:
                return None
            if not told:
                _LOG.info("waiting for a front at %s:%d: %s", *front, error.strerror or error)
            told = True
            sleep(_AGAIN)


def _check_ranks(engine: Engine) -> None:
    if failure := getattr(engine.backend, "failure", None):
        raise PpsdError(failure)


def _watch_ranks(engine: Engine, line: Line, over: Event) -> None:
    """Also while nobody asks for anything: a lost rank ends this process, so that all are started again."""
    while not over.wait(_LOOK):
        if getattr(engine.backend, "failure", None):
            line.close()


class _Calls:
    """What the front has asked for on this connection."""

    def __init__(self, engine: Engine, line: Line, learned: Learned) -> None:
        self._engine, self._line, self._learned = engine, line, learned
        self._head: list[str] = []  # parts of one that comes
        self._running: dict[int, tuple[Cancellation, Thread]] = {}

    def take(self, message: Message) -> None:
        if message["kind"] == "recall":
            return self._learned.recall(message["ids"], message["owner"])
        if message["kind"] == "head":
            self._head.append(message["part"])
            if message["part"]:
                return None
            whole, self._head = "".join(self._head), []
            told = message["hash"], lambda: whole
            return start(Thread(target=self._learned.use, args=told, name="head", daemon=True))
        number = message["answer"]
        if message["kind"] == "cancel":
            if number in self._running:
                self._running[number][0].ask()
            return None
        cancellation = Cancellation()
        work = self._answer if message["kind"] == "begin" else self._logprobs
        thread = Thread(target=self._run, args=(work, number, message, cancellation), name=f"answer {number}")
        self._learned.begins()
        self._running[number] = cancellation, thread
        thread.start()
        return None

    def end_all(self) -> None:
        for cancellation, thread in list(self._running.values()):
            cancellation.ask()
            if not getattr(self._engine.backend, "failure", None):  # else it may wait for a rank that reads no more
                thread.join()

    def _run(
        self,
        work: Callable[[int, Message, Cancellation], None],
        number: int,
        message: Message,
        cancellation: Cancellation,
    ) -> None:
        try:
            work(number, message, cancellation)
        except EngineLost:
            pass
        except Exception as error:
            if getattr(self._engine.backend, "failure", None):
                return  # this process is about to end: the answer goes on elsewhere
            if not isinstance(error, PpsdError):
                _LOG.exception("an answer has failed")
                error = PpsdError("the engine has failed; its log says more")
            with suppress(EngineLost):
                self._line.send("failed", answer=number, error=type(error).__name__, message=str(error))
        finally:
            del self._running[number]
            self._learned.ended()

    def _answer(self, number: int, message: Message, cancellation: Cancellation) -> None:
        with closing(rounds_of(self._engine, ask_of(message["ask"]), cancellation)) as events:
            for event in events:
                if cancellation.asked:
                    break
                self._line.send("round" if isinstance(event, Round) else "drafted", answer=number, event=event)
        self._line.send("end", answer=number)

    def _logprobs(self, number: int, message: Message, cancellation: Cancellation) -> None:
        told: list[Any] = self._engine.backend.logprobs(message["ids"], message["top"])
        self._line.send("logprobs", answer=number, logprobs=told)
