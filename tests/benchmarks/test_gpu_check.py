"""benchmarks/gpu_check.sh, as far as it can be run without a GPU."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.sh"

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
    warm = re.search(r"^warm\(\) \{.*?^\}", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
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
