"""Real processes over gloo: exact answers, and an end with one line when a rank is another one, dies or hangs."""

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import slow, write_model

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RANKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("ranks") / "model", num_hidden_layers=4, max_position_embeddings=512)


@pytest.fixture
def kill_ranks(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module("kill_ranks")
    sys.modules.pop("kill_ranks", None)


def options(folder):
    return ["-m", str(folder), "--exit-head", "norm:1", "--raw"]


@pytest.mark.parametrize(
    "machine", [["--dtype", "int8"], slow(["--dtype", "int4"]), slow(["--backend", "torch"])], ids=" ".join
)
def test_check_over_ranks_finds_no_difference(folder, tmp_path, machine):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "Once upon a time"}\n{"id": "b", "prompt": "Once upon a hill"}\n')
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*ranks, "-m", "ppsd_rt", "check", *options(folder), "--prompts", str(prompts), "-n", "24", "--json"]
    command += ["--schedules", "eesd/ppsd/elastic/auto", "--sampling", "greedy,penalty", "--stages", "1,2,1", *machine]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["differences"] == []
    assert report["answers"] == 2 * 2 * 5  # plain over ranks too, against plain in one process
    assert {row["schedule"] for row in report["rows"]} >= {"plain", "plain over ranks", "ppsd", "auto"}


def test_ranks_that_differ_end_with_the_same_line(folder, tmp_path, kill_ranks):
    running = kill_ranks.Ranks(RANKS, [*options(folder), "hello"], tmp_path, {2: ["--dtype", "float32"]})
    try:
        assert running.wait(60) == [1] * RANKS
    finally:
        running.close()
    lines = running.lines()
    assert len(set(lines)) == 1
    assert lines[0].startswith("ppsd-run: rank 2 has format float32, rank 0 has int8")
    assert running.output() == ""


def test_ranks_of_other_backends_end_with_the_same_line(folder, tmp_path, kill_ranks):
    running = kill_ranks.Ranks(2, [*options(folder), "hello"], tmp_path, {1: ["--backend", "torch"]})
    try:
        assert running.wait(60) == [1] * 2
    finally:
        running.close()
    assert all(line.startswith("ppsd-run: rank 1 has backend torch, rank 0 has cpu") for line in running.lines()), (
        running.lines()
    )


def test_a_rank_without_the_model_tells_the_others(folder, tmp_path, kill_ranks):
    running = kill_ranks.Ranks(2, [*options(folder), "hello"], tmp_path, {1: ["-m", str(tmp_path / "nothing")]})
    try:
        assert all(running.wait(60))
    finally:
        running.close()
    assert all("rank 1: " in line and "nothing" in line for line in running.lines())


@pytest.mark.parametrize("victim", [slow(0), 1, *map(slow, range(2, RANKS))])
def test_a_rank_that_is_killed_is_named_by_all_others(folder, tmp_path, kill_ranks, victim):
    command = [*options(folder), "-n", "400", "--link-ms", "3", "--schedule", "elastic", "Once upon a time"]
    answer = one_process(folder)
    kill = kill_ranks.kill_once(RANKS, command, tmp_path, answer, victim, 0.2, signal.SIGKILL)
    assert not kill_ranks.bad(kill), kill
    assert kill.seconds < 5
    assert 0 < kill.whole < len(answer)


@pytest.mark.slow
def test_a_rank_that_falls_silent_is_named_too(folder, tmp_path, kill_ranks):
    command = [*options(folder), "-n", "400", "--link-ms", "3", "--rank-timeout", "1.5", "Once upon a time"]
    kill = kill_ranks.kill_once(RANKS, command, tmp_path, one_process(folder), 1, 0.1, signal.SIGSTOP)
    assert not kill_ranks.bad(kill), kill
    assert 1 < kill.seconds < 5
    assert "silent for 1.5 s" in kill.lines[0]


def one_process(folder):
    """What the ranks would have answered."""
    command = [
        sys.executable,
        "-m",
        "ppsd_rt",
        *options(folder),
        "-n",
        "400",
        "--schedule",
        "plain",
        "Once upon a time",
    ]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return done.stdout.rstrip("\n")
