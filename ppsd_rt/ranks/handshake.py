"""Before ranks connect they compare what they are: texts of fixed length; nothing is unpickled."""

from collections.abc import Mapping, Sequence

from .meeting import Meeting

# Fields of a rank's facts, in this order.
FIELDS = (
    "version",
    "wire",
    "WORLD_SIZE",
    "model",
    "exit head",
    "format",
    "KV cache",
    "schedule",
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
    """One line about the first rank that is not like rank 0; None: all is well."""
    for rank, its in enumerate(facts):
        for field in FIELDS:
            if its.get(field) != facts[0].get(field):
                has, rank_0 = its.get(field) or "none", facts[0].get(field) or "none"
                return f"rank {rank} has {field} {has}, rank 0 has {rank_0}: {_MENDS.get(field, _AS_ONE)}"
    return None


def exchange(meeting: Meeting, facts: Mapping[str, str]) -> None:
    """Raises PpsdError with the same line on every rank, as soon as one rank is known not to fit."""
    meeting.put(f"facts/{meeting.world.rank}", pack(facts))
    known: list[Mapping[str, str]] = []
    for rank in range(meeting.world.size):
        known.append(unpack(meeting.read(f"facts/{rank}")))
        if line := difference(known):
            meeting.fail(line)
