#!/usr/bin/env python3
"""Compiles on a CPU the kernels that gpu_check.sh's `speed` launches on a GPU, into the folder that it finds them in.

    PYTHONPATH=/folder/of/triton-3.6 python3 benchmarks/gpu_kernels.py --capability 90      for H100 and H200

Triton's own cache holds them. Nothing in its key needs a GPU or a driver, but three things tell two machines apart,
which this module mends where gpu_check.sh names `Carried` to Triton as its cache manager:

- The key has a hash of Triton's files, one of which is another for each version of Python. Here it has Triton's version
  in its place, beside source, options, chip, the assembler's version and the environment.
- A kernel's key depends on which ones the process has launched before it (`_settle_keys`).
- The file that lists a kernel's files has their absolute paths. They are looked for beside it.

What is not there Triton compiles, as ever: nothing but time depends on the folder.

Launches are those of the stages, with tensors that have a shape and no memory. The last line is a JSON object.
"""

import argparse
import importlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import triton
from triton.runtime import cache
from triton.runtime.jit import JITFunction

from ppsd_rt import triton_kernels

FOLDER = Path(__file__).parents[1] / "build/gpu/triton"
# The shapes of gpu_check.sh, the exit layers of their heads, their draft vocabularies, and formats besides bfloat16.
WHOLE = {
    "llama-3.1-8b": (4, 16384, ("int8", "int4", "fp8")),
    "smollm2-135m": (6, 8192, ()),
    "llama-3.2-1b": (2, 16384, ()),
}


class Carried(cache.FileCacheManager):
    def get_group(self, filename: str) -> dict[str, str] | None:
        found = self.get_file(f"__grp__{filename}")
        names = json.loads(Path(found).read_text())["child_paths"] if found else {}
        return {name: self._make_path(name) for name in names if self.has_file(name)} or None


def _settle_keys() -> None:
    """The same in every process. What Triton knows of a function that a kernel calls enters the kernel's key only if
    that function has been read before; so all are read, in one order."""
    cache.triton_key = triton.compiler.compiler.triton_key = lambda: str(triton.__version__)  # 3.4: in the compiler
    for found in pkgutil.iter_modules(triton_kernels.__path__):
        module = importlib.import_module(f"{triton_kernels.__name__}.{found.name}")
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.cache_key  # noqa: B018


_settle_keys()


class Chip:
    """What Triton asks of a driver to compile for its GPU, without a launch."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def compile_only(capability: int, compiled: Callable[[bool], None]) -> None:
    """From now on a launch compiles its kernel and ends there. compiled: told of each whether the cache had it."""
    from triton import knobs
    from triton.runtime import driver

    launched = JITFunction.run

    def run(kernel: JITFunction[Any], *args: Any, warmup: bool, **named: Any) -> Any:
        return launched(kernel, *args, warmup=True, **named)

    JITFunction.run = run
    driver.set_active(Chip(capability))
    knobs.compilation.listener = lambda **told: compiled(told["cache_hit"])


def draw_nothing() -> None:
    """Random weights have a shape from now on, and no memory."""
    from ppsd_rt.cuda.weights import _Dice

    _Dice.__init__ = lambda self, shapes, *_: vars(self).update(shapes=shapes, device="meta", scale=1.0, generator=None)


def every_stage(weights: Any, capacity: int, cuts: tuple[int, ...], *, pdl: bool) -> None:
    """All that an answer alone launches: a prompt, draft steps and passes, logits."""
    from ppsd_rt.cuda.stages import DeviceStages

    stages = DeviceStages(weights, capacity, cuts, pdl=pdl)
    stages._prompt.run(0, 64)
    stages.round(int(weights.head is not None))
    stages._logits(0, 1)


def wanted(formats: set[str] | None, models: set[str] | None) -> Iterator[tuple[str, Any, int, tuple[int, ...]]]:
    """What, weights, the longest text, the cuts of verification."""
    import gpu_sanitize

    from ppsd_rt.cuda.weights import DeviceWeights
    from ppsd_rt.models.config import LlamaConfig
    from ppsd_rt.models.random_weights import SHAPES

    draw_nothing()
    for name, (exit_layer, vocabulary, others) in WHOLE.items():
        for format in ("bfloat16", *others):
            if (models and name not in models) or (formats and format not in formats):
                continue
            weights = DeviceWeights.random(SHAPES[name], format, "meta")
            yield f"{name} {format}", weights, 2048, ()
            if format == "bfloat16":
                head = weights.with_random_head("norm", exit_layer, range(vocabulary))
                yield f"{name} {format}, exit head", head, 2048, ()
    for heads in gpu_sanitize.HEADS if not models else ():
        weights = DeviceWeights.random(LlamaConfig.from_dict({**gpu_sanitize.CONFIG, **heads}), "int4", "meta")
        yield "memcheck int4", weights.with_random_head("feedback", 1, range(0, 259, 2)), 512, (2,)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--capability", type=int, default=90, help="of the GPU: 90, 80")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--models", help=f"of {', '.join(WHOLE)}; all, and memcheck's, if not given")
    parser.add_argument("--formats", help="of these models")
    options = parser.parse_args()
    os.environ |= {
        "TRITON_CACHE_DIR": str(options.out.absolute()),
        "TRITON_CACHE_MANAGER": "gpu_kernels:Carried",
        "TRITON_STORE_BINARY_ONLY": "1",
    }
    hits: list[bool] = []
    compile_only(options.capability, hits.append)
    models, formats = (each and set(each.split(",")) for each in (options.models, options.formats))
    begun = time.perf_counter()
    for what, weights, capacity, cuts in wanted(formats, models):
        before = len(hits)
        every_stage(weights, capacity, cuts, pdl=options.capability >= 90)
        here = hits[before:]
        print(f"{what}: {len(here)} kernels, {len(here) - sum(here)} compiled", file=sys.stderr, flush=True)
    for source in options.out.rglob("*.source"):  # nobody asks for it
        source.unlink()
    size = sum(file.stat().st_size for file in options.out.rglob("*") if file.is_file())
    found = {"triton": triton.__version__, "capability": options.capability, "kernels": len(hits)}
    print(
        json.dumps(
            {
                **found,
                "compiled": len(hits) - sum(hits),
                "megabytes": round(size / 1e6, 1),
                "seconds": round(time.perf_counter() - begun, 1),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
