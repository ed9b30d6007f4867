"""What ranks compare before they connect."""

import threading

import pytest

from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.ranks.handshake import FIELDS, difference, exchange, pack, unpack
from ppsd_rt.ranks.world import World, find_world

FACTS = {field: f"some {field}" for field in FIELDS} | {"error": ""}


class Store:
    """What of torch's stores is used."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value

    def check(self, keys):
        return all(key in self.values for key in keys)

    def get(self, key):
        return self.values[key]


def test_facts_survive_packing():
    assert unpack(pack(FACTS)) == FACTS
    assert unpack(pack({"model": "ä" * 300}))["model"].startswith("ä" * 90)  # cut, and still text
    assert "unknown" in unpack(b"\x80\x04 a pickle")["version"]


@pytest.mark.parametrize("field", FIELDS[1:])
def test_any_difference_is_named_with_its_rank(field):
    line = difference([FACTS, FACTS, FACTS | {field: "other"}])
    assert line
    assert line.startswith(f"rank 2 has {field} other, rank 0 has some {field}")
    assert difference([FACTS, FACTS]) is None


def test_devices_that_round_differently_need_a_split():
    """What is measured may split the model otherwise the next time."""
    line = difference([FACTS | {"kind of device": "avx512"}, FACTS | {"kind of device": "avx2"}])
    assert line
    assert line.startswith("rank 1 has kind of device avx2, rank 0 has avx512: they round differently")
    assert line.endswith("give it with --stages")


def test_a_rank_that_cannot_take_part_says_why():
    line = difference([FACTS, {"error": "no such model"}, FACTS | {"model": "other"}])
    assert line == "rank 1: no such model"


def test_every_rank_raises_the_same_line():
    store, lines = Store(), []

    def take_part(rank):
        with pytest.raises(PpsdError) as caught:
            exchange(store, rank, 3, FACTS | ({"format": "bfloat16"} if rank == 1 else {}), wait=5)
        lines.append(str(caught.value))

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert "rank 1 has format bfloat16" in lines[0]


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(PpsdError, match="rank 1 did not come within 0.05 s"):
        exchange(Store(), 0, 2, FACTS, wait=0.05)


def test_the_world_is_what_torchrun_says():
    assert find_world({}) is None
    assert find_world({"WORLD_SIZE": "1", "RANK": "0"}) is None
    names = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert find_world(names) == World(3, 4, 1, 2)
    with pytest.raises(UsageError, match="start ranks with torchrun"):
        find_world({"WORLD_SIZE": "4"})
