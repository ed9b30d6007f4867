"""Whether a loop of rounds goes on: as the twin's; and the kernel that hands its word to the graph."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from kernel_support import DEVICE

from ppsd_rt import _native
from ppsd_rt.triton_kernels.rounds import open_rounds, round_ended, rounds_twin
from ppsd_rt.triton_kernels.state import AGAIN, COMMITTED, LEFT, LIMIT, MAX_STOPS, START, WORDS


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_rounds_go_on_as_the_twins():
    dice = random.Random(4)
    seen = set()
    for _ in range(80):
        text = [dice.randint(0, 30) for _ in range(40)]
        committed = dice.randint(0, 16)
        start = dice.randint(committed, 35)
        stops = dice.sample(range(31), dice.choice((0, 1, MAX_STOPS)))
        rounds = dice.choice((None, 8))
        state = {START: start, COMMITTED: committed, LIMIT: start + dice.randint(0, 3), LEFT: dice.randint(1, 3)}
        words = ints([state.get(place, 0) for place in range(WORDS)])
        given = ints(stops + [-1] * (MAX_STOPS - len(stops)))
        if rounds is None:
            round_ended(ints(text), given, words)
        else:
            open_rounds(ints(text), given, words, rounds=rounds)
        rounds_twin(text, stops, state, rounds)
        assert words.tolist() == [state.get(place, 0) for place in range(WORDS)]
        stopped = not set(text[start - committed + 1 : start + 1]).isdisjoint(stops)
        seen.add((state[AGAIN], stopped, start >= state[LIMIT], rounds is None and state[LEFT] == 0))
    assert {(1, False, False, False), (0, True, False, False), (0, False, True, False), (0, False, False, True)} <= seen


def test_what_no_pass_committed_stops_nothing():
    """Ids in front of the last verdict's, behind them, and where there are no stops: -1 and -2 are no ids."""
    words = ints([0] * WORDS)
    words[START], words[COMMITTED], words[LIMIT] = 3, 2, 10
    for stops, again in (([7, 9], 1), ([5], 0), ([6], 0), ([], 1)):
        open_rounds(ints([7, 7, 5, 6, 9, -1]), ints(stops + [-1] * (MAX_STOPS - len(stops))), words, rounds=8)
        assert words[AGAIN] == again, stops


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's assembler runs on Linux")
@pytest.mark.parametrize("capability", ["sm_80", "sm_90"])
def test_the_conditions_kernel_assembles(tmp_path, capability):
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    (tmp_path / "code.ptx").write_text(_native.SET_CONDITION_CODE)
    subprocess.run([tools / "ptxas", "-arch", capability, "-c", "code.ptx", "-o", "code.o"], cwd=tmp_path, check=True)
    code = subprocess.run([tools / "cuobjdump", "-sass", "code.o"], cwd=tmp_path, capture_output=True, text=True).stdout
    assert code.count("LDG") == 1, "the word is read"
    assert code.count("CALL") == 1, "CUDA's device runtime sets the condition"


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_the_drivers_structures_are_cudas():
    header = Path(triton.__file__).parent / "backends/nvidia/include"
    if not (header / "cuda.h").exists():
        pytest.skip("Triton comes without CUDA's header")
    source = Path(__file__).parents[2] / "csrc/tests/cuda_prototypes.cpp"
    subprocess.run(["c++", "-std=c++17", "-fsyntax-only", "-I", header, source], check=True)
