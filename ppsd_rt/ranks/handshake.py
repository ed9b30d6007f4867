"""Before ranks connect they compare what they are: texts of fixed length, through the store that torchrun provides.

Nothing is unpickled, and nobody waits for ever: a rank that does not come is named.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from ..errors import PpsdError

# Fields of a rank's facts, in this order. `error`: why this rank cannot take part; empty where it can.
FIELDS = (
    "error",
    "version",
    "wire",
    "model",
    "exit head",
    "backend",
    "format",
    "KV cache",
    "schedule",
    "parallel",
    "stages",
    "link delay",
    "kind of device",
)
_AS_ONE = "start all ranks with the same options, files and version"
_MENDS = {
    "kind of device": "they round differently, and the text would depend on what the split is measured to be; give it "
    "with --stages"
}
_BYTES = 192
SIZE = len(FIELDS) * _BYTES
WAIT = 60.0  # seconds for the others to come


def pack(facts: Mapping[str, str]) -> bytes:
    """Unknown to the receiver's Python: only bytes of UTF-8, each field filled up with zeros."""
    texts = [facts.get(field, "").encode()[:_BYTES] for field in FIELDS]
    return b"".join(text.ljust(_BYTES, b"\0") for text in texts)


def unpack(data: bytes) -> dict[str, str]:
    if len(data) != SIZE:
        return {"version": f"unknown ({len(data)} bytes of facts, not {SIZE})"}
    fields = [data[at : at + _BYTES].rstrip(b"\0").decode(errors="replace") for at in range(0, SIZE, _BYTES)]
    return dict(zip(FIELDS, fields, strict=True))


def difference(facts: Sequence[Mapping[str, str]]) -> str | None:
    """One line about the first rank that cannot take part or is not like rank 0; None: all is well."""
    for rank, its in enumerate(facts):
        if its.get("error"):
            return f"rank {rank}: {its['error']}"
    for rank, its in enumerate(facts):
        for field in FIELDS:
            if its.get(field) != facts[0].get(field):
                has, rank_0 = its.get(field) or "none", facts[0].get(field) or "none"
                return f"rank {rank} has {field} {has}, rank 0 has {rank_0}: {_MENDS.get(field, _AS_ONE)}"
    return None


def exchange(store: Any, rank: int, size: int, facts: Mapping[str, str], wait: float = WAIT) -> None:
    """Raises PpsdError with the same line on every rank."""
    store.set(f"ppsd/facts/{rank}", pack(facts))
    everyone = [unpack(read(store, f"ppsd/facts/{other}", other, wait)) for other in range(size)]
    line = difference(everyone)
    if line:
        store.set(f"ppsd/read/{rank}", b"1")
        if rank == 0:  # the store may live in this process: the others have read everything once they say so
            with suppress(PpsdError):
                for other in range(1, size):
                    read(store, f"ppsd/read/{other}", other, 5.0)
        raise PpsdError(line)


def read(store: Any, key: str, rank: int, wait: float) -> bytes:
    """What `rank` puts into the store, waiting for at most so many seconds."""
    end = monotonic() + wait
    try:
        while not store.check([key]):
            if monotonic() > end:
                raise PpsdError(f"rank {rank} did not come within {wait:g} s: look at its own messages")
            sleep(0.01)
        return bytes(store.get(key))
    except RuntimeError:  # the store's connection
        raise PpsdError(f"the store that the ranks meet in is gone while rank {rank} was awaited") from None
