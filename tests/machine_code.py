"""What the compiler makes of the kernels: `python -P tests/machine_code.py`. Needs no GPU.

Every launch of a model's decoding step is recorded from the functions that make it (with tensors that have a shape and
no memory), compiled for Hopper and Ampere, and its machine code is checked: nothing spilled, weights loaded 16 bytes at
a time and, on Hopper, as many as meant before the wait for the kernel ahead, matrix instructions, no atomics, and (on
Hopper) at most half a multiprocessor's registers and shared memory, so that two stages can share it. The kernels of a
prompt pass may have all of it. The loop over K of a row's kernels has neither barriers nor shared memory. Variants of a
kernel that have to give the same bits, with and without other texts, must do the same arithmetic. Prints a
table; exit status 1 where a check fails.

--beside FILE also compares instructions with those that --json has recorded, of whatever Triton needs fewest. What is
imported as Triton compiles: PYTHONPATH chooses another one.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from ppsd_rt.models.head_file import DISTANCES
from ppsd_rt.triton_kernels import int4
from ppsd_rt.triton_kernels.attention import Partials, attention
from ppsd_rt.triton_kernels.cache import PAGE
from ppsd_rt.triton_kernels.embedding import embedding
from ppsd_rt.triton_kernels.feedback import feedback
from ppsd_rt.triton_kernels.heads import SAMPLING_WORDS, Scratch, heads
from ppsd_rt.triton_kernels.linear import INT8_BLOCK, Weight, linear, tiling
from ppsd_rt.triton_kernels.prompt_attention import prompt_attention
from ppsd_rt.triton_kernels.prompt_layers import normalise, prompt_linear, prompt_qkv, prompt_swiglu
from ppsd_rt.triton_kernels.qkv import qkv
from ppsd_rt.triton_kernels.state import (
    DRAFT_WORDS,
    MAIL_SLOTS,
    MAX_ROWS,
    OFFER_WORDS,
    RING_WORDS,
    WORDS,
)
from ppsd_rt.triton_kernels.swiglu import swiglu
from ppsd_rt.triton_kernels.texts import TEXT_WORDS, Texts
from ppsd_rt.triton_kernels.verdict import arrived, begin_draft, begin_verification, drafted, fetch, post, verdict

REGISTERS = 65536  # of a multiprocessor
BUDGETS = {90: (REGISTERS // 2, 227 * 1024 // 2), 80: (REGISTERS, 163 * 1024)}  # registers, bytes of shared memory
WHOLE = {90: (REGISTERS, 227 * 1024), 80: (REGISTERS, 163 * 1024)}
LEAST_AHEAD = 8 * 1024  # bytes of weights that the programs of a multiprocessor have on the way
MORE_INSTRUCTIONS = 1.3  # than the Triton that needs fewest
MEETING = ("BAR", "LDS", "LDSM", "STS", "STSM", "ATOMS")  # of a program's warps
WEIGHT = {"plain": 2.0, "int8": 1.0, "int4": 0.5, "fp8": 1.0}  # bytes
WIDER = {"int4": "int8"}  # what a format leaves to another: keys and values, and the LM head
COMPANY = ("texts", "tables", "tiles")  # what launches of rows with company are told besides
OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")
POINTERS = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32",
    torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip


class Shape(NamedTuple):
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


SHAPES = {
    "135M": Shape(576, 1536, 9, 3, 64, 49152),
    "1B": Shape(2048, 8192, 32, 8, 64, 128256),
    "8B": Shape(4096, 14336, 32, 8, 128, 128256),
    "13B": Shape(5120, 13824, 40, 40, 128, 32000),
    "70B": Shape(8192, 28672, 64, 8, 128, 32000),
}


class Launch(NamedTuple):
    """One kernel as it would be launched."""

    kernel: JITFunction[Any]
    types: tuple[tuple[str, str], ...]  # argument, type; "constexpr" for constants
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]  # arguments that are multiples of 16
    grid: tuple[int, ...]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__).removesuffix("_kernel")

    @property
    def named(self) -> dict[str, Any]:
        """Its constants, and each of those of its matrices."""
        constants = dict(self.constants)
        for name, prefix in (("W", ""), ("KV", "KV_")):
            fields = constants[name]._asdict() if constants.get(name) else {}
            constants |= {prefix + field.upper(): value for field, value in fields.items()}
        return constants

    @property
    def title(self) -> str:
        """Tells rows of several texts apart."""
        constants = dict(self.constants)
        return self.name + ("_texts" if max(constants.get("TILES", 1), constants.get("TEXT_TILES", 0)) > 1 else "")


class Report(NamedTuple):
    name: str
    capability: int
    warps: int
    registers: int
    local: int  # bytes of stack and local memory of a thread
    shared: int
    instructions: tuple[str, ...]  # in order
    weights: bool  # does it read a weight matrix?
    scales: bool
    matrix: bool  # is it meant to use matrix instructions?
    pdl: bool
    locks: bool = False  # does it take turns with others by a lock, or tell the host?
    counters: int = 0  # of programs that have arrived
    prompt: bool = False  # launched for a prompt: alone on the device, no matter when
    ways: int = 1  # through the program: each has a wait of its own
    bar: int = 0  # bytes of weights that have to be on the way before the wait
    per_weights: float = 0.0  # instructions of all warps for a KiB of weights; of several ways the mean
    unawaited: bool = False  # are registers read by warp-group instructions that the program does not wait for?
    arithmetic: tuple[tuple[str, int], ...] = ()  # floating-point instructions, by kind
    loop: tuple[str, ...] = ()  # instructions of loops over K, or where there is none, from matrix product to product

    def count(self, *operations: str) -> int:
        return sum(i.split(".")[0] in operations for i in self.instructions)

    @property
    def ahead(self) -> int:
        """Bytes of weights that a program has on the way before it waits; of several ways through it the least. Without
        a wait: before the first matrix instruction."""
        found, bytes = list[int](), 0
        for i in self.instructions:
            if i.startswith("ACQBULK") or (not self.pdl and bytes and i.startswith("HMMA")):
                found.append(bytes * self.warps * 32)
                if not self.pdl:
                    break
                bytes = 0
            elif i.startswith("HMMA"):
                bytes = 0
            elif i.startswith("LDG.E.EF"):
                bytes += loaded(i)
        return min(found, default=0)

    @property
    def programs(self) -> int:
        """How many a multiprocessor holds."""
        registers, shared = WHOLE[self.capability]
        of_program = -(-self.registers // 8) * 8 * 32 * self.warps
        return min(registers // of_program, shared // (self.shared + 1024), 64 // self.warps)

    def faults(self) -> list[str]:
        found = []
        if self.local or self.count("LDL", "STL"):
            found.append(f"{self.local} bytes of local memory: registers are spilled")
        atomics = self.count("ATOM", "ATOMG", "ATOMS", "RED")
        if not self.locks and atomics > self.counters:
            found.append(f"{atomics} atomics for {self.counters} counters: the order of additions may not be fixed")
        if self.matrix and not self.count("HMMA", "HGMMA"):
            found.append("no matrix instructions")
        if self.prompt and self.matrix and self.capability >= 90 and not self.count("HGMMA"):
            found.append("no warp-group matrix instructions")
        if self.unawaited:
            found.append("registers that a matrix instruction reads may be written before it has ended")
        registers, shared = (WHOLE if self.prompt else BUDGETS)[self.capability]
        if self.registers * self.warps * 32 > registers:
            found.append(f"{self.registers} registers a thread are more than the budget of {registers} a program")
        if self.shared > shared:
            found.append(f"{self.shared} bytes of shared memory are more than the budget of {shared}")
        copies = [i for i in self.instructions if i.startswith("LDGSTS")]
        if self.prompt:
            narrow = [i for i in copies if not i.endswith(".128")]  # of int8 a tile has two scales a row
            if self.matrix and (len(narrow) == len(copies) or (narrow and not self.scales)):
                found.append("tiles are not copied 16 bytes at a time")
            return found
        return found + self._of_decoding()

    def _of_decoding(self) -> list[str]:
        found = []
        # Only the loads of weights are marked evict-first, which tells them from all others.
        weights = [place for place, i in enumerate(self.instructions) if i.startswith("LDG.E.EF")]
        if self.weights and not (weights and all(self.instructions[place].endswith(".128") for place in weights)):
            found.append("weights are not loaded 16 bytes at a time")
        if self.weights and (meeting := sorted({i for i in self.loop if i.split(".")[0] in MEETING})):
            found.append(f"the loop over K has {', '.join(meeting)}")
        if self.bar and self.ahead * self.programs < min(LEAST_AHEAD, self.bar * self.programs):
            found.append(f"a multiprocessor has {self.ahead * self.programs} bytes of weights on the way")
        waits = [place for place, i in enumerate(self.instructions) if i.startswith("ACQBULK")]
        if self.pdl and len(waits) != self.ways:
            found.append(f"{len(waits)} waits for the kernel ahead instead of {self.ways}")
        elif self.pdl:
            early = [i for i in self.instructions[: waits[0]] if i.startswith(("LDG", "LDGSTS"))]
            if self.ahead < self.bar:
                found.append(f"{self.ahead} bytes of weights are on the way before the wait instead of {self.bar}")
            if not self.scales and any(".EF" not in i for i in early):
                found.append("something other than weights is read before the wait")
        return found


def loaded(instruction: str) -> int:
    """Bytes that a thread loads."""
    width = instruction.split(".")[-1].removeprefix("U")
    return int(width) // 8 if width.isdigit() else 4


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collects what would be launched."""
    launches: list[Launch] = []

    def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = tuple((name, named.pop(name)) for name in OPTIONS if name in named)
        values = dict(zip(kernel.arg_names, args, strict=False)) | named
        types, constants, aligned = [], [], []
        for place, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr or value is None:
                types.append((parameter.name, "constexpr"))
                constants.append((parameter.name, value))
            else:
                types.append((parameter.name, type_of(value)))
                if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                    aligned.append(place)
        launches.append(Launch(kernel, tuple(types), tuple(constants), options, tuple(aligned), tuple(grid)))

    with patch.object(JITFunction, "run", run):
        yield launches


def type_of(value: Any) -> str:
    return POINTERS[value.dtype] if isinstance(value, Tensor) else "i32" if isinstance(value, int) else "fp32"


def decoding_step(shape: Shape, format: str, *, pdl: bool) -> list[Launch]:
    """All kernels of one step, with and without a draft vocabulary, each once."""
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    words = partial(torch.empty, device="meta", dtype=torch.int32)
    wide = partial(torch.empty, device="meta", dtype=torch.float32)

    weight = partial(meta_weight, format=format)
    capacity, queries_width, eps = 8192, shape.heads * shape.head_dim, 1e-5
    x, norm, state, text = wide(capacity, shape.hidden), empty(shape.hidden), words(WORDS), words(capacity)
    rounded = empty(MAX_ROWS, shape.hidden)
    queries, mixed = wide(MAX_ROWS, shape.heads, shape.head_dim), empty(MAX_ROWS, shape.heads, shape.head_dim)
    cache, rotations = meta_cache(shape, capacity), wide(capacity, shape.head_dim)
    choices, chances, inner = words(MAX_ROWS), wide(MAX_ROWS), empty(MAX_ROWS, shape.inner)
    confidences = wide(capacity)
    hidden = (MAX_ROWS, shape.hidden)
    lm_head = meta_weight(shape.vocabulary, shape.hidden, WIDER.get(format, format))
    draft_head = weight(16384, shape.hidden)
    out, down = weight(shape.hidden, queries_width), weight(shape.hidden, shape.inner)

    def add(rows: Tensor, matrix: Weight) -> None:
        partials = wide(tiling(matrix).splits, MAX_ROWS, matrix.outputs)
        linear(rows, matrix, x, state, residual=x, rounded=rounded, partial=partials, pdl=pdl)

    with recording() as launches:
        embedding(text, empty(shape.vocabulary, shape.hidden), x, rounded, state, pdl=pdl)
        projections, kv = meta_projections(shape, format)
        qkv_of = partial(qkv, kv=kv, pdl=pdl)
        for rows in (x, rounded):  # of another pass, of this one
            qkv_of(rows, norm, eps, projections, None, rotations, queries, cache, state)
        partials = Partials(shape.heads, shape.kv_heads, shape.head_dim, "meta")
        attention(queries, cache, partials, mixed, state, pdl=pdl)
        norms = empty(2, shape.head_dim)
        qkv_of(rounded, norm, eps, projections, None, rotations, queries, cache, state, norms=norms)
        attention(queries, cache, partials, mixed, state, window=1000, pdl=pdl)
        add(mixed, out)
        swiglu(rounded, norm, eps, weight(2 * shape.inner, shape.hidden), inner, state, pdl=pdl)
        add(inner, down)
        add(empty(MAX_ROWS, 4864), weight(896, 4864))  # one that is cut along K: `down` of Qwen2.5-0.5B
        feedback(x, x, norm, eps, weight(DISTANCES * shape.hidden, shape.hidden), wide(*hidden), state, pdl=pdl)
        for rows, head, draft_ids in ((rounded, lm_head, None), (x, lm_head, None), (x, draft_head, words(16384))):
            heads(
                rows, norm, eps, head, words(SAMPLING_WORDS), Scratch(head), choices, chances, state,
                draft_ids=draft_ids, pdl=pdl,
            )  # fmt: skip
        begin_draft(text, confidences, text, words(OFFER_WORDS), state, state, state, pdl=pdl)
        arrived(state, state, pdl=pdl)
        drafted(
            text, choices, chances, confidences, text, text, state, state, state, words(64, DRAFT_WORDS),
            vocabulary=shape.vocabulary, pdl=pdl,
        )  # fmt: skip
        begin_verification(state, state, state, pdl=pdl)
        verdict(text, choices, confidences, text, state, state, words(64, RING_WORDS), pdl=pdl)
        post(state, words(MAIL_SLOTS, WORDS), state, pdl=pdl)
        fetch(words(MAIL_SLOTS, WORDS), state, state, pdl=pdl)
        texts, count = Texts(2, words(2 * MAX_ROWS, TEXT_WORDS), words(capacity)), 2 * MAX_ROWS
        x, rounded, inner = wide(count, shape.hidden), empty(count, shape.hidden), empty(count, shape.inner)
        queries, mixed = wide(count, shape.heads, shape.head_dim), empty(count, shape.heads, shape.head_dim)
        for rows in (x, rounded):
            qkv_of(rows, norm, eps, projections, None, rotations, queries, cache, state, texts=texts)
        partials = Partials(shape.heads, shape.kv_heads, shape.head_dim, "meta", texts.tiles)
        attention(queries, cache, partials, mixed, state, texts=texts, pdl=pdl)
        linear(mixed, out, x, state, residual=x, rounded=rounded, texts=texts, pdl=pdl)
        swiglu(rounded, norm, eps, weight(2 * shape.inner, shape.hidden), inner, state, texts=texts, pdl=pdl)
        heads(
            x, norm, eps, lm_head, state, Scratch(lm_head, texts.tiles), words(count), wide(count), state,
            logits=wide(count, shape.vocabulary), texts=texts, pdl=pdl,
        )  # fmt: skip
    return once(launches)


def prompt_pass(shape: Shape, format: str) -> list[Launch]:
    """All kernels of a prompt pass, each once."""
    empty, wide = partial(torch.empty, device="meta", dtype=torch.bfloat16), partial(torch.empty, device="meta")
    rows, capacity, width = 1024, 8192, shape.heads * shape.head_dim
    x, normed, inner = wide(rows, shape.hidden), empty(rows, shape.hidden), empty(rows, shape.inner)
    queries, cache, rotations = (
        empty(rows, shape.heads, shape.head_dim),
        meta_cache(shape, capacity),
        wide(capacity, width),
    )
    pages = torch.empty(capacity // PAGE, dtype=torch.int32, device="meta")
    with recording() as launches:
        normalise(x, empty(shape.hidden), 1e-5, normed)
        projections, kv = meta_projections(shape, format)
        for norms, window in ((None, None), (empty(2, shape.head_dim), 1000)):
            prompt_qkv(normed, projections, None, rotations, queries, cache, pages, 0, kv=kv, norms=norms, eps=1e-5)
            prompt_attention(queries, cache, pages, queries, 0, window)
        prompt_linear(queries.view(rows, width), meta_weight(shape.hidden, width, format), x, residual=x)
        prompt_swiglu(normed, meta_weight(2 * shape.inner, shape.hidden, format), inner)
        prompt_linear(inner, meta_weight(shape.hidden, shape.inner, format), x, residual=x)
    return once(launches)


def once(launches: list[Launch]) -> list[Launch]:
    """Each, whatever its grid: that changes no code."""
    return list(dict.fromkeys(launch._replace(grid=()) for launch in launches))


def meta_cache(shape: Shape, capacity: int) -> Tensor:
    size = capacity // PAGE, 2 * shape.kv_heads, PAGE, shape.head_dim
    return torch.empty(size, device="meta", dtype=torch.bfloat16)


def meta_weight(outputs: int, inputs: int, format: str) -> Weight:
    """format: as constants call it (`Weight.format`)."""
    empty = partial(torch.empty, device="meta")
    if format == "plain":
        return Weight(empty(outputs, inputs, dtype=torch.bfloat16))
    if format == "fp8":
        return Weight(empty(outputs, inputs, dtype=torch.float8_e4m3fn), empty(outputs))
    if format == "int4":
        groups = triton.cdiv(inputs, int4.GROUP)
        words = partial(empty, dtype=torch.int32)
        return Weight(words(outputs, groups * 16), words(outputs, groups * 4), inputs)
    scales = empty(outputs, inputs // INT8_BLOCK, dtype=torch.float16)
    return Weight(empty(outputs, inputs, dtype=torch.int8), scales)


def meta_projections(shape: Shape, format: str) -> tuple[Weight, Weight | None]:
    """Of queries, keys and values: one matrix, or that of the queries and another."""
    of_queries, others = shape.heads * shape.head_dim, 2 * shape.kv_heads * shape.head_dim
    if format not in WIDER:
        return meta_weight(of_queries + others, shape.hidden, format), None
    return meta_weight(of_queries, shape.hidden, format), meta_weight(others, shape.hidden, WIDER[format])


def examine(launch: Launch, capability: int) -> Report:
    """Compile for sm_{capability}, disassemble, read."""
    source = ASTSource(
        launch.kernel,
        dict(launch.types),
        dict(launch.constants),
        {(i,): [["tt.divisibility", 16]] for i in launch.aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(launch.options))
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, option, file.name], check=True, capture_output=True, text=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    used = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    instructions, loops = parsed(code)
    unawaited = re.search(r"HGMMA\S*\s+R\d+,\s*R\d+", code) and re.search(r"DEPBAR\.LE gsb0, 0x0*[1-9a-f]", code)
    constants, options = launch.named, dict(launch.options)
    weights = "weight" in launch.kernel.arg_names
    its_bytes = weight_bytes(constants) if weights and "STEPS" in constants else 0
    bar = its_bytes * constants["AHEAD"] / constants["STEPS"] if its_bytes else 0
    if its_bytes and constants.get("KV"):
        of_kv = weight_bytes(constants | {"FORMAT": constants["KV_FORMAT"]})
        bar = min(bar, of_kv * constants["KV_AHEAD"] / constants["KV_STEPS"])
    early = launch.name != "feedback"  # its matrix is chosen ahead of it
    ways = 2 if constants.get("KV") else 1
    work = executed(instructions, loops, constants) * options["num_warps"] / ways if its_bytes else 0
    return Report(
        launch.title, capability, options["num_warps"], used["REG"], used["STACK"] + used["LOCAL"],
        compiled.metadata.shared, tuple(instructions), weights, constants.get("FORMAT", "plain") != "plain",
        weights or launch.name.endswith("attention"), constants.get("PDL", False),
        launch.kernel.__module__.endswith(".verdict"), int("arrived" in launch.kernel.arg_names),
        ".prompt_" in launch.kernel.__module__,
        ways,
        int(min(its_bytes, bar)) if its_bytes and early else 0,
        work / (its_bytes / 1024) if its_bytes else 0.0,
        bool(unawaited), arithmetic(code), over_k(instructions, loops),
    )  # fmt: skip


def weight_bytes(constants: dict[str, Any]) -> float:
    """That a program reads, scales not counted."""
    return constants["BLOCK"] * constants["INPUTS"] * WEIGHT[constants["FORMAT"]] / constants.get("SPLITS", 1)


def parsed(code: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Of disassembled code: the instructions, and the loops, [first, last) of these."""
    instructions, loops, labels = list[str](), list[tuple[int, int]](), dict[str, int]()
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)", line):
            instructions.append(found[1])
            target = re.search(r"\.L_x_\d+", found[2]) if found[1] == "BRA" else None
            if target and target[0] in labels:
                loops.append((labels[target[0]], len(instructions)))
    return instructions, loops


def arithmetic(code: str) -> tuple[tuple[str, int], ...]:
    """Of disassembled code: floating-point instructions and how many of each.

    Not additions, which ptxas may put on both sides of a branch: one that was fused with a product is missed there.
    """
    found = re.findall(r"\s(FMUL|FFMA|MUFU|HADD2|HMUL2|HFMA2|HMMA|HGMMA)[A-Z0-9_.]* ", code)
    return tuple(sorted(Counter(found).items()))


def variants(launch: Launch) -> Launch:
    """The same for all launches that have to give the same bits, but for those of attention over several texts: most of
    their columns are dead, and the compiler leaves them out."""
    constants = tuple((name, value) for name, value in launch.constants if name.lower() not in COMPANY)
    types = tuple((name, type) for name, type in launch.types if name.lower() not in COMPANY)
    return launch._replace(constants=constants, types=types, aligned=())


def executed(instructions: list[str], loops: list[tuple[int, int]], constants: dict[str, Any]) -> int:
    """Instructions that a warp executes: those of the loop over K in each of its rounds, all others once."""
    rounds = -(-constants["STEPS"] // constants["AHEAD"])
    return len(instructions) + (rounds - 1) * len(over_k(instructions, loops) if rounds > 1 else ())


def over_k(instructions: list[str], loops: list[tuple[int, int]]) -> tuple[str, ...]:
    """Of the loops over K. Where matrix products are in no loop, from the first one to the last load of weights, in a
    program of one way: what meets later may stand between the last products."""
    products = [place for place, i in enumerate(instructions) if i.startswith("HMMA")]
    ranges = [(first, last) for first, last in loops if any(first <= place < last for place in products)]
    if not ranges and products and sum(i.startswith("ACQBULK") for i in instructions) < 2:
        weights = [place for place, i in enumerate(instructions) if i.startswith("LDG.E.EF")]
        ranges = [(products[0], max(weights, default=0))]
    return tuple(i for first, last in ranges for i in instructions[first:last])


def table_of(model: str, format: str, launch: Launch, report: Report, faults: list[str]) -> str:
    counts = Counter(i.split(".")[0] for i in report.instructions)
    constants = launch.named
    size = f"{constants['OUTPUTS']}x{constants['INPUTS']}" if "OUTPUTS" in constants and "INPUTS" in constants else ""
    wide = sum(i.endswith(".128") for i in report.instructions if i.startswith(("LDG", "LDGSTS")))
    return (
        f"{model:5} {format:5} sm_{report.capability} {report.name:19} {size:12} {report.warps:5} {report.registers:9}"
        f" {report.local:5} {report.shared:7} {counts['HMMA'] + counts['HGMMA']:6} {wide:8} {report.ahead:6}"
        f" {report.per_weights:7.0f}  " + ("; ".join(faults) or "ok")
    )


def main(arguments: list[str] | None = None, out: Callable[[str], None] = print) -> int:
    parser = argparse.ArgumentParser(prog="machine_code", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--formats", default="bf16,int8,int4,fp8")
    parser.add_argument("--capabilities", default="90,80")
    parser.add_argument("--kernels", help="of the launches' names; all, if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="to which what was found is added")
    parser.add_argument(
        "--beside", type=Path, metavar="FILE", help="with whose instructions this Triton's are compared"
    )
    options = parser.parse_args(arguments)
    faulty, found = 0, list[dict[str, Any]]()
    best = fewest(json.loads(options.beside.read_text())["rows"]) if options.beside else {}
    # ahead: bytes of weights on the way before the wait; per KiB: instructions of its warps for 1024 bytes of weights
    title = "model form  chip  kernel              shape        warps registers local  shared matrix 16-byte  ahead"
    out(title + " per KiB  checks")
    for capability in map(int, options.capabilities.split(",")):
        done: set[Launch] = set()
        alike: dict[Launch, tuple[tuple[str, int], ...]] = {}
        for model in options.models.split(","):
            for format in options.formats.split(","):
                if format == "fp8" and capability < 89:
                    continue  # which has no conversions of it
                weights = format if format in WEIGHT else "plain"
                launches = decoding_step(SHAPES[model], weights, pdl=capability >= 90)
                numbers = Counter[str]()
                for launch in [*launches, *prompt_pass(SHAPES[model], weights)]:
                    numbers[launch.title] += 1
                    if launch in done or (options.kernels and launch.title not in options.kernels.split(",")):
                        continue
                    done.add(launch)
                    report = examine(launch, capability)
                    same = report.locks or alike.setdefault(variants(launch), report.arithmetic) == report.arithmetic
                    faults = [*report.faults(), *([] if same else ["other arithmetic than its variant"])]
                    row = row_of(model, format, launch, report, numbers[launch.title], faults)
                    least = best.get(identity(row), 0)
                    if least and report.per_weights > MORE_INSTRUCTIONS * least:
                        faults.append(f"{report.per_weights / least:.2f} times the instructions of the best Triton")
                    found.append(row)
                    out(table_of(model, format, launch, report, faults))
                    faulty += bool(faults)
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.exists() else {"rows": []}
        ours = {(row["triton"], identity(row)) for row in found}
        kept = [row for row in before.pop("rows") if (row["triton"], identity(row)) not in ours]
        lines = ",\n".join(json.dumps(row) for row in [*kept, *found])
        beside = "".join(f" {json.dumps(name)}: {json.dumps(what)},\n" for name, what in before.items())
        options.json.write_text(f'{{\n{beside} "rows": [\n{lines}\n]}}\n')
    return 1 if faulty else 0


def row_of(model: str, format: str, launch: Launch, report: Report, number: int, faults: list[str]) -> dict[str, Any]:
    """number: of this launch among those of its kernel."""
    return {
        "triton": triton.__version__, "model": model, "format": format, "capability": report.capability,
        "kernel": report.name, "number": number, "registers": report.registers, "shared_bytes": report.shared,
        "programs": report.programs, "ahead_bytes": report.ahead, "loop_instructions": len(report.loop),
        "loop_matrix_instructions": sum(i.startswith("HMMA") for i in report.loop),
        "instructions_per_kib": round(report.per_weights, 1), "faults": faults,
    }  # fmt: skip


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "format", "capability", "kernel", "number"))


def fewest(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], float]:
    """Of every launch the instructions for a KiB of weights that the best Triton needs."""
    best = dict[tuple[Any, ...], float]()
    for row in rows:
        best[identity(row)] = min(best.get(identity(row), row["instructions_per_kib"]), row["instructions_per_kib"])
    return best


if __name__ == "__main__":
    sys.exit(main())
