"""benchmarks/: the exported weights, and the peers side by side on a tiny model."""

import argparse
import importlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import gguf
import numpy as np
import pytest
from support import write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.lab.texts import evaluation_text
from ppsd_rt.models.checkpoint import Checkpoint, as_float32

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("peers") / "model")


@pytest.fixture
def load(monkeypatch):
    """A module of benchmarks/, which is a folder of scripts."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture(scope="module")
def library():
    """A llama.cpp, where there is one."""
    sys.path.insert(0, str(FOLDER))
    try:
        found = importlib.import_module("llama_library").find_library()
    finally:
        sys.path.remove(str(FOLDER))
    if found is None:
        pytest.skip("there is no llama.cpp: benchmarks/build_llama_cpp.sh makes one")
    return found


def test_exported_tensors(load, folder, tmp_path):
    module = load("export_gguf")
    checkpoint = Checkpoint(folder)
    for format, error in (("F32", 0), ("BF16", 2**-8), ("Q8_0", 2**-7)):
        module.export(folder, format, tmp_path / "model.gguf")
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
        assert len(tensors) == len(checkpoint.tensors)
        for name, tensor in checkpoint.tensors.items():
            expected = as_float32(tensor)
            if "q_proj" in name or "k_proj" in name:
                expected = module.interleave(expected, checkpoint.config)
            found = tensors[module.gguf_name(name)]
            values = gguf.quants.dequantize(found.data, found.tensor_type).reshape(expected.shape)
            np.testing.assert_allclose(values, expected, rtol=0, atol=error * np.abs(expected).max())
            if expected.ndim == 1:
                assert found.tensor_type == gguf.GGMLQuantizationType.F32


def test_interleaved_rows_rotate_to_the_same_products(load, folder):
    """q . k with GGUF's rope (pairs side by side) on reordered rows is q . k with Hugging Face's on the others."""
    module, config = load("export_gguf"), Checkpoint(folder).config
    generator = np.random.default_rng(0)
    half = config.head_dim // 2
    q, k = generator.normal(size=(2, config.head_dim, 1)).astype(np.float32)
    angles = generator.normal(size=half) * 3

    def by_halves(x):
        a, b = x[:half], x[half:]
        return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)])

    def by_neighbours(x):
        a, b = x[0::2], x[1::2]
        turned = [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)]
        return np.stack(turned, axis=1).reshape(-1)

    q2, k2 = module.interleave(q, config), module.interleave(k, config)
    assert not np.array_equal(q, q2)
    assert by_neighbours(q2[:, 0]) @ k2[:, 0] == pytest.approx(by_halves(q[:, 0]) @ k[:, 0])


def test_llama_cpp_has_the_same_weights(load, library, folder, tmp_path):
    load("export_gguf").export(folder, "F32", tmp_path / "model.gguf")
    llama = load("llama_library").Llama(library, tmp_path / "model.gguf", context=64, threads=1)
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="float32", threads=1)
    ids = engine.encode("The same weights")
    ours, theirs = engine.backend.logits(ids, 5), llama.logits(ids, 5)
    np.testing.assert_allclose(theirs, ours, atol=0.02 * np.abs(ours).max())  # its KV cache is in float16
    assert (theirs.argmax(axis=1) == ours.argmax(axis=1)).all()
    llama.forget()
    np.testing.assert_allclose(llama.decode(ids), theirs[-1], atol=1e-3)


def peers(folder, tmp_path, *args, script="peers.py"):
    environment = {**os.environ, "PPSD_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, FOLDER / script, "--model", folder, "-t", "1", *args]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_prompts_with_speculation(folder, tmp_path):
    """Every prompt has its ratio, to the first engine; `auto` has no exit head here, and copies."""
    engines = "ppsd-rt:float32+auto,ppsd-rt:float32"
    args = ("--engines", engines, "--limit", 1, "-n", 20, "-r", 2, "-o", "json")
    result = peers(folder, tmp_path, *args, script="peers_prompts.py")
    auto, plain = result["rows"]
    assert [row["engine"] for row in (auto, plain)] == engines.replace(",", " ").split()
    assert auto["times"]["samples"] == [1.0, 1.0]
    speeds = [row["decode_tokens_per_second"]["samples"] for row in (auto, plain)]
    assert plain["times"]["samples"] == pytest.approx([a / b for a, b in zip(*speeds, strict=True)])
    assert len(plain["by_prompt"]) == result["prompts"]
    assert plain["least_prompt"] == min(plain["by_prompt"]) <= plain["median_prompt"] <= max(plain["by_prompt"])


@pytest.mark.slow
def test_side_by_side(load, folder, tmp_path):
    pytest.importorskip("transformers")
    engines = "ppsd-rt:bfloat16,transformers:bfloat16,ppsd-rt:int8"
    result = peers(folder, tmp_path, "--engines", engines, "-p", "9,20", "-n", 12, "-r", 2, "-o", "json")
    rows = result["rows"]
    assert [row["engine"] for row in rows] == ["ppsd-rt", "transformers", "ppsd-rt"] * 2
    assert [row["prompt_tokens"] for row in rows] == [9] * 3 + [20] * 3
    for ours, theirs, int8 in (rows[:3], rows[3:]):
        for figure in ("prompt", "decode"):
            speeds = [row[f"{figure}_tokens_per_second"]["samples"] for row in (ours, theirs)]
            ratios = [a / b for a, b in zip(*speeds, strict=True)]
            assert theirs[f"{figure}_ratio"]["samples"] == pytest.approx(ratios)
            assert ours[f"{figure}_ratio"] is None
            assert int8[f"{figure}_ratio"] is None
        assert ours["same_tokens"] == 12
        assert theirs["same_tokens"] == next((n for n in range(12) if ours["ids"][n] != theirs["ids"][n]), 12)
    engine = Engine.from_pretrained(folder, exit_head="none", backend="cpu", dtype="bfloat16", threads=1)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompt = engine.tokenizer.encode(evaluation_text())[:20]
    assert rows[3]["ids"] == list(engine.generate(prompt, params, "plain").run().ids)
    assert set(result["engines"]) == set(engines.split(","))
    shown = load("show").report(result).lines("md").splitlines()
    assert shown[0].startswith("| engine | format | threads | prompt | tokens | prompt tok/s | decode tok/s |")
    assert len(shown) == 2 + 6


@pytest.mark.slow
def test_quality_side_by_side(folder, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "text.txt"
    path.write_text("A short text, which is long enough for two windows of thirty-two tokens.")
    args = ("--engines", "ppsd-rt:float32,transformers:float32,ppsd-rt:int8", "--quality", "--text", path)
    result = peers(folder, tmp_path, *args, "--window", 32)
    first, twin, int8 = result["results"]
    assert first["tokens"] == len(path.read_text()) - 1
    assert 0 <= twin["divergence"] < 1e-6 < int8["divergence"] < 0.1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--engines", "vllm:int8"], "'vllm:int8' is not ENGINE:FORMAT"),
        (["--engines", "ppsd-rt"], "is not ENGINE:FORMAT"),
        (["--engines", "llama.cpp:int8"], "Q8_0"),
        (["-t", "9999"], "cores"),
        (["-p", "0"], "'0'"),
    ],
)
def test_wrong_usage(load, monkeypatch, capsys, args, words):
    monkeypatch.setattr(sys, "argv", ["peers.py", *args])
    with pytest.raises(SystemExit, match="2"):
        load("peers").main()
    assert words in capsys.readouterr().err


def test_a_missing_peer_is_named(load, monkeypatch, capsys):
    module = load("peers")
    monkeypatch.setattr(module, "find_library", lambda: None)
    names, reasons = module.at_hand([("ppsd-rt", "int8"), ("llama.cpp", "Q8_0")])
    assert names == [("ppsd-rt", "int8")]
    assert "build_llama_cpp.sh" in reasons[0]
    assert "build_llama_cpp.sh" in capsys.readouterr().err


class FakeServer(BaseHTTPRequestHandler):
    """Answers as llama-server does."""

    asked: ClassVar[list[dict[str, object]]] = []

    def do_GET(self):
        self.reply({"build_info": "b1"} if self.path == "/props" else {"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.reply({"tokens": [7] * body["n_predict"], "timings": {"prompt_ms": 10.0, "predicted_ms": 250.0}})

    def reply(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_llama_cpp_with_its_own_speculation(load, monkeypatch):
    """Against a server that is none: what it is started with, what it is asked, what its times mean."""
    module, started = load("peer_worker"), []

    def start(command, **options):
        started.append(command)
        server = ThreadingHTTPServer(("127.0.0.1", int(command[command.index("--port") + 1])), FakeServer)
        threading.Thread(target=server.serve_forever, daemon=True).start()

    monkeypatch.setattr(module.subprocess, "Popen", start)
    peer = module.PEERS["llama-server"]("Q8_0+ngram-simple", "model.gguf", 2, 512)
    assert peer.about() == {"build": "b1"}
    assert peer.answer([1, 2, 3], 5) == ([7] * 5, 0.01, 0.25)
    [command], [asked] = started, FakeServer.asked
    assert command[command.index("--spec-type") + 1] == "ngram-simple"
    assert command[command.index("--model") + 1] == "model.gguf"
    assert (asked["prompt"], asked["temperature"], asked["cache_prompt"]) == ([1, 2, 3], 0, False)


@pytest.mark.parametrize("name", ["llama-server:", "llama-server:IQ4_NL", "llama-server:Q9+ngram-simple"])
def test_formats_that_llama_server_has_no_file_in(load, name):
    with pytest.raises(argparse.ArgumentTypeError):
        load("peers").engine_and_format(name)
