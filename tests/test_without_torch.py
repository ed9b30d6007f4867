"""An installation without extras: what the cpu backend does without torch, and the line that says what needs it."""

import ctypes
import json
import logging
import subprocess
import sys

from support import tiny_head, tiny_model, write_model

from ppsd_rt import backends
from ppsd_rt.models.checkpoint import Checkpoint

# Runs commands, each in turn in one process in which torch and triton cannot be imported.
SCRIPT = """
import contextlib, io, json, sys
for package in ("torch", "triton", "matplotlib", "llguidance", "fastapi", "uvicorn"):
    sys.modules[package] = None
from ppsd_rt.cli import main as cli
for words in json.load(sys.stdin):
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"hello\\n")))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main(words)
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""
API = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None
import ppsd_rt
from ppsd_rt import *
from ppsd_rt.ranks import launch
from ppsd_rt.ranks.launch import RankOptions
from ppsd_rt.ranks.world import World
engine = Engine.from_pretrained(sys.argv[1], dtype="float32", threads=1)
assert engine.stages().prefill("hello") == next(iter(engine.generate("hello", schedule="plain"))).id
for needs in (
    lambda: Engine.from_pretrained(sys.argv[1], backend="torch"),
    lambda: Engine.from_pretrained(sys.argv[1], backend="cuda"),
    lambda: Engine.from_pretrained(sys.argv[1], device="cuda"),
    lambda: Engine.from_pretrained(sys.argv[1], dtype="float16"),
    lambda: Engine.from_pretrained(sys.argv[2]),
    lambda: launch.join(World(0, 2, 0, 2), RankOptions(sys.argv[1])),
    lambda: __import__("ppsd_rt.distill.run"),
):
    try:
        needs()
    except PpsdError as error:
        print(error)
"""


def python(code, *args, given=""):
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], input=given, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_cpu_backend_needs_no_torch_and_what_does_says_so(folder, tmp_path):
    head = tmp_path / "head.safetensors"
    tiny_head(tiny_model(), hash=Checkpoint(folder).hash).save(head)
    text = tmp_path / "text.txt"
    text.write_text("hello " * 40)
    model = ["--model", str(folder), "--threads", "1"]
    works = [
        ["info", *model, "--dtype", "int4"],
        ["heads", str(head), *model],
        ["check", *model, "--limit", "1", "--max-tokens", "2", "--schedule", "eesd", "--exit-head", str(head)],
        ["hi", *model, "--exit-head", str(head), "--max-tokens", "2", "--trace", str(tmp_path / "trace.json")],
        ["--chat", *model, "--max-tokens", "2"],
        ["cache"],
        ["lab", "bench", "kernels", "-m", str(folder), "--rows", "1", "-t", "1", "-r", "1"],
        ["lab", "bench", "generate", "-m", str(folder), "-p", "4", "-n", "2", "-t", "1", "-r", "1"],
        ["lab", "simulate", "--stages", "2", "--tokens", "8"],
        ["lab", "eval", *model, "--text", str(text)],
    ]
    refused = {
        'distillation needs torch: pip install "ppsd-rt[torch]"': ["distill", *model, "--out", str(head)],
        'the torch backend needs torch: pip install "ppsd-rt[torch]"': ["hi", *model, "--backend", "torch"],
        'the cuda backend needs torch: pip install "ppsd-rt[cuda]"': ["check", *model, "--backend", "cuda"],
        'a grammar needs llguidance: pip install "ppsd-rt[grammar]"': ["hi", "-q", *model, "--grammar", "json"],
        'the server needs fastapi: pip install "ppsd-rt[serve]"': ["serve", *model],
        'a plot needs matplotlib: pip install "ppsd-rt[plot]"': ["heads", str(head), *model, "--plot", "plot.svg"],
    }
    refused_too = [["lab", "bench", "kernels", "-m", str(folder), "--device", "cuda"]]
    commands = [*works, *refused.values(), *refused_too]
    results = [json.loads(line) for line in python(SCRIPT, given=json.dumps(commands))]
    assert [(words, err) for words, (status, out, err) in zip(works, results, strict=False) if status or not out] == []
    lines = [*refused, list(refused)[2]]
    assert results[len(works) :] == [[1, "", f"ppsd-run: {line}\n"] for line in lines]


def test_the_api_says_what_needs_torch(folder, tmp_path):
    odd = write_model(tmp_path / "odd", hidden_size=60, num_attention_heads=2, num_key_value_heads=2)
    assert python(API, folder, odd) == [
        'the torch backend needs torch: pip install "ppsd-rt[torch]"',
        'the cuda backend needs torch: pip install "ppsd-rt[cuda]"',
        'the cuda backend needs torch: pip install "ppsd-rt[cuda]"',
        'the torch backend needs torch: pip install "ppsd-rt[torch]"',
        "the cpu backend cannot run this model (hidden_size 60 is not a multiple of 32), and the torch backend needs "
        'torch: pip install "ppsd-rt[torch]"',
        'a pipeline over processes needs torch: pip install "ppsd-rt[torch]"',
        'distillation needs torch: pip install "ppsd-rt[torch]"',
    ]


def test_a_gpu_that_cannot_be_used_without_torch_is_told_of(monkeypatch, caplog):
    class Driver:
        def __init__(self, name):
            self.cuInit = lambda flags: 0

        def cuDeviceGetCount(self, count):
            count._obj.value = 1
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setitem(sys.modules, "torch", None)
    with caplog.at_level(logging.INFO, logger="ppsd_rt"):
        assert not backends._sees_a_gpu("auto")
    assert caplog.messages == [
        'a GPU is there, but its backend needs torch: pip install "ppsd-rt[cuda]"; the cpu backend runs'
    ]
