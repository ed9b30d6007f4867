"""The server as a process: a socket, signals, and an end in order."""

import asyncio
import logging
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from types import FrameType

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..engine import Engine
from ..errors import PpsdError
from .app import make_app
from .service import Service
from .settings import Settings

_LOG = logging.getLogger(__name__)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SPARE = 5  # seconds
_ENDS = 0.5
_MOST_HEAD = 1 << 16  # bytes of a request before its body
_LAST_WORDS = 10  # seconds after the grace: then connections that are still open are cut


class _Connection(HttpToolsProtocol):
    """uvicorn waits for ever for the end of a request's head, and holds all of it: before any key is asked for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head, self._waiting = 0, self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._head = 0 if self._waiting.cancelled() else self._head + len(data)
        if self._head > _MOST_HEAD and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        self._waiting.cancel()
        self._waiting = self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._waiting.cancel()
        super().on_headers_complete()

    def _wait(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.timeout_keep_alive, self.transport.close)


class Server(uvicorn.Server):
    """The first signal ends it in order, a second one at once."""

    def __init__(self, service: Service) -> None:
        config = uvicorn.Config(
            make_app(service),
            headers=[("Keep-Alive", f"timeout={ceil(service.settings.keep_alive)}")],
            log_config=None,
            access_log=False,
            log_level=logging.WARNING,
            lifespan="off",
            server_header=False,
            http=_Connection,
            # Later than it says: a client that keeps to what it is told never sends into a connection that closes.
            timeout_keep_alive=ceil(service.settings.keep_alive) + _SPARE,
            timeout_graceful_shutdown=ceil(service.settings.grace) + _LAST_WORDS,
        )
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Without uvicorn's own way, which raises each signal again at the end: this end was asked for, and is no
        failure."""
        if threading.current_thread() is not threading.main_thread():  # which alone hears of signals
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        admission, log = self._service.admission, self._service.settings.log
        admission.stopping = True
        if count := admission.waiting + admission.running:
            answers = "1 answer has" if count == 1 else f"{count} answers have"
            _LOG.info("%s %g s; Ctrl-C again ends it now", answers, self._service.settings.grace)
        log("stopping", waiting=admission.waiting, running=admission.running)
        ending = asyncio.create_task(self._service.end_after_grace())
        await super().shutdown(sockets)
        ending.cancel()
        self._service.end_all()  # after a second signal: what still runs says why it ends
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=_ENDS)
        log("stopped")


def listen(host: str, port: int) -> socket.socket:
    """PpsdError where the address cannot be had. Port 0: any that is free."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        why = f"cannot listen on {host} port {port}: {error.strerror or error}"
        raise PpsdError(f"{why}; choose another --port or --host") from None
    return listener


def allow_connections() -> None:
    """As many as the system lets this process have: each is a file to it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(engine: Engine, settings: Settings, listener: socket.socket) -> None:
    """Until a signal ends it."""
    Server(Service(engine, settings)).run(sockets=[listener])
