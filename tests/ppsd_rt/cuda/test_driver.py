"""What csrc/cuda/driver.h declares of the driver is what CUDA's own header declares."""

import shutil
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton, which brings CUDA's header, is not installed")


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_drivers_prototypes_are_cudas():
    header = Path(triton.__file__).parent / "backends/nvidia/include"
    if not (header / "cuda.h").exists():
        pytest.skip("Triton comes without CUDA's header")
    source = Path(__file__).parents[3] / "csrc/tests/cuda_prototypes.cpp"
    subprocess.run(["c++", "-std=c++17", "-fsyntax-only", "-I", header, source], check=True)
