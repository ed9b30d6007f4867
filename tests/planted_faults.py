"""Faults planted one at a time: `make test` has to find each. Changes the sources and puts them back; minutes for each.

    python tests/planted_faults.py [WORD ...]     those with a WORD in their line; without one, all

Named is where it is looked for first: a file that finds it, so that not all tests run for each.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = "ppsd_rt/cpu/test_loop.py ppsd_rt/test_many.py ppsd_rt/test_many_at_once.py"
# area, file, what stands there, what is put there, tests
FAULTS = (
    ("kernels: a window is a row longer", "csrc/cpu/kernels/attention.h",
     "queries[i].position - phase.window + 1)", "queries[i].position - phase.window)", "ppsd_rt/cpu/test_families.py"),
    ("kernels: a repetition penalty rewards", "csrc/cpu/kernels/head.h",
     "Simd::mul(y, penalty), Simd::div(y, penalty)", "Simd::div(y, penalty), Simd::mul(y, penalty)",
     "ppsd_rt/sampling/test_sampling.py"),
    ("kernels: Triton's window is a row longer", "triton_kernels/attention.py",
     "(start + row - WINDOW)[None, :]", "(start + row - WINDOW - 1)[None, :]", "triton_kernels/test_attention.py"),
    ("scheduler: verdicts of an older epoch count", "csrc/core/scheduler.cpp",
     "verdict.epoch != epoch()", "verdict.epoch > epoch()", "ppsd_rt/pipeline/test_loop.py ppsd_rt/ranks"),
    ("scheduler: an end does not end a verdict", "csrc/core/scheduler.cpp",
     "if (!foreseen || finished_) break;", "if (!foreseen) break;", "ppsd_rt/pipeline/test_scheduler.py"),
    ("scheduler: a rejected row counts as good", "csrc/core/scheduler.cpp",
     "std::min(drafted_rows_, text_.size() - 1)", "std::min(drafted_rows_, text_.size())",
     "ppsd_rt/pipeline/test_scheduler.py"),
    ("scheduler: on a GPU a pass of an older epoch counts", "triton_kernels/verdict.py",
     "valid = (rows > 0) & (its_epoch == epoch)", "valid = rows > 0", "triton_kernels/test_verdict.py"),
    ("blocks: rows of another text are copied", "csrc/loop/blocks.cpp",
     "if (other->first.first != before) return;", "", BLOCKS),
    ("blocks: what a block held is not forgotten", "csrc/loop/blocks.cpp",
     "    index_.erase(states_[block].key);\n", "", BLOCKS),
    ("blocks: a block like another one leaks", "csrc/loop/blocks.cpp",
     "    hold(other->second);\n    release(block);\n", "    hold(other->second);\n", BLOCKS),
    ("blocks: a shared block is not held", "csrc/loop/blocks.cpp",
     "  hold(found->second);\n", "", BLOCKS),
    ("blocks: a block that another text holds is handed out", "csrc/loop/blocks.cpp",
     "if (--state.holders > 0) return;", "if (--state.holders > 1) return;", BLOCKS),
    ("blocks: one row too many is copied", "csrc/loop/blocks.cpp",
     "const int same = int(differ.first - wanted.second.begin());",
     "const int same = std::min(most, int(differ.first - wanted.second.begin()) + 1);", BLOCKS),
    ("protocol: a log-probability is its id", "csrc/stages/pass.cpp",
     "tables.value(top.first), tables.value(top.second)", "tables.value(top.first), tables.value(top.first)",
     "ppsd_rt/ranks/test_loop.py"),
    ("protocol: ranks of two formats meet", "ppsd_rt/ranks/launch.py",
     "in facts[0].items():", "in [*facts[0].items()][:4]:",
     "ppsd_rt/ranks/test_start.py"),
    ("protocol: messages are sent without their length", "ppsd_rt/ranks/control.py",
     "message[0] = len(raw)", "message[0] = 0", "ppsd_rt/ranks"),
    ("server: an empty key opens", "ppsd_rt/serve/guard.py",
     'not hmac.compare_digest(given.strip().encode("latin-1"), key.encode())',
     'not key.encode().startswith(given.strip().encode("latin-1"))', "ppsd_rt/serve"),
    ("server: a body may be sent in pieces of any sum", "ppsd_rt/serve/guard.py",
     "        self.check(self._size)\n", "", "ppsd_rt/serve"),
    ("server: answers that have ended keep their places", "ppsd_rt/serve/admission.py",
     "        self._admission.waiting -= self._waiting\n", "", "ppsd_rt/serve"),
    ("files: a shard's tensor is taken from another", "models/checkpoint.py",
     "if weight_map.get(name) == shard}", "if name in weight_map}", "models/test_checkpoint.py"),
    ("files: a write that fails leaves half a file", "ppsd_rt/files/output.py",
     "            Path(unfinished).unlink(missing_ok=True)\n            raise", "            raise",
     "ppsd_rt/files/test_output_file.py"),
    ("files: a GGUF tensor is read 32 bytes early", "models/gguf_model.py",
     "[tensor.start : tensor.start + size]", "[tensor.start - 32 : tensor.start - 32 + size]",
     "models/test_gguf_model.py"),
)  # fmt: skip


def run(*command: str) -> int:
    environment = {**os.environ, "PPSD_TESTING": "ON", "PPSD_KERNELS": os.environ.get("PPSD_KERNELS", "native")}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode


def found(path: Path, old: str, new: str, tests: str) -> bool:
    source = path.read_text()
    assert source.count(old) == 1, f"{path} has changed: {old!r} is there {source.count(old)} times"
    path.write_text(source.replace(old, new))
    try:
        if path.suffix in (".cpp", ".h") and run(sys.executable, "setup.py", "-q", "build_ext", "--inplace"):
            raise SystemExit(f"{new!r} does not compile")
        named = [f"tests/{name}" for name in tests.split()]
        code = run(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:schemathesis", "-m", "not slow", *named)
        return code == 1 or code < 0  # a test fails, or a signal has ended them all
    finally:
        path.write_text(source)


if __name__ == "__main__":
    wanted = [fault for fault in FAULTS if not sys.argv[1:] or any(word in fault[0] for word in sys.argv[1:])]
    missed = 0
    for name, file, old, new, tests in wanted:
        caught = found(ROOT / file, old, new, tests)
        missed += not caught
        print(f"{'found ' if caught else 'MISSED'}  {name}", flush=True)
    if any(file.startswith("csrc") for _, file, *_ in wanted):
        run(sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    raise SystemExit(missed)
