"""Real processes that are killed, stopped and cut off under load, by benchmarks/lose_engines.py in short."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import write_model

from ppsd_rt.cli import main as cli
from ppsd_rt.front.child import Child

SCRIPT = Path(__file__).parents[3] / "benchmarks/lose_engines.py"


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["process", "ranks"])
def test_no_fault_takes_or_changes_an_answer(tmp_path, setup):
    folder = write_model(tmp_path / "model", num_hidden_layers=4, max_position_embeddings=1024)
    command = [sys.executable, SCRIPT, "-m", folder, "--exit-head", "norm:1", "--setups", setup]
    command += ["--faults", "4", "--clients", "2", "--tokens", "400"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads(done.stdout)[setup]
    assert sum(report["faults"].values()) == 4
    assert report["answers"] > 0
    assert report["lost"] == report["different"] == []


def test_a_child_is_started_again_so_many_times_and_no_more(monkeypatch):
    """The engine is another program here: one that ends at once."""
    import queue

    given_up, started = queue.Queue(), []
    popen = subprocess.Popen

    def ends(command, **options):
        started.append(command)
        return popen([sys.executable, "-c", "raise SystemExit(3)"], **options)

    monkeypatch.setattr("ppsd_rt.front.child.subprocess.Popen", ends)
    child = Child(["engine"], {"PPSD_ENGINE_KEY": "x"}, 2, given_up.put)
    assert given_up.get(timeout=120) == "the engine has ended with status 3, and is not started again (--restarts)"
    assert [command[1:] for command in started] == [["-P", "-m", "ppsd_rt", "engine"]] * 3
    child.close()


def test_a_child_that_hangs_is_killed(monkeypatch):
    import queue

    given_up, popen = queue.Queue(), subprocess.Popen
    sleeper = [sys.executable, "-c", "import time; time.sleep(1000)"]
    monkeypatch.setattr("ppsd_rt.front.child.subprocess.Popen", lambda command, **options: popen(sleeper, **options))
    child = Child([], {}, 0, given_up.put)
    child.kill()
    assert given_up.get(timeout=120).startswith(f"the engine has ended with signal {signal.SIGKILL:d}")
    child.close()


def test_an_engine_that_cannot_start_ends_the_server(tmp_path, capfd):
    folder = write_model(tmp_path / "model")
    options = ["--dtype", "float32", "--exit-head", str(tmp_path / "none.safetensors")]
    assert cli.main(["serve", "--restarts", "0", "-m", str(folder), "--port", "0", *options]) == 1
    said = capfd.readouterr().err
    assert "the engine has ended with status" in said
    assert "none.safetensors" in said  # of the child


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["serve", "--restarts", "1", "--engines", "7000"], "give one of the two"),
        (["serve", "--engines", "host"], "'host' is not HOST:PORT"),
        (["engine", "--front", "1:2:x"], "is not HOST:PORT"),
        (["engine"], "--front"),
        (["serve", "--engines", "7000", "--port", "0"], "PPSD_ENGINE_KEY needs 16 characters or more"),
        (["engine", "--front", "127.0.0.1:7000"], "PPSD_ENGINE_KEY needs 16 characters or more"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_in_one_line(options, said, capsys, monkeypatch):
    monkeypatch.setenv("PPSD_ENGINE_KEY", "fifteen letters")
    assert cli.main(options) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
