"""The table of targets that a run of gpu_check.sh ends with."""

import json
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
    assert len(lines) == 26
    assert set(lines.values()) == {"not measured"}
    assert result["parts"] == {}


def test_targets_are_met_or_missed(tmp_path):
    parts = {"tests-kernels": 0, "ranks": 1, "memcheck": 9, "racecheck": 127, "answers-8b-far": 124, "answers-135m": 0}
    (tmp_path / "parts").write_text("".join(f"{name} {status} 7\n" for name, status in parts.items()))
    answers = [
        {"schedule": "plain", "decode_tokens_per_second": 2500.0, "ratio": 1.0},
        {"schedule": "eesd", "oracle": 0.8, "ratio": 2.2},
        {"schedule": "elastic", "oracle": 0.8, "ratio": 2.4},
        {"schedule": "elastic", "oracle": 0.9, "ratio": 3.0, "differing": 2},
    ]
    kernels = [
        {"kernel": "pass", "rows": 1, "microseconds": 300.0},
        {"kernel": "pass", "rows": 16, "microseconds": 360.0},
        {"kernel": "draft_step", "rows": 1, "microseconds": 85.0},
    ]
    runs = [
        {"in_turns": False, "idle_share": 0.02, "tokens_per_second": 110.0},
        {"in_turns": True, "idle_share": 0.3, "tokens_per_second": 100.0},
    ]
    files = {
        "answers-135m": {"results": answers}, "kernels-135m": {"results": kernels}, "idle-135m": {"runs": runs},
        "answers-1b": {"results": [{"schedule": "plain", "decode_tokens_per_second": 1300.0}]},
        "baseline-1b": {"milliseconds_per_token": 0.9},
        "answers-default": {"results": [{"schedule": "eesd", "ratio": 1.3}, {"schedule": "auto", "ratio": 1.2}]},
        "loop-135m": {"results": [{"schedule": "plain", "ratio": 1.2}, {"schedule": "eesd:length=4", "ratio": 0.97}]},
    }  # fmt: skip
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    (tmp_path / "kernels-8b.json").write_text("Traceback (most recent call last)")
    lines, result = summary(tmp_path)
    expected = {
        "kernels: row invariance, error, exactness": "met",
        "two ranks: the answers of one process": "missed",
        "compute-sanitizer: memory": "missed",
        "compute-sanitizer: races": "not measured",
        "answers that are not plain decoding's": "missed",
        "plain, default shape": "missed",
        "plain, 1B shape": "met",
        "plain, 8B shape": "not measured",
        "16 rows / 1 row, default shape": "missed",
        "draft step, default shape, exit 6": "met",
        "default shape, oracle 0.8, best / plain": "met",
        "default shape: overlap / in turns": "met",
        "against torch.compile and graphs, 1B shape": "missed",
        "default model, its own head, auto / plain": "met",
        "GPU idle, overlapped rounds": "met",
        "rounds in one graph / launched by the host": "missed",
        "answers at 4k, 8k equal plain decoding's": "not measured",
    }
    assert {what: lines[what] for what in expected} == expected
    assert [line["verdict"] for line in result["targets"]] == list(lines.values())
    assert result["parts"]["memcheck"] == {"status": 9, "seconds": 7}


def test_the_script_is_sound_shell():
    subprocess.run(["bash", "-n", SCRIPTS / "gpu_check.sh"], check=True)
