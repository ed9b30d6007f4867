"""The connections between all ranks: through which network, and by when.

gloo would listen on the address that the host's own name stands for, which is often the loopback's, or nobody's; and it
waits as long as its operations may take: here for ever.
"""

import os
import re
import socket
import struct
from collections.abc import MutableMapping
from concurrent.futures import wait
from contextlib import closing, suppress
from typing import Any

from .links import open_groups
from .meeting import WAIT, Meeting, attempt, ended_line, first_line
from .world import World

INTERFACE = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"  # an address of documentation (RFC 5737): nothing is sent there


def connect(store: Any, meeting: Meeting) -> dict[int, Any]:
    """The process groups of `open_groups`. Raises PpsdError, the same line on every rank."""
    world = meeting.world
    choose_interface(world)
    opening, begun = attempt(lambda: open_groups(store, world.rank, world.size)), meeting.clock.now()

    def ended() -> bool:
        if not wait([opening], 0.02).done and meeting.clock.now() - begun > WAIT:
            # A rank that has ended keeps all others from connecting.
            lost = meeting.silent(WAIT / 6)
            meeting.fail(ended_line(lost, WAIT / 6) if lost else _line(world, f"not within {WAIT:g} s"))
        return opening.done()

    meeting.wait(ended)
    try:
        groups: dict[int, Any] = opening.result()
    except Exception as error:  # of gloo; of the store
        meeting.fail(_line(world, re.sub(r"\[[^\]]*:\d+\] ", "", first_line(error))))  # without lines of gloo's source
    meeting.together("connected")
    return groups


def _line(world: World, reason: str) -> str:
    through = os.environ.get(INTERFACE)
    network = f" through the network interface {through}" if through else ""
    return (
        f"rank {world.rank} cannot connect to all other ranks{network}: {reason}; "
        f"{INTERFACE} names another interface, and their ports must not be blocked"
    )


def choose_interface(world: World, environment: MutableMapping[str, str] = os.environ) -> None:
    """For ranks on several hosts: the interface through which rank 0 is reached, unless the user has named one."""
    if world.local_size == world.size or INTERFACE in environment:
        return
    for host in (environment.get("MASTER_ADDR", ""), _ELSEWHERE):
        address = address_towards(host)
        name = interface_of(address) if address and not address.startswith("127.") else None
        if name and name != "lo":
            environment[INTERFACE] = name
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
