"""benchmarks/memory.py, ranks.py, gpu_smoke.py and gpu_check.sh, as far as they run here and take no time."""

import importlib
import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support import write_model

from ppsd_rt import Engine
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.random_weights import SHAPES

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCHEDULES = ["plain", "eesd", "ppsd"]


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_random_model_loads_and_decodes(load, monkeypatch, tmp_path, kind):
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    module = load("memory")
    config = replace(SHAPES["llama-2-13b"], vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    config = replace(config, num_attention_heads=8, num_key_value_heads=8, head_dim=32)
    module.write(tmp_path / "m.gguf", config, kind)
    checkpoint = Checkpoint(tmp_path / "m.gguf")
    weights = checkpoint.tensors["model.layers.1.mlp.down_proj.weight"]
    assert 0.01 < weights.std() < 0.05
    assert abs(weights.mean()) < 0.01
    assert checkpoint.parameters == 2 * 300 * 256 + 2 * 256 * (4 * 256 + 3 * 512 + 2) + 256
    assert checkpoint.stored_as == ["F32", kind]
    row = module.load(tmp_path / "m.gguf", "int4", 1, 4, 0.0)
    assert row["tokens_per_second"] > 0
    assert row["packed_gb"] < row["peak_gb_loaded"] <= row["peak_gb"]


@pytest.mark.parametrize("trained", [True, False])
def test_answers_of_every_schedule_in_one_process(load, tmp_path, trained, monkeypatch):
    ranks = load("ranks")
    monkeypatch.setattr(ranks, "questions", lambda args: ["What is rain?", "Why?"])
    engine = Engine.from_pretrained(write_model(tmp_path / "model"), exit_head="norm:2", backend="cpu", threads=1)
    options = ["-n", "20", "-r", "2", "--schedules", ",".join(SCHEDULES), *(["--trained"] if trained else [])]
    args = ranks.parsed([*options, "--acceptance", "0.5"])
    found = ranks.measure(engine, args)
    assert [row["schedule"] for row in found["rows"]] == SCHEDULES
    assert {row["acceptance"] for row in found["rows"]} == {None if trained else 0.5}
    [realised] = {row["realised"] for row in found["rows"]}
    assert 0 <= realised <= 1 if trained else 0.2 < realised < 0.8
    assert len(found["tokens"]) == 2 and max(found["tokens"]) <= 19
    for row in found["rows"]:
        assert [len(seconds) for seconds in row["seconds"]] == [2, 2]
        fastest = sum(found["tokens"]) / sum(min(seconds) for seconds in row["seconds"])
        assert 0 < row["tokens_per_second"] <= fastest * 1.001


REPORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at linear+0x120 in linear.py:88
=========     by thread (3,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""


@pytest.mark.parametrize(("status", "found"), [(9, "Invalid __global__ read of size 4 bytes"), (0, ""), (1, "")])
def test_what_memcheck_finds_is_told(load, monkeypatch, tmp_path, status, found):
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\nprintf '%s' '{REPORT}'\nexit {status}\n")
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = load("gpu_smoke").memcheck("kernel", Namespace(virtual=None, sm=90), {})
    assert found in told
    assert bool(found) == bool(told)


def test_a_virtual_gpu_has_no_memcheck(load):
    assert load("gpu_smoke").memcheck("kernel", Namespace(virtual="library.so", sm=90), {}) == ""


JOB = """
import pathlib, signal, sys, time
try:
    pathlib.Path(sys.argv[1], "began").touch()
    time.sleep(600)
except KeyboardInterrupt:
    pathlib.Path(sys.argv[1], "interrupted").touch()
"""


def test_background_jobs_hear_of_an_interrupt(tmp_path):
    # Or what they have measured is lost, and they go on beside what is measured next.
    warm = re.search(r"^warm\(\) \{.*?^\}", (FOLDER / "gpu_check.sh").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "python").symlink_to(sys.executable)  # which may have spaces in its path
    program, run = tmp_path / "job.py", f'run="{tmp_path}/python {tmp_path}/job.py {tmp_path}"'
    program.write_text(JOB)
    process = subprocess.Popen(["bash", "-c", f"{run}\n{warm[0]}\nwarm"], start_new_session=True)
    try:
        while not (tmp_path / "began").exists():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "interrupted").exists()
