"""The kernels compile to sound machine code for Hopper and Ampere, on a machine without a GPU."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from machine_code import (
    Launch,
    Report,
    arithmetic,
    executed,
    fewest,
    identity,
    over_k,
    parsed,
    variants,
)

from ppsd_rt import triton_kernels

SOUND = Report(
    "linear", 90, 8, 60, 0, 65536, ("LDG.E.EF.128", "ACQBULK", "LDG.E", "LDGSTS.E.BYPASS.128", "HMMA.16816.F32.BF16"),
    weights=True, scales=False, matrix=True, pdl=True, bar=8 * 32 * 16,
)  # fmt: skip


FORMATS = ("bf16", "int8", "int4", "fp8")
TEXTS = {"linear_texts", "qkv_texts", "swiglu_texts", "heads_texts"}  # rows of several texts
ROW_KERNELS = {"linear", "qkv", "swiglu", "heads"} | TEXTS
RECORD = Path(__file__).parents[2] / "benchmarks/results/2026-11-28-gpu-machine-code.json"
OTHERS = {Path(path).name: path for path in os.environ.get("PPSD_TRITONS", "").split(os.pathsep) if path}


def compiled(*arguments, triton=None):
    """Each line of machine_code's table, by the Triton that lies in the folder `triton`, or the one that is installed.

    In a process of its own: in this one the kernels may be the interpreter's.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if triton:
        environment["PYTHONPATH"] = triton
    command = [sys.executable, "-P", Path(__file__).parents[1] / "machine_code.py", "--beside", RECORD, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    rows = done.stdout.splitlines()[1:]
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row.endswith("  ok") for row in rows)
    return rows


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler runs on Linux")
@pytest.mark.parametrize(
    ("models", "format", "capability"),
    [("135M,8B", format, 90) for format in FORMATS] + [("135M", format, 80) for format in FORMATS[:3]],
)
def test_every_kernel_is_sound(models, format, capability):
    rows = compiled("--models", models, "--formats", format, "--capabilities", str(capability))
    names = {row.split()[3] for row in rows}
    assert names == ROW_KERNELS | {
        "attention_texts", "choose_texts",
        "embedding", "attention", "choose",
        "begin_draft", "arrived", "drafted", "begin_verification", "forward", "verdict",
        "feedback", "normalise", "prompt_qkv", "prompt_attention", "prompt_linear", "prompt_swiglu", "reduce_splits",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("triton", [*OTHERS] or [pytest.param("", marks=pytest.mark.skip("PPSD_TRITONS names none"))])
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("format", FORMATS)
def test_row_kernels_are_as_good_with_another_triton(format, capability, triton):
    """PPSD_TRITONS: folders, separated as those of PATH, into which `pip install --no-deps --target` put one each."""
    if format == "fp8" and capability < 89:
        pytest.skip("no conversions of fp8 there")
    how = "--models", "8B,135M", "--formats", format, "--capabilities", str(capability)
    assert compiled(*how, "--kernels", ",".join(ROW_KERNELS), triton=OTHERS[triton])


def test_three_versions_of_triton_are_recorded_without_faults():
    rows = json.loads(RECORD.read_text())["rows"]
    found = {(row["triton"], row["model"], row["format"], row["capability"], row["kernel"]) for row in rows}
    chips = [(format, 90) for format in FORMATS] + [(format, 80) for format in FORMATS[:3]]
    for version in ("3.4.0", "3.6.0", "3.7.1"):
        for model in ("8B", "135M", "1B"):
            for kernel in ROW_KERNELS if model == "8B" else ROW_KERNELS - TEXTS:
                assert found >= {(version, model, *chip, kernel) for chip in chips}
    best = fewest(rows)
    assert not any(row["faults"] for row in rows)
    assert all(row["instructions_per_kib"] <= 1.3 * best[identity(row)] for row in rows)


def test_a_kernel_has_at_most_twenty_parameters():
    names = [f"{triton_kernels.__name__}.{each.name}" for each in iter_modules(triton_kernels.__path__)]
    found = (item for name in names for item in vars(import_module(name)).items())
    kernels = {name: its for name, its in found if name.endswith("_kernel")}
    assert {"qkv_kernel", "heads_kernel", "attention_kernel", "choose_kernel"} <= kernels.keys()
    assert [name for name, its in kernels.items() if len(its.arg_names) > 20] == []


def test_sound_code_has_no_faults():
    assert SOUND.faults() == []
    assert SOUND._replace(counters=1, instructions=(*SOUND.instructions, "ATOMG.E.ADD.STRONG.GPU")).faults() == []


def test_each_way_through_a_program_waits_with_its_weights_on_the_way():
    second = ("LDG.E.EF.128", "HMMA.16816", "LDG.E.EF.128", "LDG.E.EF.128", "ACQBULK", "HMMA.16816")
    branching = SOUND._replace(ways=2, instructions=SOUND.instructions + second)
    assert branching.faults() == []
    assert branching.ahead == 8 * 32 * 16
    late = branching._replace(instructions=SOUND.instructions + second[:2] + second[4:])
    assert "0 bytes of weights are on the way before the wait instead of 4096" in late.faults()


def test_loops_over_k_count_in_each_round():
    code = """
.L_x_1:
        /*0000*/                   LDG.E.EF.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @!P0 HMMA.16816.F32.BF16 R8, R4, R12, R8 ;
        /*0020*/               @P1 BRA `(.L_x_1) ;
        /*0030*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0040*/                   EXIT ;
"""
    instructions, loops = parsed(code)
    assert instructions == ["LDG.E.EF.128", "HMMA.16816.F32.BF16", "BRA", "BRA", "EXIT"]
    assert loops == [(0, 3)]
    assert executed(instructions, loops, {"STEPS": 7, "AHEAD": 3}) == 5 + 2 * 3
    assert over_k(instructions, loops) == tuple(instructions[:3])
    straight = ["LDG.E.EF.128", "HMMA.16816", "BAR.SYNC", "LDG.E.EF.128", "STS", "HMMA.16816"]
    assert over_k(straight, []) == ("HMMA.16816", "BAR.SYNC")
    assert over_k(["ACQBULK", *straight, "ACQBULK", *straight], []) == ()


def test_arithmetic_is_counted_by_kind():
    code = """
        /*0000*/                   FADD.FTZ R4, R5, R6 ;
        /*0010*/              @!P0 FMUL.FTZ R4, R5, R6 ;
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R12, R8 ;
        /*0030*/                   IADD3 R8, R4, R12, RZ ;
"""
    assert arithmetic(code) == (("FMUL", 1), ("HMMA", 1))


def test_launches_with_and_without_other_texts_are_variants():
    def launch(texts, rows):
        types = (("x", "*fp32"), ("texts", "*i32" if texts else "constexpr"), ("TEXTS", "constexpr"))
        constants = (("TEXTS", texts), ("ROWS", rows), *((("texts", None),) if not texts else ()))
        return Launch(None, types, constants, (), (0, 1), ())

    assert variants(launch(True, 1)) == variants(launch(False, 1)) != variants(launch(False, 2))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"local": 8}, "local memory"),
        ({"instructions": (*SOUND.instructions, "STL.64")}, "local memory"),
        ({"instructions": (*SOUND.instructions, "RED.E.ADD.F32")}, "1 atomics for 0 counters"),
        ({"counters": 1, "instructions": (*SOUND.instructions, "ATOMG.E.ADD", "RED.E.ADD.F32")}, "2 atomics for 1"),
        ({"instructions": SOUND.instructions[:-1]}, "no matrix instructions"),
        ({"registers": 129}, "registers"),
        ({"unawaited": True}, "before it has ended"),
        ({"shared": 120 * 1024}, "shared memory"),
        ({"instructions": ("LDG.E.EF.64", *SOUND.instructions)}, "16 bytes"),
        ({"instructions": SOUND.instructions[1:]}, "16 bytes"),
        ({"instructions": ("LDG.E.EF.128", "LDG.E.EF.128", "LDG.E", "HMMA.16816")}, "0 waits"),
        ({"instructions": ("ACQBULK", *SOUND.instructions)}, "2 waits"),
        ({"instructions": ("ACQBULK", "LDG.E.EF.128", "HMMA.16816")}, "0 bytes of weights are on the way"),
        ({"bar": 8 * 32 * 16 + 1}, "4096 bytes of weights are on the way before the wait instead of 4097"),
        ({"instructions": ("LDG.E", *SOUND.instructions)}, "read before the wait"),
        (
            {"loop": ("LDG.E.EF.128", "BAR.SYNC.DEFER_BLOCKING", "HMMA.16816", "LDS.128")},
            "BAR.SYNC.DEFER_BLOCKING, LDS",
        ),
        ({"bar": 65536, "warps": 1}, "a multiprocessor has 1536 bytes"),
    ],
)
def test_faults_are_named(change, fault):
    assert [f for f in SOUND._replace(**change).faults() if fault in f]
