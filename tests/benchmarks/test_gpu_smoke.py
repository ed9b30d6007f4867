"""benchmarks/gpu_smoke.py: a step that fails is run again under memcheck, if there is one."""

import importlib
import os
from argparse import Namespace
from pathlib import Path

import pytest

REPORT = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at linear+0x120 in linear.py:88
=========     by thread (3,0,0) in block (0,0,0)
========= ERROR SUMMARY: 1 error
"""


@pytest.fixture
def smoke(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("gpu_smoke")


@pytest.mark.parametrize(("status", "found"), [(9, "Invalid __global__ read of size 4 bytes"), (0, ""), (1, "")])
def test_what_memcheck_finds_is_told(smoke, monkeypatch, tmp_path, status, found):
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(f"#!/bin/sh\nprintf '%s' '{REPORT}'\nexit {status}\n")
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = smoke.memcheck("kernel", Namespace(virtual=None, sm=90), {})
    assert found in told
    assert bool(found) == bool(told)


def test_a_virtual_gpu_has_no_memcheck(smoke):
    assert smoke.memcheck("kernel", Namespace(virtual="library.so", sm=90), {}) == ""
