"""ppsd-rt, llama.cpp and transformers side by side: the same prompts, the same weights, the same cores, in turns.

    python benchmarks/peers.py                      # everything: some minutes
    python benchmarks/peers.py -t 1 -p 64 -n 32 -r 3 --engines ppsd-rt:int8,llama.cpp:Q8_0
    python benchmarks/peers.py -m model-q4_k_m.gguf --engines ppsd-rt:int4,llama.cpp:file
    python benchmarks/peers.py --quality            # perplexity and divergence instead of speed

Needs benchmarks/requirements.txt, and a llama.cpp (benchmarks/build_llama_cpp.sh, or see llama_library.py); a peer
that is not there is left out, and the report says so. The last line of the output is one JSON object.
"""

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from export_gguf import FORMATS, export, model_folder
from llama_library import QUANTIZED, find_library, quantize
from peer_worker import LLAMA_SERVER, PEERS

from ppsd_rt import _native
from ppsd_rt.bench.cli.bench import evaluation_text, print_report, run_facts
from ppsd_rt.bench.cli.eval import COLUMNS as EVALUATION_COLUMNS
from ppsd_rt.bench.cli.eval import evaluate, windows
from ppsd_rt.bench.cli.options import positive
from ppsd_rt.bench.report import Report, columns, medians
from ppsd_rt.bench.spread import Bandwidth, Spread, take_turns
from ppsd_rt.cli.progress import progress_bar
from ppsd_rt.cli.values import several
from ppsd_rt.models.cache import cache_dir
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.files import is_gguf
from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.models.tokenizer import load_tokenizer

HERE = Path(__file__).resolve().parent
ENGINES = (
    "ppsd-rt:int8,llama.cpp:Q8_0,ppsd-rt:int4,llama.cpp:IQ4_NL,ppsd-rt:bfloat16,llama.cpp:BF16,transformers:bfloat16"
)
QUALITY = (
    "ppsd-rt:float32,ppsd-rt:bfloat16,ppsd-rt:int8,ppsd-rt:int4,"
    "llama.cpp:F32,llama.cpp:BF16,llama.cpp:Q8_0,llama.cpp:IQ4_NL,llama.cpp:Q4_K_M,llama.cpp:Q4_0"
)
FILE = "file"  # llama.cpp with the .gguf file that was given, as it is; one of 4 bits, or the ratio says little
# What is compared with what: ppsd-rt's format -> the peers' formats that keep as many bits.
ALIKE = {
    "int4": ("IQ4_NL", "Q4_K_M", "Q4_0", FILE),
    "int8": ("Q8_0", "int8"),
    "bfloat16": ("BF16", "F16", "bfloat16", "float16"),
    "float32": ("F32", "float32"),
}

COLUMNS = columns(
    engine="engine", format="format", threads="threads", prompt_tokens="prompt", tokens="tokens",
    prompt_tokens_per_second="prompt tok/s|0", decode_tokens_per_second="decode tok/s|1",
    prompt_ratio="prompt: ours / theirs|2", decode_ratio="decode: ours / theirs|2", same_tokens="same tokens"
)  # fmt: skip
QUALITY_COLUMNS = (
    *columns(engine="engine", format="format"),
    *(column for column in EVALUATION_COLUMNS if column.key not in ("dtype", "backend", "tokens")),
)


class Worker:
    """A process with one engine; see peer_worker.py. Ctrl-C does not reach it."""

    def __init__(self, engine: str, format: str, model: str, threads: int, context: int) -> None:
        self.engine, self.format, self.threads = engine, format, threads
        cores = _native.usable_cores()[:threads]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        command = [sys.executable, HERE / "peer_worker.py", engine, format, model, threads, ",".join(map(str, cores))]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
        self.process = subprocess.Popen(
            [*map(str, command), str(context)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=environment,  # every engine waits for its threads as its makers chose
            start_new_session=True,
        )
        self.about = self._reply()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._reply()

    def logits(self, ids: Sequence[int], last: int) -> npt.NDArray[np.float32]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "logits.npy"
            self.ask(prompt=list(ids), last=last, file=str(path))
            return np.asarray(np.load(path))

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)  # and what it has started: a server
        self.process.wait()

    def _reply(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.engine} {self.format} has failed:\n{self.log.read()[-2000:]}")
        return dict(json.loads(line))


@dataclass
class Case:
    """One line of the report."""

    worker: Worker
    prompt: list[int]
    tokens: int
    ids: list[int] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)

    def warm_up(self) -> None:
        self.worker.ask(prompt=self.prompt, tokens=min(self.tokens, 4))

    def measure(self) -> None:
        reply = self.worker.ask(prompt=self.prompt, tokens=self.tokens)
        self.ids = reply["ids"]
        self.first.append(reply["first"])
        self.rest.append(reply["rest"])

    @property
    def group(self) -> tuple[int, int, int]:
        """Cases that differ in nothing but the engine."""
        return self.worker.threads, len(self.prompt), self.tokens


def print_with_summary(report: Report, output: str) -> None:
    """As programs want it: the last line of standard output is one JSON object, but for CSV."""
    print_report(report, output)
    if output in ("table", "md"):
        print(report.summary_line(), flush=True)


def main() -> int:
    args = _arguments()
    names, absent = at_hand(args.engines or several(engine_and_format)(QUALITY if args.quality else ENGINES))
    models = {name: model_for(args.model, *name) for name in names}
    context = max(args.prompt_tokens) + max(args.max_tokens) if not args.quality else args.window
    facts = run_facts("peers", args.model) | {"command": " ".join(["python", *sys.argv]), "absent": absent}
    workers: list[Worker] = []
    try:
        for threads, (engine, format) in product(args.threads[:1] if args.quality else args.threads, names):
            workers.append(Worker(engine, format, str(models[engine, format]), threads, context))
        facts["engines"] = {f"{w.engine}:{w.format}": w.about for w in workers}
        path = resolve_model(args.model)
        tokenizer = load_tokenizer(path, Checkpoint(path).config.vocab_size)
        ids = tokenizer.encode(evaluation_text(args.text))
        report, whole = (_quality if args.quality else _speed)(args, workers, ids, facts)
    finally:
        for worker in workers:
            worker.close()
    print_with_summary(report, args.output)
    return 0 if whole else 130


def _speed(
    args: argparse.Namespace, workers: list[Worker], ids: list[int], facts: dict[str, Any]
) -> tuple[Report, bool]:
    if len(ids) < max(args.prompt_tokens):
        raise SystemExit(f"the text has only {len(ids)} tokens")
    cases = [Case(w, ids[:p], n) for w in workers for p, n in product(args.prompt_tokens, args.max_tokens)]
    cases.sort(key=lambda case: case.group)  # what is compared runs one after the other
    bandwidth = Bandwidth(args.threads)
    whole = take_turns(cases, 1, Case.warm_up)
    actions: list[Callable[[], None]] = [partial(bandwidth.measure, threads) for threads in bandwidth.threads]
    actions += [case.measure for case in cases]
    with progress_bar("measuring") as advance:
        whole = whole and take_turns(actions, args.repeats, lambda action: action(), advance)
    rows = [_row(case, cases) for case in cases if case.rest]
    summary = {"repeats": args.repeats, "interrupted": not whole, "bandwidth": bandwidth.as_dict()}
    summary["results"] = [medians(row, [column.key for column in COLUMNS]) for row in rows]
    return Report("same prompts, same weights, in turns", COLUMNS, rows, facts, summary), whole


def _row(case: Case, cases: list[Case]) -> dict[str, Any]:
    """ratio: ppsd-rt's plain speed by this engine's, in formats of as many bits."""
    prompt, decode = _speeds(case)
    ours = next((other for other in cases if other.group == case.group and _is_ours(other, case)), None)
    theirs = ours is not None and ours is not case
    base = _speeds(ours) if ours and theirs and ours.rest else (None, None)
    exact = next((c for c in cases if c.group == case.group and c.worker.format == "bfloat16" and c.ids), None)
    same = (
        next((n for n, (a, b) in enumerate(zip(case.ids, exact.ids, strict=True)) if a != b), case.tokens)
        if exact
        else None
    )
    return {
        "engine": case.worker.engine,
        "format": case.worker.format,
        "threads": case.worker.threads,
        "prompt_tokens": len(case.prompt),
        "tokens": case.tokens,
        "prompt_tokens_per_second": prompt,
        "decode_tokens_per_second": decode,
        "prompt_ratio": base[0].over(prompt) if base[0] else None,
        "decode_ratio": base[1].over(decode) if base[1] and decode else None,
        "same_tokens": same,  # how many, from the first, are those of the first bfloat16 engine
        "ids": case.ids,
    }


def _is_ours(case: Case, peer: Case) -> bool:
    """Is this the ppsd-rt that the peer is compared with: plain, of as many bits?"""
    format = case.worker.format
    wanted = peer.worker.format.partition("+")[0]
    return case.worker.engine == "ppsd-rt" and format in ALIKE and (wanted == format or wanted in ALIKE[format])


def _speeds(case: Case) -> tuple[Spread, Spread | None]:
    """Of the prompt (up to the first token) and of decoding (all other tokens)."""
    prompt = Spread(tuple(len(case.prompt) / seconds for seconds in case.first))
    if case.tokens == 1:
        return prompt, None
    return prompt, Spread(tuple((case.tokens - 1) / seconds for seconds in case.rest))


def _quality(
    args: argparse.Namespace, workers: list[Worker], ids: list[int], facts: dict[str, Any]
) -> tuple[Report, bool]:
    """Every engine against the first one."""
    pieces = windows(ids, args.window)
    first, *others = workers
    right, found, whole = evaluate({f"{w.engine}:{w.format}": w.logits for w in others}, first.logits, pieces)
    assert right is not None
    rows = [{"engine": first.engine, "format": first.format, **right.as_dict()}]
    for worker, quality in zip(others, found.values(), strict=True):
        rows.append({"engine": worker.engine, "format": worker.format, **quality.as_dict(right)})
    summary = {"window": args.window, "against": f"{first.engine}:{first.format}", "results": rows}
    return Report(f"quality against {first.engine} {first.format}", QUALITY_COLUMNS, rows, facts, summary), whole


def at_hand(names: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[str]]:
    """The engines that can be started, and why the others cannot."""
    missing = {}
    if find_library() is None:
        missing["llama.cpp"] = "no library: run benchmarks/build_llama_cpp.sh or set LLAMA_LIBRARY"
    if not LLAMA_SERVER.exists():
        missing["llama-server"] = f"no {LLAMA_SERVER}: run benchmarks/build_llama_cpp.sh server"
    if importlib.util.find_spec("transformers") is None:
        missing["transformers"] = "not installed: pip install -r benchmarks/requirements.txt"
    reasons = [f"{engine}: {reason}" for engine, reason in missing.items() if engine in dict(names)]
    for reason in reasons:
        print(reason, file=sys.stderr)
    return [name for name in names if name[0] not in missing], reasons


def model_for(model: str, engine: str, format: str) -> Path:
    """What this engine loads of a model by any of its names."""
    path = resolve_model(model)
    if engine == "ppsd-rt":
        return path
    format = format.partition("+")[0]
    if format == FILE:
        if not is_gguf(path):
            raise SystemExit(f"{model} is no .gguf file: name a format instead of {engine}:{FILE}")
        return path
    folder = model_folder(model)
    if engine == "llama-server":
        return text_gguf_file(folder, format)
    return gguf_file(folder, format) if engine == "llama.cpp" else folder


def gguf_file(folder: Path, format: str) -> Path:
    """The model as a GGUF file in the cache, written once."""
    target = cache_dir() / "benchmarks" / f"{Checkpoint(folder).hash}-{format}.gguf"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    library = find_library()
    if format in QUANTIZED and library is not None:
        quantize(library, gguf_file(folder, "F32"), target, format)
    else:
        export(folder, format, target)
    return target


def text_gguf_file(folder: Path, format: str) -> Path:
    """The model with its tokenizer, in the cache, written once: llama-server answers with text."""
    target = cache_dir() / "benchmarks" / f"{Checkpoint(folder).hash}-{format}-text.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        export(folder, format, target, tokenizer=True)
    return target


def engine_and_format(text: str) -> tuple[str, str]:
    engine, _, format = text.partition(":")
    if engine not in PEERS or not format:
        raise argparse.ArgumentTypeError(f"{text!r} is not ENGINE:FORMAT; engines are {', '.join(PEERS)}")
    known = (*FORMATS, *QUANTIZED, FILE)
    if engine == "llama.cpp" and format not in known:
        raise argparse.ArgumentTypeError(f"llama.cpp's format {format!r} is not one of {', '.join(known)}")
    known = (*FORMATS, FILE)
    if engine == "llama-server" and format.partition("+")[0] not in known:
        raise argparse.ArgumentTypeError(f"llama-server's format {format!r} is not one of {', '.join(known)}")
    return engine, format


def common_arguments(doc: str | None, engines: str, threads: list[int], repeats: int) -> argparse.ArgumentParser:
    """What every comparison with others takes, and what it is by default; peers.parse() reads it."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = several(positive)
    shown = ",".join(map(str, threads))
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--engines", type=several(engine_and_format), help=f"ENGINE:FORMAT,... [{engines}]")
    parser.add_argument("-t", "--threads", type=numbers, default=threads, help=f"[{shown}]")
    parser.add_argument("-r", "--repeats", type=positive, default=repeats, help=f"[{repeats}]")
    parser.add_argument("-o", "--output", choices=("table", "md", "csv", "json", "jsonl"), default="table")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args, cores = parser.parse_args(), len(_native.usable_cores())
    if max(args.threads) > cores:
        parser.error(f"there are only {cores} cores")
    return args


def _arguments() -> argparse.Namespace:
    numbers = several(positive)
    threads = sorted({1, min(2, len(_native.usable_cores()))})
    parser = common_arguments(__doc__, ENGINES, threads, repeats=5)
    parser.add_argument("-p", "--prompt-tokens", type=numbers, default=[64, 512], help="[64,512]")
    parser.add_argument("-n", "--max-tokens", type=numbers, default=[128], help="[128]")
    parser.add_argument("--quality", action="store_true", help="perplexity and divergence instead of speed")
    parser.add_argument("--text", help="a text to take prompts from [the one that comes with ppsd-rt]")
    parser.add_argument("--window", type=positive, default=512, help="of --quality [512]")
    return parse(parser)


if __name__ == "__main__":
    sys.exit(main())
