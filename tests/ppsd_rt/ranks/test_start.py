"""How ranks find each other, or end with one line; ranks are threads here, or processes of `--ranks`."""

import json
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from eagle_support import write_eagle3
from rank_support import Clock
from serve_support import HANG

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.cli.main import main
from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.ranks import connect as connecting
from ppsd_rt.ranks.connect import INTERFACE, connect
from ppsd_rt.ranks.launch import RankOptions, difference, join
from ppsd_rt.ranks.world import World, find_world, start_children


class Still(Clock):
    """A clock that stands: no limit is ever reached."""

    def sleep(self, seconds):
        threading.Event().wait(0.001)


@pytest.fixture
def no_time(monkeypatch):
    """The limit has passed when it is looked at."""
    monkeypatch.setattr(connecting, "WAIT", -1.0)


def world(rank, size, port=0, host="127.0.0.1"):
    return World(rank, size, rank, size, host, port)


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


# -- who a process is --------------------------------------------------------------------------------------------------


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


# -- the way to the store ----------------------------------------------------------------------------------------------


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PpsdError) as caught:
        connect(world(0, 2, taken.getsockname()[1]))
    assert str(caught.value).startswith("rank 0 cannot meet the others at 127.0.0.1:")
    assert "address already in use" in str(caught.value) and "\n" not in str(caught.value)


def test_another_program_where_the_ranks_meet(no_time):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PpsdError) as caught:
        connect(world(1, 2, silent.getsockname()[1]))
    assert str(caught.value).startswith("rank 1 cannot meet the others at 127.0.0.1:")


def test_a_host_that_nobody_knows(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(PpsdError, match="^MASTER_ADDR is 'host0', a host that nobody knows by that name here$"):
        connect(World(1, 2, 0, 1, "host0", 29500))


def test_a_rank_0_that_does_not_come(monkeypatch):
    monkeypatch.setattr(connecting, "WAIT", 0.01)
    with free_port() as port, pytest.raises(PpsdError) as caught:
        connect(world(1, 2, port))
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"rank 1 cannot meet the others at 127.0.0.1:{port} (MASTER_ADDR, MASTER_PORT)")


def test_two_processes_of_one_rank(monkeypatch):
    monkeypatch.setattr(connecting, "open_groups", lambda store, *_: store)
    with free_port() as port:
        pass
    stores = [connect(world(rank, 3, port)) for rank in range(2)]
    with pytest.raises(PpsdError, match="two processes are rank 1: give each process a RANK of its own"):
        connect(world(1, 3, port))
    del stores  # rank 0's listens until now


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
            join(world(rank, size, port), RankOptions(**options, silence=HANG), clock())

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


def test_devices_that_round_differently_need_a_split():
    """What is measured may split the model otherwise the next time."""
    line = difference([{"kind of device": "avx512"}, {"kind of device": "avx512"}, {"kind of device": "avx2"}])
    assert str(line).startswith("rank 2 has kind of device avx2, rank 0 has avx512: they round differently")
    assert str(line).endswith("give it with --stages")


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


def test_ranks_that_cannot_connect_say_so(monkeypatch):
    def refuse(*_):
        raise RuntimeError("[/pytorch/gloo/pair.cc:81] connectFullMesh failed\nframe #0")

    monkeypatch.setattr(connecting, "open_groups", refuse)
    with free_port() as port:
        pass
    with pytest.raises(PpsdError) as caught:
        connect(world(0, 2, port))
    assert str(caught.value).startswith(
        "rank 0 cannot connect to all other ranks through the address 127.0.0.1: connectFullMesh failed; have all"
    )
    assert INTERFACE in str(caught.value) and "\n" not in str(caught.value)


def test_connecting_that_does_not_end(monkeypatch, no_time):
    monkeypatch.setattr(connecting, "_store", lambda *_: None)
    monkeypatch.setattr(connecting, "open_groups", lambda *_: threading.Event().wait())
    with pytest.raises(PpsdError, match="rank 1 cannot .*: not within"):
        connect(world(1, 2, 1))


# -- ranks that one command starts -------------------------------------------------------------------------------------


def run(folder, *words, **options):
    command = [sys.executable, "-m", "ppsd_rt", "-m", str(folder), "--exit-head", "norm:1", "--threads", "1", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, **options)


@pytest.mark.slow
def test_ranks_of_one_command_answer_as_one_process(folder):
    done = run(folder, "--ranks", "3", "--raw", "--dtype", "int8", "-n", "20", "-q", "--schedule", "ppsd", "Once")
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="int8", threads=1)
    wanted = engine.generate("Once", SamplingParams(max_tokens=20), "plain").run().text
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, wanted.strip(), "")


@pytest.mark.slow
def test_what_ends_ranks_of_one_command_is_one_line(folder, tmp_path):
    """A rank that cannot work: here its copy of the model is another one."""
    done = run(folder, "--ranks", "2", "--kv-memory", "64k", "-n", "3000", "--raw", "Once")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("ppsd-run: ")


def test_nobody_can_take_the_port_of_ranks_before_they_meet(monkeypatch):
    monkeypatch.setattr("ppsd_rt.ranks.world.Child", lambda rank, argv, environment: environment["MASTER_PORT"])
    world, (port,) = start_children(2, [])
    assert port == str(world.port)
    with socket.socket(fileno=world.listening), pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", world.port))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "1", "x"], "--ranks is from 2 to 10000, not 1"),
        (["--ranks", "2", "--backend", "torch", "x"], "ranks run on CPUs"),
        (["--ranks", "2", "--stages", "3", "x"], "over 2 ranks there are 2 stages"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_before_a_rank_is_started(options, said, monkeypatch, capsys):
    monkeypatch.setattr("ppsd_rt.ranks.world.Child", lambda *_: pytest.fail("a rank was started"))
    assert main(options) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


def test_torchrun_has_started_the_ranks_already(monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": 3, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["--ranks", "2", "x"]) == 2
    assert "--ranks 2 in a world of 3 ranks" in capsys.readouterr().err
