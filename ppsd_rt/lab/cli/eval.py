"""`ppsd-run lab eval`: perplexity of number formats, and their distance from float32."""

import argparse
from itertools import product
from typing import Any

from ...backend import kv_dtype_of
from ...cli.progress import progress_bar
from ...engine import Engine
from ...errors import UsageError
from ..bench.evaluate import evaluate, windows
from ..bench.report import Report, columns
from ..texts import evaluation_text
from .bench import interrupted, print_report, result_file, run_facts

COLUMNS = columns(
    dtype="dtype", kv_dtype="KV", backend="backend", tokens="tokens", perplexity="perplexity|3",
    perplexity_ratio="ratio|4", divergence="KL (nats/token)|6", divergence_error="±|6", divergence_most="most|4",
    top1_agreement="same first choice|2%"
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    file = result_file(args)
    text = evaluation_text(args.text)
    against = _engine(args, args.against)
    context = against.config.max_position_embeddings
    if args.window > context:
        raise UsageError(f"a window of {args.window} tokens does not fit the context of {context}")
    pieces = windows(against.tokenizer.encode(text), args.window)
    engines = {f"{name} {kv}": _engine(args, name, kv) for name, kv in product(args.dtype, args.kv_dtype)}
    with progress_bar("evaluating") as advance:
        models = {name: engine.backend.logits for name, engine in engines.items()}
        right, found, whole = evaluate(models, against.backend.logits, pieces, advance)
    assert right is not None
    rows = [{**_labels(against), **right.as_dict()}]
    rows += [{**_labels(engines[name]), **quality.as_dict(right)} for name, quality in found.items()]
    facts = run_facts("eval", args.model)
    facts |= {"text": args.text or "eval.txt of the package", "window": args.window, "against": args.against}
    title = f"quality against {against.backend.name} {against.backend.dtype}"
    print_report(Report(title, COLUMNS, rows, facts, {"interrupted": not whole, "results": rows}), args.output, file)
    return 0 if whole else interrupted()


def _engine(args: argparse.Namespace, name: str, kv_dtype: str = "auto") -> Engine:
    """name: FORMAT, or BACKEND:FORMAT."""
    backend, separator, dtype = name.rpartition(":")
    return Engine.from_pretrained(
        args.model,
        exit_head="none",
        backend=backend if separator else args.backend,
        device=args.device,
        dtype=dtype,
        threads=args.threads,
        kv_dtype=kv_dtype,
    )


def _labels(engine: Engine) -> dict[str, Any]:
    backend = engine.backend
    return {"dtype": backend.dtype, "kv_dtype": kv_dtype_of(backend), "backend": backend.name}
