"""Ranks meet at MASTER_ADDR:MASTER_PORT, a store of torch's, and connect: through which network, and by when.

gloo would listen on the address that the host's own name stands for, which is often the loopback's, or nobody's; and it
waits as long as its operations may take: here for ever.
"""

import os
import re
import socket
import struct
from collections.abc import Callable, MutableMapping
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
    choose_interface(world)
    listening = world.listening
    if listening is None and world.drafts and not world.hosted:
        listening = _listen(world)
    store = _in_time(
        attempt(lambda: _store(world, listening)), f"rank {world.rank} cannot meet the others at {_place(world)}"
    )
    through = os.environ.get(INTERFACE)
    network = f" through the network interface {through}" if through else ""
    return _in_time(
        attempt(lambda: open_groups(store, world.rank, world.size)),
        f"rank {world.rank} cannot connect to all other ranks{network}",
        f"; have all come, and does {INTERFACE} name the right interface? Their ports must not be blocked",
    )


def _in_time(work: Future[T], what: str, mend: str = "") -> T:
    if not wait([work], WAIT + 1).done:
        raise PpsdError(f"{what}: not within {WAIT:g} s{mend}")
    try:
        return work.result()
    except PpsdError:
        raise
    except Exception as error:  # of torch or gloo, with lines of their source
        said = re.sub(r"\[[^\]]*:\d+\] ", "", first_line(error))
        raise PpsdError(f"{what}: {said}{mend}") from None


def _store(world: World, listening: int | None) -> Any:
    """torch's, which ranks that are started again find empty. It waits for a rank 0, or agent, that comes later."""
    import torch.distributed as dist

    try:
        socket.getaddrinfo(world.host, world.port)
    except (socket.gaierror, UnicodeError) as error:
        if getattr(error, "errno", None) != socket.EAI_AGAIN:  # which torch waits for
            raise PpsdError(f"MASTER_ADDR is {world.host!r}, a host that nobody knows by that name here") from None
    if world.hosted:
        return next(dist.rendezvous("env://", world.rank, world.size, timeout=timedelta(seconds=WAIT)))[0]
    store = dist.TCPStore(
        world.host,
        world.port,
        is_master=world.drafts,
        timeout=timedelta(seconds=WAIT),
        wait_for_workers=False,
        master_listen_fd=listening,
    )
    if store.add(f"here/{world.rank}", 1) > 1:
        raise PpsdError(f"two processes are rank {world.rank}: give each process a RANK of its own")
    return store


def _place(world: World) -> str:
    return f"{world.host}:{world.port} (MASTER_ADDR, MASTER_PORT)"


def _listen(world: World) -> int:
    """A listening socket's number, for the store to keep. Ranks of one host alone are heard nowhere else."""
    host = world.host if world.local_size == world.size else ""
    both = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, world.port), family=family, dualstack_ipv6=both).detach()
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        raise PpsdError(
            f"rank 0 cannot listen at {_place(world)}: {reason}; another program or another rank 0 may have it: choose "
            "another port"
        ) from None


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


def choose_interface(world: World, environment: MutableMapping[str, str] = os.environ) -> None:
    """The loopback for ranks of one host; for those of several the interface through which rank 0 is reached. Unless
    the user has named one."""
    alone = world.local_size == world.size
    for host in ("127.0.0.1",) if alone else (environment.get("MASTER_ADDR", ""), _ELSEWHERE):
        address = address_towards(host)
        name = interface_of(address) if address and (alone or not address.startswith("127.")) else None
        if name and (alone or name != "lo"):
            environment.setdefault(INTERFACE, name)
            return


def address_towards(host: str) -> str | None:
    """This host's own address on the way to another, as the system's routes have it."""
    with suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), closing(socket.socket(family, kind, protocol)) as probe:
                probe.connect(target)  # of a datagram socket: nothing is sent
                return str(probe.getsockname()[0])
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has this address; None where Linux does not say."""
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        with suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as table:
            return next((line.split()[-1] for line in table if line.startswith(packed)), None)
        return None
    try:
        import fcntl
    except ImportError:
        return None
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                asked = fcntl.ioctl(probe, 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                if socket.inet_ntoa(asked[20:24]) == address:
                    return name
    return None
