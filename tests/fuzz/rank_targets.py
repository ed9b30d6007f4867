"""Targets: what ranks hear from each other."""

import json

import numpy as np
from hypothesis import strategies as st

from ppsd_rt import _native
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.ranks.control import Control, Kind
from ppsd_rt.ranks.links import ProtocolError
from ppsd_rt.ranks.slices import CpuSlices
from ppsd_rt.ranks.world import World

from .mutations import damaged
from .oracle import check_line, judge
from .place import SHAPE, Place


class _Group:
    """Of processes: everything that is sent has arrived, and nothing comes."""

    def send(self, tensors, peer, tag):
        return self

    def recv(self, tensors, peer, tag):
        return self

    def wait(self, timeout=None):
        return True


def control_message(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text.ljust(-(-len(text) // 4) * 4)


def control_messages(place: Place) -> st.SearchStrategy[bytes]:
    facts = {"version": "1", "model": "no such\nmodel"}
    values = st.sampled_from((None, 1, "rank 1 has died\n\x1b[31m", facts, [[1, 2]])) | st.text(max_size=9)
    kinds = st.sampled_from([*Kind, 0, 12, -1])
    good = st.builds(lambda kind, value: control_message(json.dumps([kind, value]).encode()), kinds, values)
    return good.flatmap(lambda data: st.just(data) | damaged([data])).map(lambda data: data.ljust(256, b"\0")[:256])


def control(place: Place, data: bytes) -> str:
    """Both sides hear it: what is no message ends with a ProtocolError, and every end has its one line."""

    def use() -> None:
        for rank in (0, 1):
            ends = Control(_Group(), World(rank, 2, rank, 2), 4.0)
            try:
                ends._receivers[0]._take(np.frombuffer(data, np.int32).copy())
            except ProtocolError as error:
                ends.lost(1 - rank, error)
            if ends.failure is not None:
                check_line(ends.failure)

    return judge(place.case, use, ())


def wire_message(
    number: int,
    parts: list[tuple[int, ...]],
    opens: bool = False,
    limit: int = 0,
    flags: int = 0,
    taps: int = 0,
) -> bytes:
    """A pass (csrc/stages/pass.h); parts: answer, epoch, start, rows, chooses. opens: the first answer begins.
    taps: that rows bring."""
    hidden, tables = SHAPE["hidden_size"], [0, 0, 0, int(opens)]
    if opens:
        filters = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0], np.float32).view(np.int32)  # from the temperature on
        tables += [parts[0][0], 200, 0, 0, 0, -1, 0, 0, 0, *filters.tolist(), 0, 0]
    tables.append(len(parts))
    for answer, epoch, start, rows, chooses in parts:
        blocks = range((start + rows + 63) // 64)
        tables += [answer, epoch, start, rows, chooses, start, rows, *([5] * rows), len(blocks), *blocks]
    count = sum(part[3] for part in parts)
    header = np.zeros(16, np.int32)
    header[:2] = 0x50535000 + _native.WIRE_VERSION, 1
    header[2:4].view(np.int64)[0] = number
    header[4:8] = limit, count, len(tables), flags
    rows_of_pass = np.full(count * hidden * (1 + taps), 0.1, np.float32)
    return header.tobytes() + np.array(tables, np.int32).tobytes() + rows_of_pass.tobytes()


def wire_messages(place: Place, taps: int = 0) -> st.SearchStrategy[list[bytes]]:
    """Passes of an answer that begins and drafts, as rank 0 sends them; damaged."""
    numbers = st.sampled_from((0, 1, 2, 15, 16, 17, 63, 64, 2**20, 2**31 - 1, -1, -(2**31)))
    part = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 130), st.integers(0, 5), st.integers(0, 5))
    parts = st.lists(part, min_size=1, max_size=3)
    odd = st.builds(wire_message, st.integers(0, 9), parts, st.booleans(), numbers, numbers, st.integers(0, taps))
    good = [
        wire_message(1, [(1, 0, 0, 3, 1)], opens=True, taps=taps),
        wire_message(2, [(1, 0, 3, 1, 1)], limit=4, taps=taps),
        wire_message(3, [(1, 0, 4, 1, 1)], limit=4, taps=taps),
        wire_message(4, [(1, 1, 4, 2, 2)], limit=4, taps=taps),
        wire_message(5, [(1, 1, 6, 2, 2)], taps=taps),
        wire_message(6, [(1, 2, 7, 1, 1)], taps=taps),
    ]
    each = st.one_of(st.sampled_from(good), damaged(good), odd)
    return st.lists(each, min_size=1, max_size=4) | st.just(good)


def wire(place: Place, messages: list[bytes], taps: tuple[int, ...] = ()) -> str:
    """A verification stage gets them. taps: of an EAGLE-3 head."""
    checkpoint = Checkpoint(place.model)
    layers, hidden = checkpoint.config.num_hidden_layers, checkpoint.config.hidden_size
    slices = CpuSlices(checkpoint, "float32", "auto", 1, [], kv_memory="1M")

    def use() -> None:
        station = slices.station(1, layers, taps)
        out = np.zeros(_native.pass_words(hidden, len(taps)), np.int32)
        try:
            for data in messages:
                station.post(np.frombuffer(data[: len(data) // 4 * 4], np.int32).copy())
                while station.work(out, 1) > 0:
                    pass
        finally:
            station.close()

    return judge(place.case, use, (RuntimeError, MemoryError))  # an answer that wants too many rows


TARGETS = {
    "control": (control_messages, control),
    "wire": (wire_messages, wire),
    "wire with taps": (lambda place: wire_messages(place, 1), lambda place, messages: wire(place, messages, (1, 2))),
}
