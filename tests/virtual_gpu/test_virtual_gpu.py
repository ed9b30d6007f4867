"""Triton's own PTX runs whole answers without a GPU: the tokens of every schedule are plain decoding's, in any order
that CUDA allows, and faults that are put in are found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from virtual_gpu.answers import toy_model
from virtual_gpu.campaign import MUTATION_SEEDS, ask, build, environment
from virtual_gpu.mutations import MUTATIONS

QUICK = "the wait behind a load of state"
TRITONS = [path for path in os.environ.get("PPSD_TRITONS", "").split(os.pathsep) if path]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip("Triton compiles on Linux")
    library, folder = build(), toy_model(tmp_path_factory.mktemp("virtual_gpu") / "toy")
    return lambda variables=None, **job: ask(library, folder, job, **(variables or {}))


def right(result, answers):
    assert result["fault"] == ""
    assert result["differences"] == 0
    assert len(result["answers"]) == answers
    return result["answers"]


@pytest.fixture(scope="module")
def quick(gpu):
    """Answers of a few tokens: one interpreter and one compilation for both quick tests."""
    return right(gpu(sm=90, format="bfloat16", schedules=["fixed", "overlap"], tokens=5), 1 + 2)


def test_schedules_give_the_plain_answer(quick):
    assert all(answer["accepted"] > 0 for answer in quick[1:])


def test_answers_side_by_side_have_the_tokens_of_each_alone(gpu):
    right(gpu(sm=90, format="bfloat16", schedules=[], company="fixed"), 3)


@pytest.mark.slow
def test_the_campaign_in_short(tmp_path):
    """`make virtual-gpu`: every format, chip, request and way to launch; every mutation."""
    command = [sys.executable, "-P", Path(__file__).parent / "campaign.py", "--seeds", "14"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


CARRY = """
import json, sys
from pathlib import Path

import torch

import gpu_kernels
from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.config import LlamaConfig

sys.path.append(sys.argv[3])
from virtual_gpu.device import install

install(Path(sys.argv[1]), 90)
gpu_kernels.compile_only(90, lambda hit: None)
gpu_kernels.draw_nothing()
config = LlamaConfig.from_dict(json.loads((Path(sys.argv[2]) / "config.json").read_text()))
weights = DeviceWeights.random(config, "bfloat16", "meta")
gpu_kernels.every_stage(weights.with_random_head("norm", 1), 1024, (), pdl=True)
"""


@pytest.mark.slow
def test_an_answer_launches_carried_kernels_alone(tmp_path):
    """Those that benchmarks/gpu_kernels.py has compiled without memory, in a folder that has been moved since."""
    library, folder, root = build(), toy_model(tmp_path / "toy"), Path(__file__).parents[2]
    carried = {"TRITON_CACHE_MANAGER": "gpu_kernels:Carried", "PYTHONPATH": str(root / "benchmarks")}
    command = [sys.executable, "-P", "-c", CARRY, library, folder, root / "tests"]
    here = environment(library, TRITON_CACHE_DIR=str(tmp_path / "here"), **carried)
    subprocess.run(command, env=here, check=True)
    there = (tmp_path / "here").rename(tmp_path / "there")
    before = set(there.glob("*/*.cubin"))
    job = {"sm": 90, "format": "bfloat16", "schedules": ["fixed", "turns"], "tokens": 3}
    right(ask(library, folder, job, TRITON_CACHE_DIR=str(there), **carried), 1 + 2)
    assert before
    assert set(there.glob("*/*.cubin")) == before


@pytest.mark.slow
@pytest.mark.parametrize("triton", TRITONS or [pytest.param("", marks=pytest.mark.skip("PPSD_TRITONS names none"))])
@pytest.mark.parametrize("format", ["bfloat16", "int4"])
def test_another_triton_gives_the_plain_answer(gpu, triton, format):
    right(gpu({"PYTHONPATH": triton}, sm=90, format=format, schedules=["fixed", "overlap"]), 3)


def test_a_mutation_is_caught(gpu, quick):
    mutation, truth = MUTATIONS[QUICK], quick[0]["ids"]
    job = {"sm": 90, "schedules": [mutation.schedule], "prompt": mutation.prompt, "seeds": MUTATION_SEEDS}
    result = gpu(**job, format="bfloat16", tokens=len(truth), truth=truth, mutation=QUICK)
    assert result["changed"], "there is nothing like this in the kernel"
    assert result["fault"] or any(answer["ids"] != truth for answer in result["answers"])


@pytest.mark.slow
def test_what_a_kernel_acquires_the_next_one_of_its_stream_sees():
    library = build()

    def wrong(*arguments):
        command = [sys.executable, "-P", Path(__file__).parent / "ordered.py", library, *arguments]
        done = subprocess.run(command, env=environment(library), check=True, capture_output=True, text=True)
        return done.stdout

    assert wrong() == ""
    assert "reader, line" in wrong("relaxed")


@pytest.mark.slow
def test_the_first_minutes_on_a_gpu_pass_on_the_virtual_one(tmp_path):
    # And the values that it compares a real one with are still those of the kernels.
    library = build()
    program, out = Path(__file__).parents[2] / "benchmarks" / "gpu_smoke.py", tmp_path / "smoke.json"
    subprocess.run([sys.executable, program, "--virtual", library, "--out", out], env=environment(library), check=True)
    steps = json.loads(out.read_text())["steps"]
    for name in ("eager", "eager, dependents", "captured", "overlapped"):
        assert all(told == {"logits off": 0.0, "ids alike": True} for told in steps[name]["golden"].values())


@pytest.mark.slow
def test_the_default_models_first_tokens_are_those_of_its_twin():
    """Four of them: each takes 28 million instructions of a warp."""
    library = build()
    program = Path(__file__).parent / "default_model.py"
    command = [sys.executable, program, library, "90", "4"]
    done = subprocess.run(command, env=environment(library), check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fault"] == ""
    assert found["ids"] == found["best"]
    assert found["text"].startswith(" Paris")
