"""How ranks find each other, or end with one line; ranks are threads here, and clocks go as the tests say."""

import json
import socket
import sys
import threading
from contextlib import contextmanager

import pytest
from eagle_support import write_eagle3
from rank_support import Clock
from torch.distributed import HashStore

from ppsd_rt.errors import PpsdError
from ppsd_rt.ranks import connect as connecting
from ppsd_rt.ranks import meeting
from ppsd_rt.ranks.connect import connect
from ppsd_rt.ranks.handshake import FIELDS, exchange
from ppsd_rt.ranks.launch import RankOptions, join
from ppsd_rt.ranks.meeting import QUIET, WAIT, Meeting, open_store
from ppsd_rt.ranks.world import World

FACTS = {field: f"some {field}" for field in FIELDS}


class Looked(Clock):
    """A clock that looking at it moves by `step` seconds."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def now(self):
        self.time += self.step
        return self.time


class Still(Clock):
    """A clock that stands: no limit is ever reached."""

    def sleep(self, seconds):
        threading.Event().wait(0.001)


def world(rank, size, port=0, host="127.0.0.1"):
    return World(rank, size, rank, size, host, port)


def count(store, rank, times=1):
    store.add(f"ppsd/here/{rank}", times)


def lines_of(size, take_part):
    """The line that each rank ends with."""
    lines = [""] * size

    def run(rank):
        try:
            take_part(rank)
        except PpsdError as error:
            lines[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return lines


@contextmanager
def free_port():
    """Held, but nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


# -- the meeting -------------------------------------------------------------------------------------------------------


def test_every_rank_raises_the_same_line():
    store = HashStore()

    def take_part(rank):
        exchange(Meeting(store, world(rank, 3), Still()), FACTS | ({"format": "bfloat16"} if rank == 1 else {}))

    lines = lines_of(3, take_part)
    assert set(lines) == {lines[0]}
    assert lines[0].startswith("rank 1 has format bfloat16")


def test_a_difference_does_not_wait_for_a_rank_that_is_late():
    store = HashStore()
    exchanged = [Meeting(store, world(rank, 3), Still()) for rank in range(2)]
    lines = lines_of(2, lambda rank: exchange(exchanged[rank], FACTS | {"WORLD_SIZE": str(3 - rank)}))
    assert set(lines) == {
        "rank 1 has WORLD_SIZE 2, rank 0 has 3: start all ranks with the same options, files and version"
    }


def test_ranks_that_do_not_come_are_named_by_all_that_did():
    store = HashStore()
    clocks = Clock(lambda: count(store, 2)), Still()
    here = [Meeting(store, world(rank, 4), clock) for rank, clock in zip((0, 2), clocks, strict=True)]
    lines = lines_of(2, lambda place: here[place].read("facts/3"))
    assert lines == [f"ranks 1 and 3 did not come within {WAIT:g} s: look at their own messages"] * 2


def test_a_rank_that_ends_in_its_start_is_named():
    store = HashStore()
    count(store, 1, 5)
    with pytest.raises(PpsdError, match=f"^rank 1 ended or hangs: nothing has been heard for {QUIET:g} s"):
        Meeting(store, world(0, 2), Clock()).read("facts/1")


def test_a_rank_that_takes_long_and_lives_is_waited_for():
    store, clock = HashStore(), Clock()

    def live():
        count(store, 1)
        if clock.time > 3 * WAIT:
            store.set("ppsd/facts/1", b"at last")

    clock.then = live
    assert Meeting(store, world(0, 2), clock).read("facts/1") == b"at last"


def test_a_rank_that_was_held_up_itself_accuses_nobody():
    store, clock = HashStore(), Clock()
    count(store, 1)
    jumps = iter([2.0, 1000.0, 2.0])

    def jump():
        clock.time += next(jumps, 0.0)
        if clock.time > 1010:
            store.set("ppsd/facts/1", b"here")

    clock.then = jump
    assert Meeting(store, world(0, 2), clock).read("facts/1") == b"here"


def test_two_processes_of_one_rank_end_all():
    store = HashStore()
    first = Meeting(store, world(1, 2), Still())
    for sit in (lambda: Meeting(store, world(1, 2), Still()), lambda: first.read("facts/0")):
        with pytest.raises(PpsdError, match="^two processes are rank 1: give each process a RANK of its own"):
            sit()


@pytest.mark.parametrize(("hosted", "who"), [(False, "rank 0"), (True, "torchrun's agent")])
def test_a_store_that_goes_is_one_line_at_once(hosted, who):
    class Gone:
        def add(self, key, amount):
            return 1

        def check(self, keys):
            raise RuntimeError("recv failed\nframe #0: c10::Error")

    with pytest.raises(PpsdError, match=f"^{who} has ended during the start, and with it the store[^\n]*$"):
        Meeting(Gone(), World(1, 2, 1, 2, hosted=hosted), Still()).read("facts/0")


# -- the way to the store ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "line"),
    [
        (socket.EAI_NONAME, "^MASTER_ADDR is 'host0', a host that nobody knows by that name here$"),
        (socket.EAI_AGAIN, f"^rank 0 did not come to host0:29500 .* within {WAIT:g} s: no answer$"),
    ],
    ids=["unknown", "no answer"],
)
def test_a_host_that_cannot_be_found(monkeypatch, number, line):
    def connection(*_):
        raise socket.gaierror(number, "no answer")

    monkeypatch.setattr(socket, "create_connection", connection)
    with pytest.raises(PpsdError, match=line):
        open_store(world(1, 2, 29500, "host0"), Clock())


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PpsdError) as caught:
        open_store(world(0, 2, taken.getsockname()[1]), Clock())
    assert "(MASTER_PORT; Address already in use), another program or another rank 0 has it" in str(caught.value)


def test_another_program_where_the_ranks_meet():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PpsdError) as caught:
        open_store(world(1, 2, silent.getsockname()[1]), Looked(WAIT / 3))
    assert "is no meeting point of ranks, another program listens there" in str(caught.value)


def test_ranks_that_are_started_again_meet_anew():
    """The agent's store keeps what the ranks before have left in it, and one may come before rank 0 has."""
    store = HashStore()
    first = meeting._attempt(store, world(0, 2), WAIT, Clock())
    assert meeting._attempt(store, world(1, 2), WAIT, Clock()) == first
    store.add(f"{first}/ppsd/here/1", 1)  # rank 1 has sat down there
    clock = Clock()
    clock.then = lambda: named or named.append(meeting._attempt(store, world(0, 2), WAIT, Clock()))
    named = []
    assert meeting._attempt(store, world(1, 2), WAIT, clock) == named[0] != first


# -- the whole start ---------------------------------------------------------------------------------------------------


@pytest.fixture
def start(folder):
    """start(changed, ranks, size, clock): the line of each rank that is started."""
    interval = sys.getswitchinterval()

    def start(changed=None, ranks=(0, 1), size=2, clock=Still):
        with free_port() as port:
            pass

        def take_part(place):
            rank = ranks[place]
            options = {"model": str(folder), "exit_head": "norm:1", **(changed or {}).get(rank, {})}
            join(world(rank, size, port), RankOptions(**options), clock())

        return lines_of(len(ranks), take_part)

    yield start
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"dtype": "float32"}, "rank 1 has format float32, rank 0 has int8: "),
        ({"exit_head": "norm:2"}, "rank 1 has exit head norm after layer 2"),
        ({"sizes": (1, 3)}, "rank 1 has stages 1,3, rank 0 has auto: "),
        ({"sizes": (1, 4)}, "rank 1: --stages 1,4 does not give 4 layers to 2 ranks"),
        ({"sizes": (0, 4)}, "rank 1: --stages 0,4 does not give 4 layers to 2 ranks"),
        ({"model": "/no/such/model"}, "rank 1: "),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_ranks_that_differ_end_with_the_same_line(start, changed, line):
    lines = start({1: changed})
    assert set(lines) == {lines[0]}
    assert lines[0].startswith(line)
    assert "\n" not in lines[0]


def test_a_split_that_cannot_be_ends_all(start):
    lines = start({rank: {"exit_head": "norm:3"} for rank in range(3)}, ranks=range(3), size=3)
    assert lines == ["rank 0: 1 layers after the exit head do not go to 2 ranks"] * 3


def test_what_an_eagle3_head_is_told_beside_its_tensors_must_be_the_same(start, tmp_path):
    """Stages know from it what they are to keep."""
    heads = [write_eagle3(tmp_path / str(rank)) for rank in range(2)]
    settings = json.loads((heads[1] / "config.json").read_text())
    (heads[1] / "config.json").write_text(json.dumps({**settings, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}))
    lines = start({rank: {"exit_head": str(head)} for rank, head in enumerate(heads)})
    assert set(lines) == {lines[0]}
    assert lines[0].startswith("rank 1 has exit head eagle3 after layer 0")


# -- connecting --------------------------------------------------------------------------------------------------------


def test_ranks_that_cannot_connect_all_say_so(monkeypatch):
    def refuse(store, rank, size):
        if rank == 1:
            raise RuntimeError("[/pytorch/gloo/pair.cc:81] connectFullMesh failed\nframe #0")
        threading.Event().wait()

    monkeypatch.setattr(connecting, "open_groups", refuse)
    store = HashStore()
    here = [Meeting(store, world(rank, 2), Still()) for rank in range(2)]
    lines = lines_of(2, lambda rank: connect(store, here[rank]))
    assert set(lines) == {lines[0]}
    assert lines[0].startswith("rank 1 cannot connect to all other ranks: connectFullMesh failed; GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize("lives", [True, False])
def test_connecting_that_does_not_end(monkeypatch, lives):
    """It is the network's fault, or that of a rank that has ended."""
    monkeypatch.setattr(connecting, "open_groups", lambda *_: threading.Event().wait())
    monkeypatch.setattr(meeting, "QUIET", 1000.0)
    store = HashStore()
    count(store, 1)
    clock = Clock(lambda: count(store, 1, lives))
    clock.sleep, slept = (lambda _: slept(5.0)), clock.sleep
    with pytest.raises(PpsdError) as caught:
        connect(store, Meeting(store, world(0, 2), clock))
    assert str(caught.value).startswith("rank 0 cannot connect" if lives else "rank 1 ended or hangs")
    assert ("not within 60 s" in str(caught.value)) == lives
