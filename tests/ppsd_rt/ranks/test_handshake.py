"""What ranks compare before they connect, and the environment that says who they are."""

import pytest

from ppsd_rt.errors import UsageError
from ppsd_rt.ranks.handshake import _AS_ONE, difference
from ppsd_rt.ranks.world import World, find_world

FIELDS = ("version", "model", "kind of device")
FACTS = {field: f"some {field}" for field in FIELDS}


@pytest.mark.parametrize("field", ["version", "model"])
def test_any_difference_is_named_with_its_rank(field):
    line = difference([FACTS, FACTS, FACTS | {field: "x" * 1000}])
    assert line == f"rank 2 has {field} {'x' * 200}, rank 0 has some {field}: {_AS_ONE}"
    assert difference([FACTS, FACTS]) is None
    assert str(difference([FACTS, {}])).startswith("rank 1 has version none, rank 0 has some version: ")


def test_devices_that_round_differently_need_a_split():
    """What is measured may split the model otherwise the next time."""
    line = difference([FACTS | {"kind of device": "avx512"}, FACTS | {"kind of device": "avx2"}])
    assert line
    assert line.startswith("rank 1 has kind of device avx2, rank 0 has avx512: they round differently")
    assert line.endswith("give it with --stages")


RANKED = {
    "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host0",
    "MASTER_PORT": "29511",
}  # fmt: skip


def test_the_world_is_what_torchrun_says():
    assert find_world({}) is None
    assert find_world({"WORLD_SIZE": "1", "RANK": "0"}) is None
    assert find_world(RANKED) == World(3, 4, 1, 2, "host0", 29511)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "fe80::1%eth0"}
    assert find_world(RANKED | agent) == World(3, 4, 1, 2, "fe80::1%eth0", 29511, hosted=True)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("WORLD_SIZE", ["two", "0", "-1", "", "9" * 5000, "1e3", "\n2", "２"]),
        ("RANK", [None, "4", "-1", "first", ""]),
        ("LOCAL_RANK", ["2", "x"]),
        ("LOCAL_WORLD_SIZE", ["0", "5", "x"]),
        ("MASTER_ADDR", [None, "", "a b", "host\nname", "x" * 300]),
        ("MASTER_PORT", [None, "0", "65536", "-1", "29500x", "9" * 5000]),
    ],
)
def test_an_environment_that_makes_no_sense_is_one_line(name, values):
    for value in values:
        with pytest.raises(UsageError) as caught:
            find_world({key: given for key, given in (RANKED | {name: value}).items() if given is not None})
        line = str(caught.value)
        assert line.startswith(f"{name} is {'not set' if value is None else ascii(value[:40])}; it is "), line
        assert "start ranks with torchrun" in line
        assert line.isprintable()
        assert len(line) < 200
