"""`ppsd-run lab bench kernels | generate`: measurements as tables, Markdown, CSV or JSON."""

import argparse
import shlex
import sys
from datetime import UTC, datetime
from importlib.resources import files
from itertools import product
from typing import Any

from ... import _native
from ...cli import signals
from ...cli.common import NamedPrompt, as_chat, engine_of, given_text, table
from ...cli.info import machine
from ...cli.notes import complain
from ...cli.progress import progress_bar
from ...cpu.machine import default_threads
from ...engine import Engine
from ...errors import PpsdError, UsageError
from ...files import OutputFile
from ...pipeline.schedule import AUTO, parse_schedule
from ...sampling.params import SamplingParams
from ..generate import Answers, Workload, measure_generation
from ..kernels import Sweeps, measure_kernels
from ..report import Report
from .prompt_files import first_of_each_family, read_prompts

MOST_CONTEXT = 2**18  # rows of the KV caches that kernels are measured with: tens of gigabytes for a large model


def run(args: argparse.Namespace) -> int:
    file = result_file(args)
    report, whole = {"kernels": _kernels, "generate": _generate}[args.what](args)
    print_report(report, args.output, file)
    if not whole:
        return interrupted()
    if wrong := sorted({row["schedule"] for row in report.rows if row.get("differing")}):
        raise PpsdError(f"answers of {', '.join(wrong)} differ from plain decoding's: `ppsd-run check` shows where")
    return 0


def interrupted() -> int:
    """Says so after a report that is not whole -> exit status."""
    complain(f"ppsd-run: {signals.said()}; this is what had been measured")
    return signals.status()


def result_file(args: argparse.Namespace) -> OutputFile | None:
    """The file of --save; to be made before anything is measured, so that a bad path is told at once."""
    return OutputFile(args.save, "result", (args.model,)) if args.save else None


def print_report(report: Report, output: str, file: OutputFile | None = None) -> None:
    """Prints the report; with all its samples, as JSON, it goes into the file too."""
    if output == "table":
        table(report.title, [column.title for column in report.columns], report.cells())
    else:
        print(report.lines(output), flush=True)
    if file is not None:
        file.finish(report.lines("json") + "\n")


def run_facts(name: str, model: str) -> dict[str, Any]:
    """What every result says of where it came from."""
    return {
        "measurement": name,
        "model": model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["ppsd-run", *sys.argv[1:]]),
        "machine": machine(),
    }


def evaluation_text(path: str | None = None) -> str:
    """A text to measure with; None: the one that comes with the package."""
    if path is None:
        return (files("ppsd_rt") / "data" / "eval.txt").read_text(encoding="utf-8")
    return given_text(path)


def _kernels(args: argparse.Namespace) -> tuple[Report, bool]:
    if "," in args.device:
        raise UsageError("kernels are measured on one device; --device names one")
    if args.device.startswith("cuda"):
        return _device_kernels(args)
    if max(args.rows) > _native.PASS_ROWS:
        raise UsageError(f"--rows: a pass takes at most {_native.PASS_ROWS} rows, not {max(args.rows)}")
    if args.context > MOST_CONTEXT:
        raise UsageError(f"--context must be at most {MOST_CONTEXT}, not {args.context}")
    isas = _native.usable_isas() if args.isa == ("all",) else args.isa
    threads = _threads(args)
    sweeps = Sweeps(args.dtype, threads, args.rows, args.kernels, isas, args.context, args.repeats)

    def load(dtype: str) -> Engine:
        return engine_of(args, backend="cpu", dtype=dtype, threads=max(threads))

    with progress_bar("measuring") as advance:
        try:
            return measure_kernels(load, sweeps, run_facts("kernels", args.model), advance)
        except MemoryError:
            raise PpsdError(f"no memory for KV caches of {args.context} rows: lower --context") from None


def _device_kernels(args: argparse.Namespace) -> tuple[Report, bool]:
    """The Triton kernels, on a GPU."""
    from ...cuda.errors import check_triton

    check_triton()  # before the modules that cannot be imported without it
    from ...cuda.backend import CudaBackend
    from ..device_kernels import measure_device_kernels

    if len(args.dtype) > 1:
        raise UsageError("on a GPU one number format at a time is measured: give one --dtype")
    engine = engine_of(args, backend="cuda", dtype=args.dtype[0], threads=None)
    assert isinstance(engine.backend, CudaBackend)
    facts = run_facts("device-kernels", args.model)
    with progress_bar("measuring") as advance:
        return measure_device_kernels(
            engine.backend.weights, args.kernels, args.rows, args.context, args.repeats, facts, advance
        )


def _generate(args: argparse.Namespace) -> tuple[Report, bool]:
    schedules = {text: parse_schedule(text) for text in args.schedule or ()}
    sampling = SamplingParams(temperature=args.temperature, seed=args.seed)
    prompts = _named_prompts(args)
    engines = [
        engine_of(args, dtype=dtype, threads=threads, kv_dtype=kv_dtype)
        for dtype, kv_dtype, threads in product(args.dtype, args.kv_dtype, _threads(args))
    ]
    if args.schedule is None and (engines[0].head is not None or engines[0].backend.copies):
        schedules = {"auto": AUTO}
    lengths = args.prompt_tokens or [64]
    if (context := engines[0].config.max_position_embeddings) <= max(lengths):
        raise UsageError(f"--prompt-tokens must be below the model's context of {context}, not {max(lengths)}")
    workloads = [_answers(engines[0], prompts)] if prompts else _made_prompts(engines[0], lengths)
    answers = Answers(workloads, args.max_tokens, schedules, args.oracle, sampling, args.repeats)
    with progress_bar("measuring") as advance:
        return measure_generation(engines, answers, run_facts("generate", args.model), advance)


def _threads(args: argparse.Namespace) -> list[int]:
    return args.threads or [default_threads()]


def _named_prompts(args: argparse.Namespace) -> list[NamedPrompt]:
    """The prompts of --prompts, if it was given."""
    if args.prompts is None:
        if args.limit is not None:
            raise UsageError("--limit goes with --prompts")
        return []
    if args.prompt_tokens:
        raise UsageError("give --prompts or --prompt-tokens: not both")
    return first_of_each_family(read_prompts(None if args.prompts is True else args.prompts), args.limit)


def _answers(engine: Engine, prompts: list[NamedPrompt]) -> Workload:
    ids = [tuple(engine.encode(as_chat(engine, prompt.prompt, raw=False))) for prompt in prompts]
    families = tuple(prompt.family for prompt in prompts)
    return Workload(f"{len(prompts)} prompts", tuple(ids), ignore_eos=False, families=families)


def _made_prompts(engine: Engine, lengths: list[int]) -> list[Workload]:
    """Beginnings of a text, so that the model has something to go on with; a short one is repeated."""
    ids = engine.tokenizer.encode(evaluation_text())
    ids *= -(-max(lengths) // len(ids))
    return [Workload(str(length), (tuple(ids[:length]),), ignore_eos=True) for length in lengths]
