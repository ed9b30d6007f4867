"""Triton's own PTX runs whole answers without a GPU: the tokens of every schedule are plain decoding's, in any order
that CUDA allows, and faults that are put in are found."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from support import slow
from virtual_gpu.answers import toy_model
from virtual_gpu.build import build
from virtual_gpu.campaign import FORMATS, LONG, MUTATION_SEEDS, OTHERS, ask
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
def plain(gpu):
    """plain(format, prompt): what the kernels say where nothing is wrong with them, worked out once."""
    return cache(lambda format, prompt: right(gpu(sm=90, format=format, schedules=[], prompt=prompt), 1)[0]["ids"])


@pytest.fixture(scope="module")
def quick(gpu):
    """Answers of a few tokens: one interpreter and one compilation for both quick tests."""
    return right(gpu(sm=90, format="bfloat16", schedules=["fixed", "overlap"], tokens=5), 1 + 2)


def test_schedules_give_the_plain_answer(quick):
    assert all(answer["accepted"] > 0 for answer in quick[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("sm", "format"), [(sm, format) for sm, formats in FORMATS.items() for format in formats])
def test_every_format_gives_the_plain_answer_in_every_schedule(gpu, sm, format):
    result = gpu(sm=sm, format=format, schedules=OTHERS, seeds=[0, 2])
    answers = right(result, 1 + 2 * len(OTHERS))
    assert result["launches"] == "captured"
    assert all(answer["accepted"] > 0 for answer in answers if answer["schedule"] in ("fixed", "overlap"))
    right(gpu(sm=sm, format=format, schedules=["turns", "overlap"], request="filtered"), 3)
    right(gpu(sm=sm, format=format, schedules=["fixed", "overlap"], feedback=True), 3)
    right(gpu(sm=sm, format=format, schedules=["fixed", "turns"], prompt=LONG), 3)


@pytest.mark.parametrize(
    ("sm", "format", "feedback"),
    [(90, "bfloat16", False), *(slow(*each) for each in [(90, "int8", True), (90, "fp8", False), (80, "int4", True)])],
)
def test_answers_side_by_side_have_the_tokens_of_each_alone(gpu, sm, format, feedback):
    right(gpu(sm=sm, format=format, schedules=[], feedback=feedback, company="fixed"), 3)


@pytest.mark.slow
def test_other_ways_to_launch_give_the_same_tokens(gpu):
    captured = right(gpu(sm=90, format="int4", schedules=["turns"]), 2)
    alone = right(gpu({"PPSD_NO_PDL": "1"}, sm=90, format="int4", schedules=["turns"]), 2)
    result = gpu({"PPSD_CUDA_EAGER": "1"}, sm=90, format="int4", schedules=["turns"])
    assert result["launches"] == "one by one"
    for answers in (alone, right(result, 2)):
        assert [answer["ids"] for answer in answers] == [answer["ids"] for answer in captured]


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
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | carried
    command = [sys.executable, "-P", "-c", CARRY, library, folder, root / "tests"]
    subprocess.run(command, env=environment | {"TRITON_CACHE_DIR": str(tmp_path / "here")}, check=True)
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


@pytest.mark.parametrize("name", [QUICK, *(slow(name) for name in MUTATIONS if name != QUICK)])
def test_a_mutation_is_caught(gpu, request, name):
    mutation = MUTATIONS[name]
    job = {"sm": 90, "schedules": [mutation.schedule], "prompt": mutation.prompt, "seeds": MUTATION_SEEDS}
    if name == QUICK:
        truth = request.getfixturevalue("quick")[0]["ids"]
        job |= {"format": "bfloat16", "tokens": len(truth)}
    else:
        truth = request.getfixturevalue("plain")("int8", mutation.prompt)
        job["format"] = "int8"
    result = gpu(**job, truth=truth, mutation=name)
    assert result["changed"], "there is nothing like this in the kernel"
    assert result["fault"] or any(answer["ids"] != truth for answer in result["answers"])


@pytest.mark.slow
def test_what_a_kernel_acquires_the_next_one_of_its_stream_sees():
    library = build()
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(library.parent / "triton")}

    def wrong(*arguments):
        command = [sys.executable, "-P", Path(__file__).parent / "ordered.py", library, *arguments]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout

    assert wrong() == ""
    assert "reader, line" in wrong("relaxed")


@pytest.mark.slow
def test_the_first_minutes_on_a_gpu_pass_on_the_virtual_one(tmp_path):
    # And the values that it compares a real one with are still those of the kernels.
    library = build()
    program, out = Path(__file__).parents[2] / "benchmarks" / "gpu_smoke.py", tmp_path / "smoke.json"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(library.parent / "triton"), "PPSD_CUDA_TIMEOUT": "3600"}
    subprocess.run([sys.executable, program, "--virtual", library, "--out", out], env=environment, check=True)
    steps = json.loads(out.read_text())["steps"]
    for name in ("eager", "eager, dependents", "captured", "overlapped"):
        assert all(told == {"logits off": 0.0, "ids alike": True} for told in steps[name]["golden"].values())


@pytest.mark.slow
def test_the_default_models_first_tokens_are_those_of_its_twin():
    """Four of them: each takes 28 million instructions of a warp."""
    library = build()
    program = Path(__file__).parent / "default_model.py"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(library.parent / "triton"), "PPSD_CUDA_TIMEOUT": "3600"}
    command = [sys.executable, program, library, "90", "4"]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fault"] == ""
    assert found["ids"] == found["best"]
    assert found["text"].startswith(" Paris")
