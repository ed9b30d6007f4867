"""The table of targets that a run of gpu_check.sh ends with."""

import json
import re
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def summary(folder):
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_summary.py", folder, folder / "gpu.result"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = {line[14:60].strip(): line[:13].strip() for line in done.stdout.splitlines()}
    return lines, json.loads((folder / "gpu.result").read_text())


def test_nothing_measured(tmp_path):
    lines, result = summary(tmp_path)
    assert len(lines) == 40
    assert set(lines.values()) == {"not measured"}
    assert result["parts"] == {}


def test_targets_are_met_or_missed(tmp_path):
    parts = {
        "tests-kernels": 0,
        "tests-captured": 1,
        "memcheck": 9,
        "racecheck": 127,
        "answers-8b-far": 124,
        "answers-135m": 0,
    }
    (tmp_path / "parts").write_text("".join(f"{name} {status} 7\n" for name, status in parts.items()))
    answers = [
        {"schedule": "plain", "decode_tokens_per_second": 2300.0, "ratio": 1.0},
        {"schedule": "eesd", "oracle": 0.8, "ratio": 2.5},
        {"schedule": "elastic", "oracle": 0.8, "ratio": 2.4},
        {"schedule": "elastic", "oracle": 0.9, "ratio": 3.0, "differing": 2},
    ]
    kernels = [
        {"kernel": "pass", "rows": 1, "microseconds": 300.0},
        {"kernel": "pass", "rows": 16, "microseconds": 360.0},
        {"kernel": "draft_step", "rows": 1, "microseconds": 85.0},
    ]
    alone = {"qkv": 1.0, "attention": 2.0, "output": 1.0, "gate_up": 3.0, "down": 2.0}
    kernels += [{"kernel": name, "rows": 1, "microseconds": us, "count": 30} for name, us in alone.items()]
    kernels.append({"kernel": "lm_head", "rows": 1, "microseconds": 15.0, "count": 1})
    runs = [{"in_turns": False, "idle_share": 0.02}, {"in_turns": True, "idle_share": 0.3}]
    files = {
        "build": {"gpu": "NVIDIA H100 80GB HBM3"},
        "answers-135m": {"results": answers[:1]}, "oracle-135m": {"results": answers},
        "kernels-135m": {"results": kernels},
        "idle-135m": {"runs": runs},
        "answers-1b": {"results": [{"schedule": "plain", "decode_tokens_per_second": 1300.0}]},
        "answers-formats": {
            "results": [
                {"schedule": "plain", "dtype": dtype, "decode_tokens_per_second": rate}
                for dtype, rate in (("bfloat16", 250.0), ("int8", 400.0), ("int4", 360.0), ("fp8", 420.0))
            ]
        },
        "kernels-8b-int4": {"results": [{"kernel": "gate_up", "rows": 1, "bandwidth_share": 0.6}]},
        "baseline-1b": {"milliseconds_per_token": 0.7, "transformers_milliseconds_per_token": 14.0},
        "answers-default": {"results": [{"schedule": "eesd", "ratio": 1.3}, {"schedule": "auto", "ratio": 1.2}]},
    }  # fmt: skip
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    (tmp_path / "kernels-8b.json").write_text("Traceback (most recent call last)")
    (tmp_path / "tests-kernels.json").write_text("41 passed, 2 skipped in 61.20s (0:01:01)\n")
    (tmp_path / "tests-captured.json").write_text("1 failed, 40 passed in 61.20s\n")
    lines, result = summary(tmp_path)
    expected = {
        "kernels: row invariance, error, exactness": "met",
        "captured stages, streams, mapped memory": "missed",
        "compute-sanitizer: memory": "missed",
        "compute-sanitizer: races in shared memory": "not measured",
        "answers that are not plain decoding's": "missed",
        "plain, default shape, H100": "met",
        "plain, default shape, H200": "not measured",
        "plain, 1B shape, H100": "met",
        "plain, 8B shape, H100": "not measured",
        "16 rows / 1 row, default shape": "missed",
        "draft step, default shape, exit 6": "met",
        "default shape, oracle 0.8, best / plain": "met",
        "default shape: overlap / best in turns": "missed",
        "8B shape int8: plain, over bfloat16": "met",
        "8B shape int4: plain, over bfloat16": "missed",
        "8B shape fp8: plain, over bfloat16": "met",
        "8B shape int8: gate and up, of copy bandwidth": "not measured",
        "8B shape int4: gate and up, of copy bandwidth": "met",
        "1B shape: torch.compile and graphs / plain": "missed",
        "1B shape: transformers / plain": "met",
        "8B shape: transformers / plain": "not measured",
        "default model, its own head, auto / plain": "met",
        "GPU idle between launches, overlapped rounds": "met",
        "a pass: what its kernels alone do not take": "met",
        "answers at 4k, 8k equal plain decoding's": "not measured",
    }
    assert {what: lines[what] for what in expected} == expected
    assert [line["verdict"] for line in result["targets"]] == list(lines.values())
    assert result["parts"]["memcheck"] == {"status": 9, "seconds": 7}


def test_the_script_is_sound_shell_and_names_its_calls():
    subprocess.run(["bash", "-n", SCRIPTS / "gpu_check.sh"], check=True)
    done = subprocess.run([SCRIPTS / "gpu_check.sh"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "usage: benchmarks/gpu_check.sh smoke|speed|proof|company|more ...\n")


def test_the_limits_of_a_call_fit_into_it():
    script = (SCRIPTS / "gpu_check.sh").read_text()
    for call in ("smoke", "speed", "proof", "company", "more"):
        parts = script[script.index(f"\n    {call})") :].partition(";;")[0]
        build = int(re.findall(r"^part build (\d+)", script, re.MULTILINE)[0])
        limits = list(map(int, re.findall(r"^ +part \S+ (\d+)", parts, re.MULTILINE)))
        assert build + (max if call == "proof" else sum)(limits) <= 570, call  # proof: all of them at once
