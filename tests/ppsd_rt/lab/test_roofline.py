"""The roofline table: what launches ask for, and that the documentation prints what the command does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from ppsd_rt.lab.roofline import Asked, asked
from ppsd_rt.triton_kernels.attention import attention_kernel
from ppsd_rt.triton_kernels.linear import linear_kernel
from ppsd_rt.triton_kernels.machine_code import Launch

PAGE = Path(__file__).parents[3] / "docs/design/gpu.md"


def launch_of(kernel, types, constants, grid):
    return Launch(kernel, tuple(types.items()), tuple(constants.items()), (), (), grid)


def test_every_program_asks_for_all_rows():
    types = {"x": "*bf16", "weight": "*bf16"}
    launch = launch_of(linear_kernel, types, {"BLOCK": 32, "INPUTS": 100, "FORMAT": "plain"}, (6, 1))
    assert asked(launch, 1, 512) == Asked(once=6 * 32 * 100 * 2, again=6 * 100 * 2)
    assert asked(launch, 16, 512) == Asked(once=6 * 32 * 100 * 2, again=16 * 6 * 100 * 2)


@pytest.mark.parametrize(
    ("format", "bytes"), [("int8", 96 * (1 + 2 / 32)), ("int4", 128 * (0.5 + 4 / 32)), ("fp8", 96 + 4)]
)
def test_scales_count_and_groups_of_int4_are_whole(format, bytes):
    constants = {"BLOCK": 32, "INPUTS": 96, "FORMAT": format}
    assert asked(launch_of(linear_kernel, {"x": "*bf16", "weight": ""}, constants, (6, 1)), 1, 512).once == 192 * bytes
    apart = {**constants, "KV": True, "HEADS": 5, "HEAD_DIM": 32}
    launch = launch_of(linear_kernel, {"x": "*bf16", "weight": ""}, apart, (6, 1))
    assert asked(launch, 1, 512).once == 160 * bytes + 32 * 96 * (1 + 2 / 32)


def test_the_cache_is_read_again_for_each_chunk_of_queries():
    constants = {"KV_HEADS": 2, "HEAD_DIM": 64, "GROUP": 4, "COLUMNS": 16}
    launch = launch_of(attention_kernel, {"keys": "*bf16"}, constants, (8, 16))
    position = 2 * 2 * 64 * 2
    assert asked(launch, 4, 512) == Asked(cache=516 * position)
    assert asked(launch, 5, 512) == Asked(cache=517 * position, again=517 * position)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
def test_the_page_has_the_table_that_the_command_prints():
    # In a process of its own: in this one the kernels may be the interpreter's.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "ppsd_rt.lab.roofline"],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout in PAGE.read_text(encoding="utf-8")
