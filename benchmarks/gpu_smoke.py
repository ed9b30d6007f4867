"""The first minutes on a GPU: from one kernel to an overlapped answer, each step a process with a limit.

    python benchmarks/gpu_smoke.py --out results/smoke.json

Each step is compared with torch, or with the step before and with what the virtual GPU computed (gpu_golden.json).
All of them begin at once, for their processes start more slowly than they run. One that fails is repeated with
CUDA_LAUNCH_BLOCKING, for the kernel's name, and under memcheck; then with the switches that avoid parts of the
machinery, and the first of these under which it passes is set for all that comes later: `smoke.env` beside the output,
for gpu_check.sh. After --limit seconds nothing is repeated any more. The output is written after every step; its last
line is printed too.
--virtual LIBRARY: on a virtual GPU (tests/virtual_gpu). --write: writes gpu_golden.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GOLDEN = HERE / "gpu_golden.json"
SWITCHES = ("PPSD_NO_PDL", "PPSD_CUDA_SERIAL", "PPSD_CUDA_EAGER")
FORMATS = ("bfloat16", "int8", "int4", "fp8")
# Step: seconds, and the environment that makes it as simple as it is.
STEPS: dict[str, tuple[int, dict[str, str]]] = {
    "versions": (30, {}),
    "kernel": (60, {}),
    "dependents": (60, {}),
    "ring": (30, {}),
    "eager": (120, {"PPSD_CUDA_EAGER": "1", "PPSD_NO_PDL": "1"}),
    "eager, dependents": (120, {"PPSD_CUDA_EAGER": "1"}),
    "captured": (120, {"PPSD_CUDA_SERIAL": "1"}),
    "overlapped": (120, {}),
}
TOLERANCE = 0.02  # of the largest logit: tensor cores round otherwise than the virtual GPU


def versions(device: str) -> dict[str, Any]:
    import torch
    import triton

    from ppsd_rt import _native

    found: dict[str, Any] = {"torch": torch.__version__, "triton": triton.__version__, "isa": _native.isa()}
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        found |= {"gpu": gpu.name, "sm": f"{gpu.major}{gpu.minor}", "driver": _native.cuda_device(0).name}
    return found


def formats(device: str, sm: int) -> list[str]:
    return [name for name in FORMATS if name != "fp8" or sm >= 89]


def kernel(device: str, sm: int, pdl: bool = False) -> dict[str, Any]:
    """One launch for each format; with `pdl` two, of which the second depends on the first."""
    import torch

    from ppsd_rt.triton_kernels.linear import Weight, linear, quantise, quantise_fp8, quantise_int4
    from ppsd_rt.triton_kernels.state import ROWS, WORDS

    make = {"bfloat16": lambda w: Weight(w.bfloat16()), "int8": quantise, "int4": quantise_int4, "fp8": quantise_fp8}
    generator = torch.Generator().manual_seed(0)
    state = torch.zeros(WORDS, dtype=torch.int32)
    state[ROWS] = 3
    state, errors = state.to(device), {}
    for name in formats(device, sm):
        first, second = (make[name](torch.randn(256, 256, generator=generator)).to(device) for _ in range(2))
        x = torch.randn(16, 256, generator=generator).bfloat16().to(device)
        middle, out = torch.zeros(16, 256, device=device), torch.zeros(16, 256, device=device)
        rounded = torch.zeros(16, 256, dtype=torch.bfloat16, device=device)
        linear(x, first, middle, state, rounded=rounded, pdl=pdl)
        linear(rounded, second, out, state, pdl=pdl)
        right = (x[:3].float() @ first.wide().t()).bfloat16().float() @ second.wide().t()
        errors[name] = float((out[:3] - right).abs().max() / right.abs().max())
        if not errors[name] < TOLERANCE:
            raise SystemExit(f"{name}: differs from its twin by {errors[name]:.3g} of the largest output")
    return {"errors": errors}


def ring(device: str) -> dict[str, Any]:
    """A verdict's record in memory that the host reads while it waits for nothing."""
    import torch

    from ppsd_rt.triton_kernels.state import DRAFTED, RECORD_COMMITTED, RECORD_IDS, RING_WORDS, ROWS, START, WORDS
    from ppsd_rt.triton_kernels.verdict import verdict

    words = lambda *shape: torch.zeros(shape, dtype=torch.int32, device=device)  # noqa: E731
    text, choices, state, late = words(64), words(16), words(WORDS), words(WORDS)
    confidences = torch.zeros(64, device=device)
    records = torch.zeros(4, RING_WORDS, dtype=torch.int32, pin_memory=device == "cuda")
    choices[:2] = torch.tensor([7, 9], dtype=torch.int32)
    text[3] = 7
    state[START], state[DRAFTED] = 2, 4
    late[ROWS], late[START] = 2, 2
    verdict(text, choices, confidences, words(64), late, state, records)
    until = time.monotonic() + 10
    while records[1, 0].item() != 1:
        if time.monotonic() > until:
            raise SystemExit("the record has not come into the host's memory")
    found = records[1, RECORD_COMMITTED].item(), records[1, RECORD_IDS : RECORD_IDS + 2].tolist()
    if found != (2, [7, 9]):
        raise SystemExit(f"the record says {found} instead of (2, [7, 9])")
    return {}


def answers(device: str, sm: int, schedule: str) -> dict[str, Any]:
    """Tokens and logits of a toy model, in every format."""
    sys.path.append(str(HERE.parent / "tests"))
    from virtual_gpu.answers import GREEDY, PROMPT, SCHEDULES, toy_model

    from ppsd_rt.engine import Engine

    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = toy_model(Path(name) / "toy")
        for dtype in formats(device, sm):
            engine = Engine.from_pretrained(folder, backend="cuda", device=device, dtype=dtype, exit_head="norm:1")
            logits = engine.backend.logits(PROMPT)[0]
            ids = [list(engine.generate(PROMPT, GREEDY, SCHEDULES[each]).run().ids) for each in ("plain", schedule)]
            if ids[0] != ids[1]:
                raise SystemExit(f"{dtype}: {schedule} gives {ids[1]}, plain decoding {ids[0]}")
            found[dtype] = {"ids": ids[0], "logits": [round(float(value), 4) for value in logits[:32]]}
    return {"formats": found}


def against_golden(found: dict[str, Any]) -> dict[str, Any]:
    """Raises SystemExit where logits are not the virtual GPU's. Tokens may differ, where two were close."""
    golden, told = json.loads(GOLDEN.read_text()), {}
    for dtype, its in found.items():
        largest = max(map(abs, golden[dtype]["logits"]))
        off = max(abs(a - b) for a, b in zip(its["logits"], golden[dtype]["logits"], strict=True)) / largest
        told[dtype] = {"logits off": round(off, 5), "ids alike": its["ids"] == golden[dtype]["ids"]}
        if not off < TOLERANCE:
            raise SystemExit(f"{dtype}: logits differ from the virtual GPU's by {off:.3g} of the largest")
    return told


def step(name: str, options: argparse.Namespace) -> None:
    from ppsd_rt.errors import PpsdError  # before the folder tests/ppsd_rt can be taken for it

    device, sm, gpu = "cuda", 0, None
    if options.virtual:
        sys.path.append(str(HERE.parent / "tests"))
        from virtual_gpu.device import install

        gpu = install(Path(options.virtual).resolve(), options.sm)
        device, sm = "cpu", options.sm
    elif name != "versions":
        import torch

        major, minor = torch.cuda.get_device_capability()
        sm = 10 * major + minor
    if name == "versions":
        result = versions(device)
    elif name in ("kernel", "dependents"):
        result = kernel(device, sm, pdl=name == "dependents" and sm >= 90)
    elif name == "ring":
        result = ring(device)
    else:
        try:
            result = answers(device, sm, "overlap" if name == "overlapped" else "fixed")
        except PpsdError as error:
            raise SystemExit(gpu.fault if gpu and gpu.fault else str(error)) from error
        if not options.write:
            result["golden"] = against_golden(result["formats"])
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)


def attempt(name: str, options: argparse.Namespace, variables: dict[str, str]) -> tuple[dict[str, Any] | None, str]:
    """The step in a process of its own -> its result, or None and why."""
    command = [sys.executable, "-P", __file__, "--step", name, "--sm", str(options.sm)]
    command += ["--virtual", options.virtual] if options.virtual else []
    command += ["--write"] if options.write else []
    limit = STEPS[name][0] * (40 if options.virtual else 1)
    try:
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return None, f"no end after {limit} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1]), ""
    return None, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def memcheck(name: str, options: argparse.Namespace, variables: dict[str, str]) -> str:
    """The step under compute-sanitizer -> its first finding; "" where it finds nothing or is not installed."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if options.virtual or not Path(sanitizer).exists():
        return ""
    command = [sanitizer, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command += [sys.executable, "-P", __file__, "--step", name, "--sm", str(options.sm)]
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=STEPS[name][0])
    except subprocess.TimeoutExpired:
        return f"no end after {STEPS[name][0]} s"
    told = [line for line in done.stdout.splitlines() if line.startswith("========= ") and "SANITIZER" not in line]
    return " ".join(told[:3]) if done.returncode == 9 else ""


def diagnose(
    name: str, options: argparse.Namespace, simple: dict[str, str], switches: list[str], until: float
) -> dict[str, Any]:
    """What more is found out about a step that has failed; the switch that avoids it is added to `switches`."""
    told: dict[str, Any] = {}

    def left() -> bool:
        return time.monotonic() < until

    chosen = {**simple, **dict.fromkeys(switches, "1")}
    if left():
        told["blocking"] = attempt(name, options, {**chosen, "CUDA_LAUNCH_BLOCKING": "1"})[1]
    if left() and (finding := memcheck(name, options, chosen)):
        told["memcheck"] = finding
    for switch in () if name == "versions" else ("", *SWITCHES):  # "": as it was, for it may only have been slow
        if not left() or switch in simple:
            continue
        found, _ = attempt(name, options, {**chosen, **({switch: "1"} if switch else {})})
        if found is not None:
            if switch:
                switches.append(switch)
            return {**told, "found": found, "avoided by": switch or "repeating it"}
    return told


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_smoke", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", default="build/gpu-results/smoke.json")
    parser.add_argument("--virtual", metavar="LIBRARY")
    parser.add_argument("--sm", type=int, default=90, help="of the virtual GPU")
    parser.add_argument("--write", action="store_true", help="the golden values")
    parser.add_argument("--limit", type=float, default=180, metavar="SECONDS", help="for what is repeated")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        step(options.step, options)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"steps": {}, "failed": 0, "switches": []}
    before: dict[str, Any] = {}
    until = time.monotonic() + options.limit
    pool = ThreadPoolExecutor(os.cpu_count())
    first = {name: pool.submit(attempt, name, options, simple) for name, (_, simple) in STEPS.items()}
    for name, (_, simple) in STEPS.items():
        begun = time.monotonic()
        found, why = first[name].result()
        told: dict[str, Any] = {}
        if found is None:
            told = {"failed": why, **diagnose(name, options, simple, results["switches"], until)}
            found = told.pop("found", None)
            results["failed"] += 1
        ids = {dtype: its["ids"] for dtype, its in (found or {}).get("formats", {}).items()}
        if ids and before and ids != before:
            told["failed"] = "other tokens than the step before"
            results["failed"] += 1
        before = ids or before
        results["steps"][name] = {**(found or {}), **told, "seconds": round(time.monotonic() - begun, 1)}
        out.write_text(json.dumps(results) + "\n")
        out.with_name("smoke.env").write_text("".join(f"export {switch}=1\n" for switch in results["switches"]))
        print(f"{name}: {told.get('failed', 'ok')}", file=sys.stderr, flush=True)
        if name == "versions" and found is None:
            break
    if options.write and not results["failed"]:
        GOLDEN.write_text(json.dumps(results["steps"]["captured"]["formats"], indent=1) + "\n")
    print(json.dumps(results))
    return int(results["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
