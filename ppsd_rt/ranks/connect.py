"""Ranks meet at MASTER_ADDR:MASTER_PORT, a store of torch's, and connect by gloo: by which address, and by when.

Left to itself gloo would listen on the address that the host's own name stands for, which is often the loopback's, or
nobody's.
"""

import os
import re
import socket
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import closing, suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

from ..errors import PpsdError
from .links import open_groups
from .threads import start
from .world import World

WAIT = 60.0  # seconds for all to come, and to connect
INTERFACE = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"  # an address of documentation (RFC 5737): nothing is sent there

T = TypeVar("T")


def connect(world: World) -> dict[int, Any]:
    """The process groups of `open_groups`. Raises PpsdError."""
    import torch.distributed as dist  # which takes seconds, before the limit begins

    place = f"{world.host}:{world.port} (MASTER_ADDR, MASTER_PORT)"
    store = _in_time(lambda: _store(dist, world), f"rank {world.rank} cannot meet the others at {place}")
    named = os.environ.get(INTERFACE)
    address = None if named else own_address(world)
    way = f"the network interface {named}" if named else f"the address {address}" if address else "its own name"
    return _in_time(
        lambda: open_groups(store, world.rank, world.size, address, timedelta(seconds=WAIT)),
        f"rank {world.rank} cannot connect to all other ranks through {way}",
        f"; have all come, and does {INTERFACE} name the right interface? Their ports must not be blocked",
    )


def _in_time(work: Callable[[], T], what: str, mend: str = "") -> T:
    """The work's result. It has a thread, which Ctrl-C need not wait for, and a mute program may keep for ever."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:  # for whoever asks for the result
            future.set_exception(error)

    start(Thread(target=run, name="connect", daemon=True))
    if not wait([future], WAIT + 1).done:
        raise PpsdError(f"{what}: not within {WAIT:g} s{mend}")
    try:
        return future.result()
    except PpsdError:
        raise
    except Exception as error:  # of torch or gloo, with lines of their source
        raise PpsdError(f"{what}: {first_line(error)}{mend}") from None


def _store(dist: Any, world: World) -> Any:
    """torch's, which ranks that are started again find empty. It waits for a rank 0, or agent, that comes later."""
    try:
        socket.getaddrinfo(world.host, world.port)
    except (socket.gaierror, UnicodeError) as error:
        if getattr(error, "errno", None) != socket.EAI_AGAIN:  # which torch waits for
            raise PpsdError(f"MASTER_ADDR is {world.host!r}, a host that nobody knows by that name here") from None
    limit = timedelta(seconds=WAIT)
    if world.hosted:
        return next(dist.rendezvous("env://", world.rank, world.size, timeout=limit))[0]
    store = dist.TCPStore(
        world.host,
        world.port,
        is_master=world.drafts,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=world.listening,
    )
    if store.add(f"here/{world.rank}", 1) > 1:
        raise PpsdError(f"two processes are rank {world.rank}: give each process a RANK of its own")
    return store


def first_line(error: Exception) -> str:
    """The first line of what torch says, without the places and frames of C++ that it adds."""
    return re.sub(r"\[[^\]]*:\d+\] ", "", (str(error).strip().splitlines() or [type(error).__name__])[0])


def own_address(world: World) -> str | None:
    """The loopback's where all ranks are on this host; else this host's on the way to rank 0, as the system's routes
    have it. None: unknown."""
    if world.local_size == world.size:
        return "127.0.0.1"
    for host in (world.host, _ELSEWHERE):
        with suppress(OSError):
            for family, kind, *_, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
                with suppress(OSError), closing(socket.socket(family, kind)) as probe:
                    probe.connect(target)  # of a datagram socket: nothing is sent
                    address = socket.getnameinfo(probe.getsockname(), socket.NI_NUMERICHOST)[0]
                    if not address.startswith("127.") and address != "::1":
                        return address
    return None
