"""benchmarks/serve.py: clients, servers and what it reports, on a tiny model."""

import importlib
import json
from pathlib import Path

import gguf
import pytest
from support import SPECIAL, VOCAB, slow, write_model

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("serve") / "model")


@pytest.mark.parametrize("engines", ["direct:float32+plain", slow("ppsd-rt:float32+plain,direct:float32+plain")])
def test_every_engine_answers_every_request(load, folder, capsys, monkeypatch, tmp_path, engines):
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path))
    options = ["-m", str(folder), "--exit-head", "norm:2", "-t", "1", "-n", "5", "-r", "2", "-o", "json"]
    status = load("serve").main([*options, "--clients", "1,2", "--requests", "3", "--engines", engines])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert status == 0 and not report["interrupted"]
    named = [(row["engine"], row["clients"]) for row in report["rows"]]
    assert named == [(engine, clients) for clients in (1, 2) for engine in engines.split(",")]
    for row in report["rows"]:
        assert len(row["tokens_per_second"]["samples"]) == 2
        assert row["first_ms"]["median"] <= row["first_ms_99"]["median"]
        assert row["pause_ms"]["median"] <= row["pause_ms_99"]["median"]
    assert all(row["times"]["median"] == 1 for row in report["rows"][:: engines.count(",") + 1])


def test_a_server_that_is_missing_is_left_out_and_named(load, capsys, monkeypatch, tmp_path):
    module = load("serve")
    monkeypatch.setattr(module, "SERVER", tmp_path / "llama-server")
    names, reasons = module._at_hand(["ppsd-rt:int8+auto", "llama.cpp:Q8_0"])
    assert names == ["ppsd-rt:int8+auto"]
    assert reasons[0].startswith("llama.cpp:Q8_0: no ") and "build_llama_cpp.sh server" in capsys.readouterr().err


def test_a_file_as_it_is_must_be_a_gguf_file(load, folder, monkeypatch):
    module = load("serve")
    monkeypatch.setattr(module, "SERVER", folder / "config.json")  # any file: it is at hand, and is never started
    with pytest.raises(SystemExit, match=r"is no \.gguf file: name a format instead of llama-server:file"):
        module.main(["-m", str(folder), "--engines", "llama.cpp:file", "--clients", "1"])


def test_the_exported_tokenizer(load, folder, tmp_path):
    load("export_gguf").export(folder, "Q8_0", tmp_path / "model.gguf", tokenizer=True)
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == VOCAB and tuple(tokens[-3:]) == SPECIAL
    assert fields["tokenizer.ggml.token_type"].contents()[-3:] == [gguf.TokenType.CONTROL] * 3


@pytest.mark.slow
def test_llama_server(load, folder, capsys, monkeypatch, tmp_path, default_model):
    module = load("serve")
    if not module.SERVER.exists():
        pytest.skip("there is no llama-server: benchmarks/build_llama_cpp.sh server makes one")
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path))
    options = ["-m", str(default_model), "-t", "1", "-n", "4", "-r", "1", "-o", "json", "--engines", "llama.cpp:Q8_0"]
    assert module.main([*options, "--clients", "2", "--requests", "2"]) == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert row["tokens_per_second"]["median"] > 0
