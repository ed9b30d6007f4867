"""The whole cuda backend on the fake driver: captured stages, two streams, the C++ carrier, kernels in the interpreter.

What takes torch's place are two methods of `Graphs`: its graphs are functions that the fake driver calls, in the order
of their streams, on its own threads.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from support import loud_head, write_model

from ppsd_rt.models.checkpoint import Checkpoint

PROGRAM = Path(__file__).parent / "captured.py"


def run(what, folder, driver):
    variables = {**os.environ, "PPSD_CUDA_DRIVER": str(driver), "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    variables["PPSD_FAKE_CUDA_DEVICES"] = "3"
    variables["PPSD_CUDA_TIMEOUT"] = "3600"  # seconds: an interpreted kernel takes what it takes
    done = subprocess.run([sys.executable, PROGRAM, what, folder], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return write_model(tmp_path_factory.mktemp("models") / "small", num_key_value_heads=1, **shape)


@pytest.fixture(scope="module")
def three_layers(tmp_path_factory):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    folder = write_model(tmp_path_factory.mktemp("models") / "three", num_key_value_heads=1, **shape)
    head = loud_head(Checkpoint(folder).hash, exit_layer=1, sizes=(32, 32), num_key_value_heads=1, **shape)
    head.save(folder / "feedback.safetensors")
    return folder


def test_schedules_on_streams_give_the_plain_answer(folder, fake_driver):
    result, errors = run("answers", folder, fake_driver)
    assert errors == ""
    plain = result["plain"]
    assert len(plain["ids"]) == 4
    # The prompt's plain step is one launch, with events that tell its time; each of the three other tokens is another.
    assert (plain["graph launches"], plain["events"]) == (1 + 3, 2)
    for name, answer in result.items():
        assert answer["ids"] == plain["ids"], name
        assert answer["launches"] == "captured"
    assert plain["punctual"] == 1, "the session's thread sleeps 20 us and no longer"
    assert result["elastic, serial"]["streams"] == 1, "without overlap, one order for all"
    assert result["elastic"]["streams"] == 2
    assert result["elastic"]["judged"] > 0
    assert result["auto"]["explained"].startswith("a plain token takes ")
    tracks = {span[1] for span in result["elastic"]["spans"]}
    assert tracks == {0, 1}
    assert all(begin <= end for _, _, _, begin, end in result["elastic"]["spans"])
    assert "overlap efficiency" in result["elastic"]["explained"]


def test_rounds_are_captured_and_copies_taken(folder, fake_driver):
    result, errors = run("rounds", folder, fake_driver)
    assert errors == ""
    for name, answer in result.items():
        assert answer["ids"] == result["plain"]["ids"], name
        assert answer["launches"] == "captured"
    assert result["fixed"]["graph launches"] < result["turns"]["graph launches"]


def test_an_answer_begins_alone_and_goes_on_in_company(folder, fake_driver):
    """Its captured stages end at a committed token; prompt's and decoded rows are run again as what they were."""
    result, _ = run("company", folder, fake_driver)  # numpy may warn of numbers that nobody reads
    assert result["alone"]
    assert result["found"] == result["expected"]
    assert result["begun"] == [ids[0] for ids in result["expected"][1:]]
    assert result["tops"][0] == result["tops"][1]
    assert result["beside"] == [2, 0]
    ((own, rows),) = result["handed over"]
    assert own == rows - 3 >= 2, "rows of its own tokens are no prompt's"
    assert result["no number"].startswith("the model's output is not a number")
    assert result["misuse"] == ""


@pytest.mark.slow
def test_stages_on_several_devices_give_the_plain_answer(three_layers, fake_driver):
    result, errors = run("devices", three_layers, fake_driver)
    assert errors == ""
    assert result.pop("itself").startswith("several GPUs decode one answer at a time")
    assert result.pop("first") == result.pop("second")  # another thread's, which waits
    plain = {kind: result[f"one, {kind}"]["ids"] for kind in ("sampled", "greedy")}
    for name, answer in result.items():
        several = not name.startswith("one")
        assert answer["ids"] == next(ids for kind, ids in plain.items() if kind in name), name
        assert answer["launches"] == "captured"
        assert (answer["copies"] > 0) == several, name
        assert answer["devices"] == (3 if "three" in name else 2 if several else 1), name
        if "auto" not in name:  # which may find in so few rounds that no draft can be paid
            assert (answer["judged"] > 0) == ("plain" not in name and name not in map("one, {}".format, plain)), name
    kinds = {span[0] for span in result["three, ppsd, sampled, feedback"]["spans"]}
    assert {"draft", "take", "verify", "verdict"} <= kinds


@pytest.mark.slow
def test_a_lost_gpu_keeps_what_was_committed(folder, fake_driver):
    result, _ = run("loss", folder, fake_driver)
    assert result["tokens"] == result["plain"][: len(result["tokens"])]
    assert 1 <= len(result["tokens"]) < len(result["plain"])
    assert "the GPU is lost (" in result["error"]
    assert "\n" not in result["error"]
    assert "cannot use the GPU any more" in result["again"]


@pytest.mark.slow
def test_stages_that_cannot_be_captured_are_launched_one_by_one(folder, fake_driver):
    result, errors = run("uncaptured", folder, fake_driver)
    assert result["ids"] == result["plain"]
    lines = errors.strip().splitlines()
    assert lines == ["ppsd-rt: the stages cannot be captured (no room for a graph): kernels go one by one"], "once"
