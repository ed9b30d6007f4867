"""Where ranks meet before they connect: a store of torch's at MASTER_ADDR:MASTER_PORT, of texts and counters.

Nobody waits for ever, and all end alike. Every rank counts up a number of its own in the store while it starts, so
that the others see whether it has come and whether it still lives, however long it loads; the first line about a
failure stays in the store, and every rank that has come raises it.
"""

import os
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any, NoReturn, TypeVar

from ..errors import PpsdError
from .threads import CLOCK, Clock, start
from .world import World

WAIT = 60.0  # seconds for the others to come
QUIET = 30.0  # seconds without a sign of life of a rank that has come
_BEAT = 1.0  # seconds between signs of life
_POLL = 0.02  # seconds between two looks
_ATTEMPT = "ppsd/attempt"  # in the store: its newest name
_FAILED = "ppsd/failed"  # in the store: the line with which every rank ends

T = TypeVar("T")


def open_store(world: World, clock: Clock = CLOCK) -> Any:
    """torch's store. Raises PpsdError: nobody listens, another program does, or this rank is to listen and cannot."""
    from torch.distributed import PrefixStore, TCPStore

    def store(listening: int | None = None) -> Any:
        return TCPStore(
            world.host,
            world.port,
            is_master=listening is not None,
            timeout=timedelta(seconds=WAIT),
            wait_for_workers=False,
            master_listen_fd=listening,
        )

    end = clock.now() + WAIT
    listening = None if world.hosted or not world.drafts else _listen(world)
    while not _answers(world, end, clock):
        clock.sleep(0.2)
    opening = attempt(lambda: store(listening))  # it waits for ever for a program that says nothing, or nonsense
    while not wait([opening], 0.2).done:
        if clock.now() > end:
            raise PpsdError(f"{_place(world)} is no meeting point of ranks, another program listens there: {_OTHER}")
    try:
        opened = opening.result()
        return PrefixStore(_attempt(opened, world, end, clock), opened) if world.hosted else opened
    except RuntimeError as error:  # of torch
        raise PpsdError(f"rank {world.rank} cannot meet the others at {_place(world)}: {first_line(error)}") from None


def _attempt(store: Any, world: World, end: float, clock: Clock) -> str:
    """What all keys of these ranks begin with. The store of torchrun's agent keeps those of ranks that it has started
    before: rank 0 names every attempt anew, and another rank joins the one in which nobody has its seat.
    """
    if world.drafts:
        store.set(_ATTEMPT, secrets.token_hex(8))
        return str(store.get(_ATTEMPT).decode())
    while True:
        if store.check([_ATTEMPT]):
            attempt = store.get(_ATTEMPT).decode()
            if not store.add(f"{attempt}/{_seat(world.rank)}", 0) or clock.now() > end:
                return str(attempt)
        elif clock.now() > end:
            raise PpsdError(f"rank 0 did not come to {_place(world)} within {WAIT:g} s")
        clock.sleep(_POLL)


_OTHER = "choose another port"


def _place(world: World) -> str:
    return f"{world.host}:{world.port} (MASTER_ADDR, MASTER_PORT)"


def _listen(world: World) -> int:
    """A listening socket's number, for the store to keep."""
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", world.port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both
        ).detach()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise PpsdError(
            f"rank 0 cannot listen on port {world.port} (MASTER_PORT; {reason}), another program or another rank 0 has "
            f"it: {_OTHER}"
        ) from None


def _answers(world: World, end: float, clock: Clock) -> bool:
    """Does anybody listen where the ranks meet? Raises PpsdError where that can never be, or is too late."""
    try:
        with closing(socket.create_connection((world.host, world.port), max(end - clock.now(), 1.0))):
            return True
    except (socket.gaierror, UnicodeError) as error:
        if isinstance(error, UnicodeError) or error.errno != socket.EAI_AGAIN:
            raise PpsdError(f"MASTER_ADDR is {world.host!r}, a host that nobody knows by that name here") from None
        reason = error.strerror
    except OSError as error:
        reason = error.strerror or "nothing comes back"
    if clock.now() > end:
        who = "torchrun's agent" if world.hosted else "rank 0"
        raise PpsdError(f"{who} did not come to {_place(world)} within {WAIT:g} s: {reason}")
    return False


def attempt(work: Callable[[], T]) -> Future[T]:
    """Something that may take for ever, in a thread that nobody has to wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # for whoever asks for the result
            future.set_exception(error)

    start(Thread(target=run, name="attempt", daemon=True))
    return future


def first_line(error: Exception) -> str:
    """Without the frames of C++ that torch adds."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Meeting:
    """One rank's seat. Every method but close() raises PpsdError with the line that all ranks raise."""

    def __init__(self, store: Any, world: World, clock: Clock = CLOCK) -> None:
        self.world, self.clock, self._store, self._over = world, clock, store, Event()
        self._began = clock.now()
        self._heard = {rank: (0, self._began) for rank in range(world.size) if rank != world.rank}  # number, since when
        self._looked = self._began
        if self._ask(lambda: store.add(_seat(world.rank), 1)) > 1:
            self.fail(
                f"two processes are rank {world.rank}: give each process a RANK of its own, or start with torchrun"
            )
        self._beating = Thread(target=self._beat, name="meeting", daemon=True)
        start(self._beating)

    def _beat(self) -> None:
        with suppress(RuntimeError):  # the store is gone, which whoever waits sees too
            while not self._over.wait(_BEAT):
                self._store.add(_seat(self.world.rank), 1)

    def put(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(f"ppsd/{key}", value))

    def read(self, key: str) -> bytes:
        """What a rank puts there, however long that takes, as long as all live."""
        self.wait(lambda: self._has(f"ppsd/{key}"))
        return self._ask(lambda: bytes(self._store.get(f"ppsd/{key}")))

    def wait(self, done: Callable[[], bool]) -> None:
        """Until it is, while every rank comes and lives, and none fails."""
        while not done():
            self.look()
            self.clock.sleep(_POLL)

    def together(self, what: str) -> None:
        """All ranks have come to this point."""
        self.put(f"{what}/{self.world.rank}", b"1")
        for rank in range(self.world.size):
            self.read(f"{what}/{rank}")

    def look(self) -> None:
        """Raises the line of a rank that has failed, or about ranks that are missed."""
        if self._has(_FAILED):
            self.fail("")
        now = self.clock.now()
        if now - self._looked < _BEAT:
            return
        if now - self._looked > QUIET / 2:  # this process itself was held up
            self._heard = {rank: (number, now) for rank, (number, _) in self._heard.items()}
        self._looked = now
        for rank, (number, _) in self._heard.items():
            if (counted := self._count(rank)) != number:
                self._heard[rank] = counted, now
        absent = [rank for rank, (number, _) in self._heard.items() if not number]
        if absent and now - self._began > WAIT:
            self.fail(f"{_names(absent)} did not come within {WAIT:g} s: look at their own messages")
        if lost := self.silent(QUIET):
            self.fail(ended_line(lost, QUIET))

    def silent(self, seconds: float) -> list[int]:
        """Ranks that have come, and nothing was heard of since."""
        now = self.clock.now()
        return [rank for rank, (number, since) in self._heard.items() if number and now - since > seconds]

    def fail(self, line: str) -> NoReturn:
        """The first line counts, on all ranks."""
        said = self._ask(lambda: bytes(self._store.compare_set(_FAILED, "", line)))
        self._leave()
        raise PpsdError(said.decode(errors="replace"))

    def close(self) -> None:
        """No more signs of life: all ranks are connected."""
        self._over.set()

    def _leave(self) -> None:
        """The store may live in this process: whoever has come reads the line first, or is as good as gone."""
        self.close()
        with suppress(RuntimeError):
            self._store.set(f"ppsd/left/{self.world.rank}", b"1")
            if self.world.hosted or not self.world.drafts:
                return
            end = self.clock.now() + QUIET
            for rank in self._heard.keys() - self.silent(QUIET / 2):
                while not self._store.check([f"ppsd/left/{rank}"]):
                    if not self._store.add(_seat(rank), 0) or self.clock.now() > end:
                        break
                    self.clock.sleep(_POLL)

    def _count(self, rank: int) -> int:
        return self._ask(lambda: int(self._store.add(_seat(rank), 0)))

    def _has(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.check([key])))

    def _ask(self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError:  # its connection has closed
            keeper = "torchrun's agent has" if self.world.hosted else "rank 0 has"
            raise PpsdError(
                f"{keeper} ended during the start, and with it the store that the ranks meet in: see its own message"
            ) from None


def _seat(rank: int) -> str:
    return f"ppsd/here/{rank}"


def ended_line(ranks: list[int], seconds: float) -> str:
    return f"{_names(ranks)} ended or hangs: nothing has been heard for {seconds:g} s; look at their own messages"


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"
