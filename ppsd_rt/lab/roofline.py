"""What a plain step has to read, and for how many kernels it waits: `python -m ppsd_rt.lab.roofline`. Needs no GPU.

The launches of a step are recorded as the stages make them, with tensors that have a shape and no memory. Bytes are
what their programs ask for: weights and the KV cache once; the rows of the pass in every program that multiplies them,
and the cache again where its queries are spread over programs. The time is a law and no measurement: BANDWIDTH for
what is read once, and PHASE for every kernel, as each waits for the one before. Prints the table of docs/design/gpu.md.
"""

import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import triton

from ..cuda.stages import DeviceStages
from ..cuda.weights import DeviceWeights
from ..models.random_weights import SHAPES
from ..models.shapes import model_shapes
from ..triton_kernels.int4 import GROUP
from ..triton_kernels.machine_code import Launch, recording
from ..triton_kernels.state import MAX_ROWS

BANDWIDTH, PHASE = 4.3e12, 2e-6  # bytes and seconds: what published step times on an H200 amount to
CONTEXT = 512
TARGETS = {"smollm2-135m": 0.40, "llama-3.2-1b": 0.78, "llama-3.1-8b": 3.9}  # ms, in bfloat16
WIDTHS = {"*fp32": 4, "*bf16": 2}
FORMATS = ("bfloat16", "int8", "int4", "fp8")
TITLE = (
    "| shape | format | launches | weights | KV cache | rows, 1 / 16 | 16 rows / 1 row | law | target |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


class Asked(NamedTuple):
    """Bytes."""

    once: float = 0  # weights
    cache: float = 0
    again: float = 0  # rows, and the cache once more

    @property
    def all(self) -> float:
        return sum(self)


def asked(launch: Launch, rows: int, context: int) -> Asked:
    """By the programs of a launch, for so many rows after `context` positions."""
    types, constants = dict(launch.types), dict(launch.constants)
    if launch.name == "attention":
        width = constants["KV_HEADS"] * constants["HEAD_DIM"] * WIDTHS[types["keys"]]
        chunks = triton.cdiv(rows * constants["GROUP"], constants["COLUMNS"])
        return Asked(cache=2 * width * (context + rows), again=2 * width * (context + rows) * (chunks - 1))
    if "weight" not in types:
        return Asked()
    programs, inputs = launch.grid[0], constants["INPUTS"]
    outputs, format, others = programs * constants["BLOCK"], constants["FORMAT"], 0
    if constants.get("KV"):
        others = outputs - constants["HEADS"] * constants["HEAD_DIM"]
    weights = (outputs - others) * row_bytes(format, inputs) + others * row_bytes("int8", inputs)
    return Asked(once=weights, again=programs * rows * inputs * WIDTHS[types["x"]])


def row_bytes(format: str, inputs: int) -> float:
    """Of an output's weights and their scales. format: as constants call it, `plain` being bfloat16."""
    if format == "plain":
        return 2 * inputs
    if format == "fp8":
        return inputs + 4
    return inputs * 17 / 16 if format == "int8" else triton.cdiv(inputs, GROUP) * GROUP * 10 / 16


def step_of(model: str, format: str) -> list[Launch]:
    """The launches of a plain step."""
    config = SHAPES[model]
    shapes = model_shapes(config)
    weights = DeviceWeights.build(config, lambda name: torch.empty(shapes[name], device="meta"), format, "meta")
    stages = DeviceStages(weights, CONTEXT, pdl=True)
    with recording() as launches:
        stages.plain_step()
    return launches


def total(launches: Iterable[Launch], rows: int, context: int = CONTEXT) -> Asked:
    return Asked(*map(sum, zip(*(asked(launch, rows, context) for launch in launches), strict=True)))


def line_of(model: str, format: str, launches: list[Launch]) -> str:
    one, most = total(launches, 1), total(launches, MAX_ROWS)
    law = 1e3 * ((one.once + one.cache) / BANDWIDTH + PHASE * len(launches))
    return (
        f"| {model} | {format} | {len(launches)} | {one.once / 1e6:.0f} MB | {one.cache / 1e6:.0f} MB"
        f" | {one.again / 1e6:.0f} / {most.again / 1e6:.0f} MB | {most.all / one.all:.2f}"
        f" | {law:.2f} ms | " + (f"{TARGETS[model]:.2f} ms |" if format == "bfloat16" else "|")
    )


def main(out: Callable[[str], None] = print) -> int:
    out(TITLE)
    for model in TARGETS:
        for format in FORMATS:
            out(line_of(model, format, step_of(model, format)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
