"""`ppsd-run lab eval`: what a number format costs: the perplexity of a text, and the distance from float32."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import exp, sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from ...backend import kv_dtype_of
from ...cli.common import engine_of
from ...cli.progress import progress_bar
from ...engine import Engine
from ...errors import UsageError
from ..report import Report, columns
from .bench import evaluation_text, interrupted, print_report, result_file, run_facts

COLUMNS = columns(
    dtype="dtype", kv_dtype="KV", backend="backend", tokens="tokens", perplexity="perplexity|3",
    perplexity_ratio="ratio|4", divergence="KL (nats/token)|6", divergence_error="±|6", divergence_most="most|4",
    top1_agreement="same first choice|2%"
)  # fmt: skip

Logits = npt.NDArray[np.float32]
Model = Callable[[Sequence[int], int], Logits]  # (ids, last) -> [last, vocabulary], as `Backend.logits`

_ROWS = 64  # that are worked on at a time: a row of probabilities in float64 may have a megabyte


@dataclass(frozen=True)
class Window:
    """ids: what the model sees. targets: the ids that should follow the last `len(targets)` of them."""

    ids: tuple[int, ...]
    targets: tuple[int, ...]


def windows(ids: Sequence[int], size: int) -> list[Window]:
    """Every id but the first is a target once, with half a window before it wherever there is so much text.

    size: of the ids and the last target together; at least 2.
    """
    if size < 2:
        raise UsageError(f"a window must have at least 2 tokens, not {size}")
    if len(ids) < 2:
        raise UsageError("the text is too short: there is nothing to predict")
    cuts = [1, *range(size, len(ids), (size + 1) // 2), len(ids)] if len(ids) > size else [1, len(ids)]
    found = []
    for first, end in pairwise(cuts):
        begin = max(0, end - size)
        found.append(Window(tuple(ids[begin : end - 1]), tuple(ids[first:end])))
    return found


@dataclass
class Quality:
    """What was seen of one model so far. All of it is per target: nats of loss, nats of divergence, same first choice.

    divergence: KL(right || model), the nats per token that are lost by believing this model where the right one holds.
    """

    losses: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)

    def add(self, logits: Logits, targets: Sequence[int], right: Logits | None = None) -> None:
        """logits, right: [targets, vocabulary]."""
        for begin in range(0, len(targets), _ROWS):
            rows = slice(begin, begin + _ROWS)
            mine, wanted = log_softmax(logits[rows]), targets[rows]
            self.losses += (-mine[np.arange(len(wanted)), wanted]).tolist()
            if right is not None:
                theirs = log_softmax(right[rows])
                self.divergences += (np.exp(theirs) * (theirs - mine)).sum(axis=1).tolist()
                self.agreements += (theirs.argmax(axis=1) == mine.argmax(axis=1)).tolist()

    def cut(self, targets: int) -> None:
        """Forget what came after so many."""
        for seen in (self.losses, self.divergences, self.agreements):
            del seen[targets:]

    @property
    def perplexity(self) -> float:
        return exp(float(np.mean(self.losses)))

    def as_dict(self, right: "Quality | None" = None) -> dict[str, Any]:
        """right: what `perplexity_ratio` is taken to; the standard error takes targets for independent."""
        figures: dict[str, Any] = {"tokens": len(self.losses), "perplexity": self.perplexity}
        if right is not None:
            figures["perplexity_ratio"] = self.perplexity / right.perplexity
            figures["divergence"] = float(np.mean(self.divergences))
            figures["divergence_error"] = float(np.std(self.divergences)) / sqrt(len(self.divergences))
            figures["divergence_most"] = max(self.divergences)
            figures["top1_agreement"] = float(np.mean(self.agreements))
        return figures


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def evaluate(
    models: Mapping[str, Model],
    against: Model | None,
    pieces: Sequence[Window],
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Quality | None, dict[str, Quality], bool]:
    """The quality of `against` and of each model, all of them over the same windows, and whether these are all.

    Ctrl-C ends it after the last window that all have seen; before the first one it is not caught.
    """
    right = Quality() if against else None
    found = {name: Quality() for name in models}
    seen = 0
    try:
        for place, piece in enumerate(pieces):
            true = against(piece.ids, len(piece.targets)) if against else None
            if right is not None and true is not None:
                right.add(true, piece.targets)
            for name, model in models.items():
                found[name].add(model(piece.ids, len(piece.targets)), piece.targets, true)
            seen += len(piece.targets)
            advance(place + 1, len(pieces))
    except KeyboardInterrupt:
        if not seen:
            raise
        for quality in (*found.values(), *([right] if right else [])):
            quality.cut(seen)
        return right, found, False
    return right, found, True


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
    changes = {"backend": backend} if separator else {}
    return engine_of(args, exit_head="none", dtype=dtype, kv_dtype=kv_dtype, **changes)


def _labels(engine: Engine) -> dict[str, Any]:
    backend = engine.backend
    return {"dtype": backend.dtype, "kv_dtype": kv_dtype_of(backend), "backend": backend.name}
