"""What a plain step has to read, for how many kernels it waits, and what that lets one expect. Needs no GPU.

`python benchmarks/gpu_roofline.py` prints the tables of docs/design/gpu.md, with --cards those of other cards.
The launches of a step are recorded as the stages make them, with tensors that have a shape and no memory. Bytes are
what their programs ask for: weights and the KV cache once; the rows of the pass in every program that multiplies them,
and the cache again where its queries are spread over programs. Neither time is a measurement:

- the law: BANDWIDTH for what is read once, and PHASE for every kernel, as each waits for the one before;
- the prediction: a kernel's bytes and instructions take a time each. Programs of one wave do the same at the same
  moment, so that the shorter time adds to the longer; of several waves, a part of it does. Instructions are counted in
  machine code (RECORD). REACHED and START make it that of 10 kernels which an H200 has timed (VARIANTS), within 15 %.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from ppsd_rt.cuda.stages import DeviceStages
from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.config import model_shapes
from ppsd_rt.models.random_weights import SHAPES
from ppsd_rt.triton_kernels.attention import COLUMNS
from ppsd_rt.triton_kernels.int4 import GROUP
from ppsd_rt.triton_kernels.state import MAX_ROWS

sys.path.append(str(Path(__file__).parents[1] / "tests"))  # which holds a folder triton_kernels too

from machine_code import Launch, identity, recording, weight_bytes

BANDWIDTH, PHASE = 4.3e12, 2e-6  # bytes and seconds: what published step times on an H200 amount to
REACHED, START = 0.9, 3e-6  # of a data sheet's bandwidth and clock; seconds until a row kernel is under way
CONTEXT = 512
TARGETS = {"smollm2-135m": 0.40, "llama-3.2-1b": 0.78, "llama-3.1-8b": 3.9}  # ms, in bfloat16
WIDTHS = {"*fp32": 4, "*bf16": 2}
FORMATS = ("bfloat16", "int8", "int4", "fp8")
RESULTS = Path(__file__).parent / "results"
RECORD = "2026-11-28-gpu-machine-code.json"
HOST = "2026-11-28-amd-epyc-gpu-host-rounds.json"  # what the host does in a round of several answers
VARIANTS = "2026-11-26-nvidia-h200-linear-variants.json"
ANSWERS = {
    "3.6.0": "2026-11-26-nvidia-h200-gpu-check.json",
    "3.6.0 with code of 3.7.1": "2026-11-26-nvidia-h200-triton-3.7.json",
}
RECORDED = {"smollm2-135m": "135M", "llama-3.2-1b": "1B", "llama-3.1-8b": "8B", "bfloat16": "bf16"}  # its names
FIRST = {"qkv": 2, "linear": 1, "swiglu": 1, "heads": 1}  # of a plain step's, among recorded launches of the kernel
TITLE = (
    "| shape | format | launches | weights | KV cache | rows, 1 / 16 | 16 rows / 1 row | law | target |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
KERNELS_TITLE = (
    "| shape | kernel | launches | bytes of one | law | predicted | measured | int8, predicted | int4 | fp8 |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)
CARDS_TITLE = (
    "| card | torch, Triton | format | 135M | 1B | 8B | tok/s are |\n| --- | --- | --- | --- | --- | --- | --- |"
)
COMPANY_TITLE = (
    "| card | format | answers at once | 135M | 1B | 8B | tok/s are |\n| --- | --- | --- | --- | --- | --- | --- |"
)


class Card(NamedTuple):
    """By its data sheet."""

    bandwidth: float  # bytes a second
    multiprocessors: int
    clock: float  # boosted, 1 / s
    sm: int


CARDS = {
    "H200": Card(4.8e12, 132, 1.98e9, 90),
    "H100 SXM": Card(3.35e12, 132, 1.98e9, 90),
    "H100 PCIe": Card(2.0e12, 114, 1.755e9, 90),
    "A100 80 GB": Card(2.04e12, 108, 1.41e9, 80),
    "L40S": Card(0.864e12, 142, 2.52e9, 89),
    "RTX 4090": Card(1.008e12, 128, 2.52e9, 89),
    "RTX 3090": Card(0.936e12, 82, 1.695e9, 86),
}


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
    types, constants = dict(launch.types), launch.named
    if launch.name == "attention":
        heads = constants["HEADS"]
        width, chunks = heads.kv * heads.dim * WIDTHS[types["cache"]], triton.cdiv(rows * heads.columns, COLUMNS)
        return Asked(cache=2 * width * (context + rows), again=2 * width * (context + rows) * (chunks - 1))
    if "weight" not in types:
        return Asked()
    programs, inputs = launch.grid[0], constants["INPUTS"]
    outputs, format, others = programs * constants["BLOCK"], constants["FORMAT"], 0
    if constants.get("KV"):
        others = outputs - constants["HEADS"].queries * constants["HEADS"].dim
    weights = (outputs - others) * row_bytes(format, inputs) + others * row_bytes("int8", inputs)
    return Asked(once=weights, again=programs * rows * inputs * WIDTHS[types["x"]])


def row_bytes(format: str, inputs: int) -> float:
    """Of an output's weights and their scales. format: as constants call it, `plain` being bfloat16."""
    if format == "plain":
        return 2 * inputs
    if format == "fp8":
        return inputs + 4
    return inputs * 17 / 16 if format == "int8" else triton.cdiv(inputs, GROUP) * GROUP * 10 / 16


@cache
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


class Kernel(NamedTuple):
    """Launches of a plain step that are alike, but for where their rows stand."""

    launch: Launch
    launches: int
    number: int  # among recorded launches; 0: of no row kernel

    @property
    def bytes(self) -> float:
        its = asked(self.launch, 1, CONTEXT)
        return its.once + its.cache

    @property
    def law(self) -> float:
        """Seconds of one launch."""
        return self.bytes / BANDWIDTH + PHASE

    def predicted(self, model: str, format: str, card: Card, answers: int = 1) -> float:
        """The same; answers: at once, a row each in tiles of 16, whose programs read the same weights."""
        its, tiles = asked(self.launch, 1, CONTEXT), next(t for t in (1, 2, 4) if answers <= t * MAX_ROWS)
        memory = (its.once + answers * its.cache) / (REACHED * card.bandwidth)
        if not self.number:
            return PHASE + memory
        # Consumer cards run nearly what an A100 does; fp8, which that has not, nearly what an H100 does.
        sm = 90 if card.sm >= 90 or format == "fp8" else 80
        code = recorded()[RECORDED[model], RECORDED.get(format, format), sm, self.launch.name, self.number]
        programs, each = tiles * self.launch.grid[0], weight_bytes(self.launch.named)
        instructions = code["instructions_per_kib"] * programs * each / 1024
        issue = instructions / (4 * REACHED * card.clock * card.multiprocessors)
        waves = max(1.0, programs / (code["programs"] * card.multiprocessors))
        return START + max(memory, issue) + min(memory, issue) / waves

    def measured(self) -> float | None:
        """The same, by an H200 of the tiling in use, where that is among the variants."""
        its = self.launch.named
        if not self.number:
            return None
        names = {"format": "FORMAT", "block": "BLOCK", "parts": "PARTS", "slices": "SLICES", "ahead": "AHEAD"}
        same = {name: its[constant] for name, constant in names.items()}
        same |= {"shape": f"{self.launch.grid[0] * its['BLOCK']}x{its['INPUTS']}", "splits": 1}
        rows = [row for row in read(VARIANTS)["rows"] if same.items() <= row.items()]
        # Barriers of a program are gone from the loops: a warp's remain in bfloat16, where that was timed.
        rows.sort(key=lambda row: row["barrier"] != "warp")
        return rows[0]["microseconds"] * 1e-6 if rows else None


@cache
def read(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / name).read_text()))


@cache
def recorded() -> dict[tuple[Any, ...], dict[str, Any]]:
    """By Triton 3.7.1; the others' is nearly the same."""
    return {identity(row): row for row in read(RECORD)["rows"] if row["triton"] == "3.7.1"}


@cache
def kernels_of(model: str, format: str) -> list[Kernel]:
    launches, numbers, found = step_of(model, format), dict(FIRST), list[Kernel]()

    def shape(launch: Launch) -> tuple[Any, ...]:
        return launch.name, launch.grid, launch.named.get("INPUTS")

    for what, count in Counter(map(shape, launches)).items():
        launch = next(launch for launch in launches if shape(launch) == what)
        found.append(Kernel(launch, count, numbers.get(launch.name, 0)))
        if launch.name in numbers:
            numbers[launch.name] += 1
    return found


def tokens_per_second(model: str, format: str, card: Card, answers: int = 1) -> float:
    """Of plain decoding, predicted; of several answers at once all added up, with the host's part of a round."""
    rows = read(HOST)["rows"] if answers > 1 else ()
    host = sum(row["microseconds"] for row in rows if row["answers"] == answers and row["model"] == model) * 1e-6
    device = sum(each.launches * each.predicted(model, format, card, answers) for each in kernels_of(model, format))
    return answers / (host + device)


def kernel_lines(model: str) -> Iterator[str]:
    """Of those that read weights or the cache; microseconds."""
    card = CARDS["H200"]
    for same in zip(*(kernels_of(model, format) for format in FORMATS), strict=True):
        kernel, measured = same[0], same[0].measured()
        if kernel.bytes:
            inputs = kernel.launch.named.get("INPUTS")
            what = kernel.launch.name + (f", K {inputs}" if inputs else "")
            times = [f"{1e6 * k.predicted(model, f, card):.1f}" for k, f in zip(same, FORMATS, strict=True)]
            yield (
                f"| {model} | {what} | {kernel.launches} | {kernel.bytes / 1e6:.2f} MB | {1e6 * kernel.law:.1f} µs"
                f" | {times[0]} | {f'{1e6 * measured:.1f}' if measured else ''} | {' | '.join(times[1:])} |"
            )


def card_lines() -> Iterator[str]:
    for triton_version, file in ANSWERS.items():
        rates = list[str]()
        for shape in ("135m", "1b", "8b"):
            rows = read(file).get(f"answers-{shape}", {}).get("rows", ())
            rates.append("".join(f"{r['decode_tokens_per_second']:,.0f}" for r in rows if r["schedule"] == "plain"))
        yield f"| H200 | 2.11, {triton_version} | bfloat16 | {' | '.join(rates)} | measured, with older tilings |"
    for name, card in CARDS.items():
        for format in FORMATS:
            if format != "fp8" or card.sm >= 89:
                ours = " | ".join(f"{tokens_per_second(model, format, card):,.0f}" for model in TARGETS)
                yield f"| {name} | from 2.8, from 3.4 | {format} | {ours} | predicted |"


def company_lines() -> Iterator[str]:
    for name in ("H200", "H100 SXM"):
        for format in ("bfloat16", "int4"):
            for answers in (8, 16, 48):
                ours = " | ".join(f"{tokens_per_second(model, format, CARDS[name], answers):,.0f}" for model in TARGETS)
                yield f"| {name} | {format} | {answers} | {ours} | predicted |"


def main(arguments: list[str] | None = None, out: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cards", action="store_true", help="tokens per second of several cards")
    args = parser.parse_args(arguments)
    if args.cards:
        out("\n".join((CARDS_TITLE, *card_lines(), "", COMPANY_TITLE, *company_lines())))
        return 0
    out("\n".join((TITLE, *(line_of(m, f, step_of(m, f)) for m in TARGETS for f in FORMATS))))
    out("\n".join(("", KERNELS_TITLE, *(line for model in TARGETS for line in kernel_lines(model)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
