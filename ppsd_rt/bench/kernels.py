"""Single kernels of the C++ backend, each over all layers of a model, in every format, width and thread count."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from .. import _native
from ..cpu.backend import CpuBackend
from ..engine import Engine
from ..errors import UsageError
from .report import Report, columns
from .spread import Bandwidth, Spread, take_turns

# Together the work of a pass through the model, but for its embedding, norms and sampling.
PASS = ("qkv", "attention", "output", "gate_up", "down", "lm_head")
_SWEEPS = 3  # per repeat; their median is the repeat's sample

COLUMNS = columns(
    kernel="kernel", dtype="dtype", isa="isa", threads="threads", rows="rows", milliseconds="ms|3",
    gigabytes_per_second="GB/s|1", bandwidth_share="of bandwidth|0%", gigaflops="GFLOP/s|0"
)  # fmt: skip


@dataclass(frozen=True)
class Sweeps:
    """What to measure: every combination. isas: names, or none for the best. context: rows in the KV cache before."""

    dtypes: Sequence[str]
    threads: Sequence[int]
    rows: Sequence[int]
    kernels: Sequence[str] = ()
    isas: Sequence[str] = ()
    context: int = 256
    repeats: int = 5


@dataclass
class Case:
    engine: _native.Engine
    kernel: str
    dtype: str
    isa: str
    threads: int
    rows: int
    context: int
    seconds: list[float]
    bytes: float = 0.0
    flops: float = 0.0

    def measure(self) -> None:
        time = self.engine.time_kernel(self.kernel, self.rows, self.context, _SWEEPS)
        self.bytes, self.flops = time.bytes, time.flops
        self.seconds.append(time.seconds)


def measure_kernels(
    load: Callable[[str], Engine],
    sweeps: Sweeps,
    facts: dict[str, Any],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Report, bool]:
    """The report, and whether it is whole (Ctrl-C ends the run, not the report).

    load: gives an engine with the cpu backend in a format. All models are in memory at once, one for each format and
    instruction set, so that all cases can take turns.
    """
    isas = sweeps.isas or [_native.isa()]
    for isa in isas:
        if isa not in _native.usable_isas():
            raise UsageError(f"isa {isa!r} is not one that this machine can run: {', '.join(_native.usable_isas())}")
    cases = []
    for dtype, isa in product(sweeps.dtypes, isas):
        with chosen_isa(isa):
            backend = load(dtype).backend
        assert isinstance(backend, CpuBackend)
        kernels = _chosen_kernels(sweeps.kernels, backend.head is not None)
        for threads in sweeps.threads:
            engine = backend.another_engine(threads)
            for kernel, rows in product(kernels, sweeps.rows):
                cases.append(Case(engine, kernel, backend.dtype, isa, threads, rows, sweeps.context, []))
    bandwidth = Bandwidth(sweeps.threads)
    actions: list[Callable[[], None]] = [partial(bandwidth.measure, threads) for threads in bandwidth.threads]
    actions += [case.measure for case in cases]
    whole = take_turns(actions, sweeps.repeats, lambda action: action(), advance)
    return _report([case for case in cases if case.seconds], bandwidth, sweeps, facts, whole), whole


@contextmanager
def chosen_isa(name: str) -> Iterator[None]:
    """Models that are packed inside use the kernels of this instruction set, for good."""
    before = os.environ.get("PPSD_ISA")
    os.environ["PPSD_ISA"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["PPSD_ISA"]
        else:
            os.environ["PPSD_ISA"] = before


def _chosen_kernels(wanted: Sequence[str], has_head: bool) -> list[str]:
    known = [name for name in _native.kernel_names() if has_head or name != "exit_head"]
    for name in wanted:
        if name not in known:
            absent = " (there is no exit head)" if name == "exit_head" else ""
            raise UsageError(f"kernel {name!r} is unknown{absent}; kernels are {', '.join(known)}")
    return list(wanted or known)


def _report(cases: Sequence[Case], bandwidth: Bandwidth, sweeps: Sweeps, facts: dict[str, Any], whole: bool) -> Report:
    rows = [_row(case, bandwidth) for case in cases]
    passes = _passes(cases, bandwidth)
    summary = {
        "repeats": sweeps.repeats,
        "sweeps_per_repeat": _SWEEPS,
        "context": sweeps.context,
        "interrupted": not whole,
        "bandwidth": bandwidth.as_dict(),
        "passes": [
            {
                **{key: row[key] for key in ("dtype", "isa", "threads", "rows", "bandwidth_share")},
                "milliseconds": row["milliseconds"].median,
            }
            for row in passes
        ],
    }
    return Report("kernels, each over all layers", COLUMNS, [*rows, *passes], facts, summary)


def _row(case: Case, bandwidth: Bandwidth) -> dict[str, Any]:
    labels = {key: getattr(case, key) for key in ("kernel", "dtype", "isa", "threads", "rows")}
    return {**labels, **_figures(Spread(tuple(case.seconds)), case.bytes, case.flops, bandwidth[case.threads])}


def _passes(cases: Sequence[Case], bandwidth: Bandwidth) -> list[dict[str, Any]]:
    """The kernels of a pass added up, repeat by repeat, where all of them were measured."""
    groups: dict[tuple[str, str, int, int], dict[str, Case]] = {}
    for case in cases:
        groups.setdefault((case.dtype, case.isa, case.threads, case.rows), {})[case.kernel] = case
    rows = []
    for (dtype, isa, threads, count), kernels in groups.items():
        if not set(PASS) <= set(kernels):
            continue
        parts = [kernels[name] for name in PASS]
        seconds = Spread(tuple(map(sum, zip(*(part.seconds for part in parts), strict=False))))
        figures = _figures(seconds, sum(p.bytes for p in parts), sum(p.flops for p in parts), bandwidth[threads])
        rows.append({"kernel": "pass", "dtype": dtype, "isa": isa, "threads": threads, "rows": count, **figures})
    return rows


def _figures(seconds: Spread, bytes: float, flops: float, bandwidth: Spread | None) -> dict[str, Any]:
    """gigabytes_per_second: of weights or KV cache. Above 100 % of the bandwidth, they came out of a cache."""
    rate = bytes / seconds.median / 1e9
    return {
        "milliseconds": seconds.map(lambda s: 1e3 * s),
        "bytes": bytes,
        "flops": flops,
        "gigabytes_per_second": rate,
        "bandwidth_share": rate / bandwidth.median if bandwidth else None,
        "gigaflops": flops / seconds.median / 1e9,
    }
