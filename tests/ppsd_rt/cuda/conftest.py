"""The CUDA driver without a GPU, csrc/tests/fake_cuda.cpp."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory):
    """The library's path. A process loads one driver for good: tests use it in processes of their own."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler to build the fake driver with")
    source = Path(__file__).parents[3] / "csrc" / "tests" / "fake_cuda.cpp"
    library = tmp_path_factory.mktemp("driver") / "libfake_cuda.so"
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    return library
