"""The engines of a front: who has come, who has room, who is lost."""

import hmac
import logging
import secrets
import socket
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from queue import SimpleQueue
from threading import Condition, Event, Lock, Thread
from typing import Any

from ..backend import Cancellation
from ..errors import PpsdError
from ..pipeline.rounds import Drafted, Logprob, Round
from ..ranks.threads import start
from .asks import Ask, EngineLost, Facts
from .wire import EVENTS, PART, Line, Message, error_of, facts_from, logprob_of, proof_of

_LOG = logging.getLogger(__name__)
_MOST_STRANGERS = 32  # connections that have not shown the key: with one more, the oldest is closed
_AGAIN = 0.1  # seconds until the next one is accepted, where the system has no more files


class Connected:
    """One engine, and an `EngineSlot` for each answer that runs on it."""

    def __init__(self, line: Line, facts: Facts, changed: Condition) -> None:
        """changed: with which it is told that `running` is less."""
        self.line, self.facts, self.running, self._changed = line, facts, 0, changed
        self._inboxes: dict[int, SimpleQueue[Any]] = {}
        self._lost: EngineLost | None = None
        self._number = 0

    def read(self) -> EngineLost:
        """Hands out what it says, until it is lost."""
        try:
            while True:
                message = self.line.read()
                inbox = self._inboxes.get(message["answer"])
                if inbox is not None:  # else nobody waits for it any more
                    inbox.put(message)
        except (EngineLost, KeyError, TypeError) as error:
            self.line.close()
            self._lost = lost = error if isinstance(error, EngineLost) else EngineLost("it sent what is no message")
            for inbox in list(self._inboxes.values()):
                inbox.put(lost)
            return lost

    def ask(self, kind: str, cancellation: Cancellation, **fields: object) -> Generator[Message, None, None]:
        """What comes of it, up to and without `end`."""
        self._number += 1
        number, inbox = self._number, SimpleQueue[Any]()
        self._inboxes[number] = inbox
        cancellation.tells(lambda: inbox.put(None))
        ended = False
        try:
            if self._lost is not None:
                raise EngineLost(*self._lost.args)
            self.line.send(kind, answer=number, **fields)
            while True:
                message = inbox.get()
                if message is None:  # who has asked wants no more
                    return
                if isinstance(message, EngineLost):
                    raise EngineLost(*message.args)
                ended = message["kind"] in ("end", "failed")
                if message["kind"] == "failed":
                    raise error_of(message)
                if ended:
                    return
                yield message
        finally:
            del self._inboxes[number]
            if not ended:
                with suppress(EngineLost):
                    self.line.send("cancel", answer=number)

    def events(self, ask: Ask, cancellation: Cancellation) -> Generator[Round | Drafted, None, None]:
        with closing(self.ask("begin", cancellation, ask=ask)) as messages:
            for message in messages:
                yield EVENTS[message["kind"]](message["event"])

    def logprobs(self, ids: list[int], top: int) -> list[Logprob]:
        with closing(self.ask("logprobs", Cancellation(), ids=ids, top=top)) as messages:
            message = next(messages)
        return [logprob_of(one) for one in message["logprobs"]]

    def leave(self) -> None:
        with self._changed:
            self.running -= 1
            self._changed.notify_all()


class Engines:
    """Engines come to `listener` with the key. silence: seconds after which one is lost that says nothing."""

    def __init__(
        self, listener: socket.socket, key: str, silence: float, on_silence: Callable[[], None] = lambda: None
    ) -> None:
        """on_silence: called when an engine is lost that may not know it."""
        self._listener, self._key, self._silence, self._on_silence = listener, key, silence, on_silence
        self._changed = Condition()
        self._engines: list[Connected] = []
        self._waiting: deque[object] = deque()
        self._facts: Facts | None = None  # of the first; later ones must give the same bits
        self._failure: str | None = None
        self._closed = Event()
        self._strangers: deque[Line] = deque()
        self._telling = Lock()  # an engine that comes hears of the last head last
        self._told: list[tuple[str, dict[str, object]]] = []
        start(Thread(target=self._accept, name="engines", daemon=True))

    @property
    def here(self) -> bool:
        """Is there one?"""
        return any(not engine.line.closed for engine in self._engines)

    def first(self) -> Facts:
        """Once an engine has come. PpsdError: none will."""
        with self._changed:
            self._changed.wait_for(lambda: self._facts is not None or self._failure is not None)
        if self._failure is not None:
            raise PpsdError(self._failure)
        assert self._facts is not None
        return self._facts

    def take(self, prompt: list[int], cancellation: Cancellation) -> Connected | None:
        ticket = object()
        cancellation.tells(self._wake)
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: cancellation.asked or self._failure or (self._waiting[0] is ticket and self._free())
                )
                if cancellation.asked:
                    return None
                if self._failure is not None:
                    raise PpsdError(self._failure)
                engine = self._free()
                assert engine is not None
                engine.running += 1
                return engine
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def tell(self, kind: str, **fields: object) -> None:
        with self._telling:
            self._told = [one for one in self._told if (one[0], kind) != ("head", "head")] + [(kind, fields)]
            with self._changed:
                lines = [engine.line for engine in self._engines]
            for line in lines:
                _tell(line, kind, fields)

    def fail(self, line: str) -> None:
        """No engine will come any more: answers that wait end with this line."""
        with self._changed:
            self._failure = line
            self._changed.notify_all()

    def close(self) -> None:
        self._closed.set()
        self.fail("the server is stopping")
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()
        with self._changed:
            for engine in self._engines:
                engine.line.close()

    def _free(self) -> Connected | None:
        """The one that does least."""
        here = [engine for engine in self._engines if not engine.line.closed]  # who reads it may not have noticed
        free = [engine for engine in here if engine.running < engine.facts.concurrency]
        return min(free, key=lambda engine: engine.running / engine.facts.concurrency, default=None)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if not self._closed.wait(_AGAIN):
                    _LOG.warning("no engine can come just now: %s", error.strerror or error)
                continue
            where = f"{address[0]}:{address[1]}"
            try:
                line = Line(connection, self._silence)
                with self._changed:
                    self._strangers.append(line)
                    others = [self._strangers.popleft() for _ in range(len(self._strangers) - _MOST_STRANGERS)]
                for other in others:
                    other.close()
                start(Thread(target=self._serve, args=(line, where), name=f"engine {where}", daemon=True))
            except (OSError, PpsdError) as error:  # it has gone already; no more threads
                _LOG.warning("who has come from %s is sent away: %s", where, error)
                connection.close()

    def _serve(self, line: Line, where: str) -> None:
        engine = None
        try:
            engine = self._let_in(line, where)
        except Exception as error:  # whatever a stranger sends
            _LOG.warning("what has come from %s is no engine: %s", where, error)
        with self._changed, suppress(ValueError):
            self._strangers.remove(line)
        if engine is None:
            line.release()
            return
        line.live()
        lost = engine.read()
        line.release()
        with self._changed:
            self._engines.remove(engine)
        if self._failure is None:
            _LOG.warning("the engine at %s is lost: %s", where, lost)
        if line.silent:
            self._on_silence()

    def _let_in(self, line: Line, where: str) -> Connected | None:
        """The engine, told what the others know; None where it may not come in."""
        nonce = secrets.token_hex(16)
        line.send("nonce", nonce=nonce)
        hello = line.first()
        proof = str(hello.get("proof")).encode(errors="replace")
        if hello["kind"] != "hello" or not hmac.compare_digest(proof, proof_of(self._key, nonce).encode()):
            _LOG.warning("an engine at %s brings another key: set PPSD_ENGINE_KEY to the same on both sides", where)
            return None
        engine = Connected(line, facts_from(hello["facts"]), self._changed)
        with self._telling:
            with self._changed:
                if self._failure is not None:
                    return None
                first = self._facts or engine.facts
                if first.bits != engine.facts.bits:
                    _LOG.warning(
                        "the engine at %s gives other bits (%s) than the first one did (%s)",
                        where,
                        engine.facts.bits,
                        first.bits,
                    )
                    return None
                self._facts = first
                self._engines.append(engine)
                self._changed.notify_all()
            for kind, fields in self._told:
                if kind != "head" or fields["hash"] != hello["head"]:  # which it has
                    _tell(line, kind, fields)
        _LOG.info("an engine has come from %s: %s %s", where, engine.facts.name, engine.facts.dtype)
        return engine


def _tell(line: Line, kind: str, fields: dict[str, Any]) -> None:
    """A head in parts, the last of which is empty."""
    with suppress(EngineLost):  # whoever reads it has heard
        if kind == "head":
            fields, whole = {"hash": fields["hash"]}, fields["head"]
            for begin in range(0, len(whole), PART):
                line.send(kind, part=whole[begin : begin + PART], **fields)
            fields["part"] = ""
        line.send(kind, **fields)
