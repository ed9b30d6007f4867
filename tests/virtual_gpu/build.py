"""Builds the virtual GPU, csrc/tests/virtual_gpu, and keeps it in build/."""

import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock

ROOT = Path(__file__).parents[2]


def build() -> Path:
    """The driver's path. Raises RuntimeError where there is nothing to build it with."""
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or shutil.which("cmake")
    if sys.platform != "linux" or cmake is None:
        raise RuntimeError("the virtual GPU is built with cmake, on Linux")
    folder = ROOT / "build" / "virtual_gpu"
    folder.mkdir(parents=True, exist_ok=True)
    configure = [cmake, "-S", ROOT, "-B", folder, "-DPPSD_MODULE=OFF", "-DPPSD_VIRTUAL_GPU=ON"]
    with FileLock(folder / "lock"):
        for command in (configure, [cmake, "--build", folder, "--target", "virtual_gpu"]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError((done.stdout + done.stderr)[-2000:])
    return folder / "libcuda.so.1"
