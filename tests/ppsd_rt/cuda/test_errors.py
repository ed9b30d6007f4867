"""A machine that lacks something gets one line that says what."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import write_model

from ppsd_rt.cuda import errors
from ppsd_rt.engine import Engine
from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.models.config import LlamaConfig

pytest.importorskip("triton", reason="Triton is not installed")

import triton

from ppsd_rt.cuda.weights import DeviceWeights

NATIVE = "from ppsd_rt import _native; gpu = _native.cuda_device(0); print(gpu.name, gpu.major, gpu.minor)"
PICK = """  # torch is imported once; each case then has a process, which loads a driver for itself
import json, os, sys, torch
from ppsd_rt.cuda.errors import pick_devices
for names, built, environment in json.loads(sys.argv[1]):
    if os.fork() == 0:
        os.environ.update(environment)
        if built:
            torch.cuda.is_available = torch.backends.cuda.is_built = lambda: True
        try:
            print(pick_devices(names), flush=True)
        except Exception as error:
            print(error, flush=True)
        os._exit(0)
    os.wait()
"""
GB = 10**9


def said(driver, *command, **environment):
    """By a process of its own: its lines, or its complaint's."""
    variables = {**os.environ, "PPSD_CUDA_DRIVER": str(driver), **environment}
    done = subprocess.run([sys.executable, "-c", *command], env=variables, capture_output=True, text=True)
    return (done.stdout or done.stderr).strip().splitlines()


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        ({"PPSD_FAKE_CUDA_DEVICES": "0"}, "the NVIDIA driver sees no GPU (CUDA_ERROR_NO_DEVICE)"),
        ({"PPSD_FAKE_CUDA_VERSION": "11040"}, "the NVIDIA driver is too old: it speaks CUDA 11.4; CUDA 12.0 or newer"),
        (
            {"PPSD_FAKE_CUDA_WITHOUT": "cuGraphUpload"},
            "the NVIDIA driver is too old: it has no cuGraphUpload; CUDA 12.0",
        ),
        ({}, "Fake GPU 9 0"),
    ],
)
def test_drivers(fake_driver, environment, line):
    assert line in said(fake_driver, NATIVE, **environment)[-1]


def test_no_driver():
    assert "CudaError: no NVIDIA driver: " in said("nowhere.so", NATIVE)[-1]


def test_gpus_that_are_not_there_or_too_old(fake_driver):
    """Of several, each is looked at."""
    old, three = {"PPSD_FAKE_CUDA_SM": "75"}, "cuda:0,cuda:1,cuda:2"
    too_old = "Fake GPU (sm_75) is too old for the cuda backend, which needs sm_80 or newer; use --backend torch"
    cases = [
        ("cuda:7", False, {}, "there is no GPU 7: the driver sees 2; use --backend cpu"),
        ("cuda:0", False, old, too_old),
        (three, True, {}, "there is no GPU 2: the driver sees 2; use --backend cpu"),
        (three, True, old, too_old),
        ("cuda:0,cuda:1", True, {}, "[device(type='cuda', index=0), device(type='cuda', index=1)]"),
    ]
    if not torch.backends.cuda.is_built():
        cases.append(("cuda:0", False, {}, "this torch was built without CUDA"))
    lines = said(fake_driver, PICK, json.dumps([case[:3] for case in cases]), TRITON_INTERPRET="0")
    for (*_, expected), line in zip(cases, lines, strict=True):
        assert line.startswith(expected)


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(PpsdError, match=r'the cuda backend needs triton: pip install "ppsd-rt\[cuda\]"'):
        errors.check_triton()
    assert errors.unusable("cuda") is not None


def test_the_cpu_is_no_gpu(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(PpsdError, match="runs on a GPU, not on the CPU"):
        errors.pick_device("cpu")


def test_fp8_needs_a_gpu_that_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Fake GPU")
    for capability, refused in (((8, 0), True), ((8, 6), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        errors.check_format("int8", [torch.device("cuda")])
        if refused:
            line = rf"Fake GPU \(sm_8{capability[1]}\) is too old for fp8, which needs sm_89 or newer; use --dtype int8"
            with pytest.raises(PpsdError, match=line):
                errors.check_format("fp8", [torch.device("cuda")])
        else:
            errors.check_format("fp8", [torch.device("cuda")])
    with pytest.raises(UsageError, match="no fp8: it is for --backend cuda, from sm_89 on; use --dtype int8"):
        Engine.from_pretrained(write_model(tmp_path), backend="cpu", dtype="fp8")


def config_of(**changes):
    shape = {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig.from_dict({"model_type": "llama", "rms_norm_eps": 1e-5, **shape, **changes})


def test_too_little_memory_says_how_much_is_needed(monkeypatch):
    config, gpu = config_of(), torch.device("cuda")  # Llama-3.1-8B
    for format, gigabytes in (("bfloat16", 16.06), ("int8", 9.03), ("int4", 6.09)):
        assert errors.weight_bytes(config, format, 32) == pytest.approx(gigabytes * GB, rel=0.02)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 2**30, 24 * 2**30))
    line = r"the weights as bfloat16: 15\.0 GiB are needed, .* 24\.0 GiB only 8\.0 are free; use --dtype int8 or"
    with pytest.raises(PpsdError, match=line):
        errors.check_memory(config, "bfloat16", [gpu], [32])
    with pytest.raises(PpsdError, match=r"as int8: 8\.4 GiB are needed.*; use --dtype int4 or --backend cpu"):
        errors.check_memory(config, "int8", [gpu], [32])
    errors.check_memory(config, "int4", [gpu], [32])


@pytest.mark.parametrize("format", ["bfloat16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_estimate_is_what_weights_take(format, tied):
    config = config_of(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=2,
        vocab_size=4000, tie_word_embeddings=tied,
    )  # fmt: skip
    weights = DeviceWeights.random(config, format, "cpu")
    shared = tied and format == "bfloat16"
    assert errors.weight_bytes(config, format, 2) == weights.bytes + (0 if shared else weights.embedding.nbytes)
    parts = [errors.weight_bytes(config, format, 1, first=first, last=not first) for first in (True, False)]
    assert sum(parts) == weights.bytes + weights.embedding.nbytes


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_drivers_prototypes_are_cudas():
    """What csrc/cuda/driver.h declares of the driver is what CUDA's own header declares."""
    header = Path(triton.__file__).parent / "backends/nvidia/include"
    if not (header / "cuda.h").exists():
        pytest.skip("Triton comes without CUDA's header")
    source = Path(__file__).parents[3] / "csrc/tests/cuda_prototypes.cpp"
    subprocess.run(["c++", "-std=c++17", "-fsyntax-only", "-I", header, source], check=True)
