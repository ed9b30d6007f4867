"""What launches ask for and are predicted to take, and that the pages print what the command does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from machine_code import Launch

from ppsd_rt.triton_kernels.attention import attention_kernel
from ppsd_rt.triton_kernels.cache import Heads
from ppsd_rt.triton_kernels.linear import Matrix, linear_kernel

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_roofline as roofline  # noqa: E402
from gpu_roofline import Asked, Card, Kernel, asked  # noqa: E402


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
    apart = {**constants, "KV": Matrix(*[0] * 12), "HEADS": Heads(5, 1, 32)}
    launch = launch_of(linear_kernel, {"x": "*bf16", "weight": ""}, apart, (6, 1))
    assert asked(launch, 1, 512).once == 160 * bytes + 32 * 96 * (1 + 2 / 32)


def test_the_cache_is_read_again_for_each_chunk_of_queries():
    launch = launch_of(attention_kernel, {"cache": "*bf16"}, {"HEADS": Heads(8, 2, 64)}, (8, 16))
    position = 2 * 2 * 64 * 2
    assert asked(launch, 4, 512) == Asked(cache=516 * position)
    assert asked(launch, 5, 512) == Asked(cache=517 * position, again=517 * position)


def test_programs_of_one_wave_read_and_reckon_in_turn(monkeypatch):
    monkeypatch.setattr(roofline, "REACHED", 1.0)
    # 1024 weights a program: 2 KiB and 2000 instructions.
    code = {"instructions_per_kib": 1000.0, "programs": 2}
    monkeypatch.setattr(roofline, "recorded", lambda: {("8B", "bf16", 90, "linear", 2): code})
    card = Card(bandwidth=4096e6, multiprocessors=10, clock=50e6, sm=90)  # 10 CTAs: 5 us of bytes, 10 of instructions
    constants = {"BLOCK": 32, "INPUTS": 32, "FORMAT": "plain", "SPLITS": 1}

    def microseconds(programs):
        launch = launch_of(linear_kernel, {"x": "*bf16", "weight": "*bf16"}, constants, (programs, 1))
        return 1e6 * (Kernel(launch, 32, 2).predicted("llama-3.1-8b", "bfloat16", card) - roofline.START)

    assert microseconds(10) == pytest.approx(10 + 5)
    assert microseconds(20) == pytest.approx(2 * (10 + 5))
    assert microseconds(100) == pytest.approx(10 * 10 + 10 * 5 / 5)  # of five waves
    embedding = Kernel(launch_of(linear_kernel, {}, {}, (1,)), 1, 0)
    assert embedding.predicted("llama-3.1-8b", "bfloat16", card) == roofline.PHASE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton runs on Linux")
@pytest.mark.parametrize("options", [[], ["--cards"]])
def test_the_page_has_the_tables_that_the_command_prints(options):
    # In a process of its own: in this one the kernels may be the interpreter's.
    done = subprocess.run(
        [sys.executable, "-P", ROOT / "benchmarks/gpu_roofline.py", *options],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert all(
        table.strip() in (DOCS / "design/gpu.md").read_text(encoding="utf-8") for table in done.stdout.split("\n\n")
    )


def test_what_an_h200_has_timed_is_near_what_is_predicted():
    rows = re.findall(r"µs \| ([\d.]+) \| ([\d.]+) \|", (DOCS / "design/gpu.md").read_text(encoding="utf-8"))
    assert len(rows) == 10
    assert all(0.85 < float(predicted) / float(measured) < 1.15 for predicted, measured in rows)
