"""Targets: what ranks hear from each other."""

import numpy as np
from hypothesis import strategies as st

from ppsd_rt import PpsdError, _native
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.ranks.control import _MAGIC, WORDS, Control, Kind, numbers_of, text_of
from ppsd_rt.ranks.handshake import FIELDS, difference, pack, unpack
from ppsd_rt.ranks.links import ProtocolError
from ppsd_rt.ranks.slices import slices_for
from ppsd_rt.ranks.world import World

from .mutations import damaged
from .oracle import check_line, judge
from .place import SHAPE, Place

FACTS = {field: f"some {field}" for field in FIELDS} | {"error": ""}


def handshake(place: Place, data: bytes) -> str:
    """The other rank's facts."""

    def use() -> None:
        if line := difference([FACTS, unpack(data)]):
            raise PpsdError(line)  # as the meeting does, on every rank

    return judge(place.case, use, (PpsdError,))


class _Group:
    """Of processes: everything that is sent has arrived, and nothing comes."""

    def send(self, tensors, peer, tag):
        return self

    def recv(self, tensors, peer, tag):
        return self

    def wait(self, timeout=None):
        return True


def control_message(kind: int, value: int, text: str) -> bytes:
    words = np.zeros(WORDS, np.int32)
    words[:2] = _MAGIC, kind
    words[2:4].view(np.int64)[0] = value
    raw = text.encode()[: 4 * (WORDS - 8)]
    words[8:].view(np.uint8)[: len(raw)] = np.frombuffer(raw, np.uint8)
    return words.tobytes()


def control_messages(place: Place) -> st.SearchStrategy[bytes]:
    values = st.sampled_from((0, 1, 120_001, 2**63 - 1, -(2**63)))
    kinds = st.sampled_from([*Kind, 0, 12, -1])
    good = st.builds(control_message, kinds, values, st.text(max_size=9) | st.just("rank 1 has died\n\x1b[31m"))
    return good.flatmap(lambda data: st.just(data) | damaged([data])).map(lambda data: data.ljust(256, b"\0")[:256])


def control(place: Place, data: bytes) -> str:
    """Both sides hear it: what is no message ends with a ProtocolError, and every end has its one line."""

    def use() -> None:
        for rank in (0, 1):
            ends = Control(_Group(), World(rank, 2, rank, 2), 4.0, 0.0)
            for kind in (Kind.COSTS, Kind.REPORT, Kind.EPOCH, Kind.MEASURE):
                ends.on(kind, lambda rank, value, message: (numbers_of(message), text_of(message)))
            try:
                ends._receivers[0]._take(np.frombuffer(data, np.int32).copy())
            except ProtocolError as error:
                ends.lost(1 - rank, error)
            if ends.failure is not None:
                check_line(ends.failure)

    return judge(place.case, use, ())


def wire_message(kind: int, epoch: int, start: int, count: int, limit: int, flags: int) -> bytes:
    """One of the pipeline's (csrc/pipeline/wire.h), of `count` rows."""
    hidden = SHAPE["hidden_size"]
    data = np.zeros(32 + count * hidden, np.int32)
    data[:2] = 0x50535000 + _native.WIRE_VERSION, kind
    data[2:4].view(np.int64)[0] = epoch
    data[4:8] = start, count, limit, flags
    data[16 : 16 + count] = 5
    data[32:].view(np.float32)[:] = 0.1
    return data.tobytes()


def wire_messages(place: Place) -> st.SearchStrategy[list[bytes]]:
    """The beginning of an answer and its first rows, as a drafting rank sends them; damaged."""
    most = 4 * _native.wire_words(SHAPE["hidden_size"])
    numbers = st.sampled_from((0, 1, 2, 15, 16, 17, 63, 64, 2**20, 2**31 - 1, -1, -(2**31)))
    epochs = st.sampled_from((0, 1, 2, 2**62, -1))
    odd = st.builds(
        lambda kind, epoch, start, limit, flags, rows, siblings, adopted, more: _set(
            wire_message(2, 1, 0, 1, 1, 0), kind, epoch, (start, rows, limit, flags), (siblings, adopted, more)
        ),
        st.integers(0, 4),
        epochs,
        numbers,
        numbers,
        numbers | st.integers(0, 15),
        numbers,
        numbers | st.just(0),
        numbers | st.just(0),
        numbers | st.just(0),
    )
    begin, rows = wire_message(1, 1, 0, 0, 40, 0), wire_message(2, 1, 0, 3, 16, 3)
    beside = _set(wire_message(2, 1, 3, 4, 4, 0), 2, 1, (3, 4, 4, 0), (3, 0, 0))  # two rows, each with a sibling
    adopting = _set(wire_message(2, 2, 4, 2, 4, 0), 2, 2, (4, 2, 4, 0), (1, 6, 0))
    biased = np.frombuffer(begin + bytes(16), np.int32).copy()  # a bias and two stop ids more
    biased[12], biased[16 + 12 : 16 + 15] = 4, (3, 1, 2)
    biased[32:36] = 7, 0, 8, 2**31 - 1
    good = [begin, rows, beside, adopting, biased.tobytes()]
    each = st.one_of(st.sampled_from(good), damaged(good), odd)
    return st.lists(each.map(lambda data: data[:most]), min_size=1, max_size=4) | st.just(good)


def _set(data: bytes, kind: int, epoch: int, header: tuple[int, ...], more: tuple[int, ...]) -> bytes:
    changed = np.frombuffer(data, np.int32).copy()
    changed[1] = kind
    changed[2:4].view(np.int64)[0] = epoch
    changed[4:8] = header
    changed[10:13] = more
    return changed.tobytes()


def wire(place: Place, messages: list[bytes]) -> str:
    """A verification stage gets them."""
    checkpoint = Checkpoint(place.model)
    layers, hidden = checkpoint.config.num_hidden_layers, checkpoint.config.hidden_size
    slices = slices_for("cpu", "cpu", ("float32", "auto"), 1, [], 1)

    def use() -> None:
        station = slices.station(checkpoint, 1, layers, 0.0)
        out = np.zeros((_native.WIRE_MESSAGES, _native.wire_words(hidden)), np.int32)
        try:
            for data in messages:
                station.post(np.frombuffer(data[: len(data) // 4 * 4], np.int32).copy())
                while station.work(out, 1) > 0:
                    pass
        finally:
            station.close()

    return judge(place.case, use, (RuntimeError, MemoryError))  # a begin that wants too many rows


TARGETS = {
    "handshake": (lambda place: damaged([pack(FACTS), pack({**FACTS, "error": "no such\nmodel"})]), handshake),
    "control": (control_messages, control),
    "wire": (wire_messages, wire),
}
