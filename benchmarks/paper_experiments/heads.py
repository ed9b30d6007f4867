"""Kinds of exit heads: trained side by side on the same text, little and much of it, the model's own and given.

The given text is the documentation strings of Python's own library, in pieces that the model reads instead of writing.
All heads are judged by the same held-out answers of the model, and on the development prompts in the real loop.
"""

import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from given_text import write_given

from ppsd_rt import Engine
from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.distill.run import Distillation, Settings
from ppsd_rt.distill.shards import STEPS
from ppsd_rt.distill.train import TrainSettings
from ppsd_rt.lab.bench.heads import USUAL, draft_on_prompts
from ppsd_rt.lab.bench.plot import Chart, Line, Panel
from ppsd_rt.lab.cli.prompt_files import first_of_each_family, read_prompts
from ppsd_rt.models.cache import cache_dir
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import HeadInfo
from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.models.tokenizer import load_tokenizer
from ppsd_rt.pipeline.schedule import MAX_CHUNK
from ppsd_rt.planning.planner import typical
from ppsd_rt.reference.backend import TorchBackend

from .experiment import Claim, Experiment, Found, Parts, markdown

MODEL, FORMAT = "smollm2-135m", "int8"
UNTRAINED = ("norm:3", "norm:3:4096")  # the second drafts only the first 4096 ids
KINDS = ("adapter", "layer", "two-layer", "feedback")
EXIT, VOCABULARY = 3, 4096
SLOTS = 32
SHARD = SLOTS * STEPS  # tokens
LENGTH = 6  # drafts of a round on the development prompts


def amounts(quick: bool) -> tuple[int, ...]:
    """Tokens, in whole shards. The given text is as long as the least."""
    return tuple(shards * SHARD for shards in ((2, 4, 8) if quick else (12, 32, 64, 128, 256)))


def parts(quick: bool) -> Parts:
    untrained = {f"untrained, {name}": partial(judged, {name: name}, quick) for name in UNTRAINED}
    texts = [(tokens, "self-generated") for tokens in amounts(quick)]
    texts.insert(1, (amounts(quick)[0], "given"))
    trained = {f"{text}, {tokens}": partial(measured, text, tokens, quick) for tokens, text in texts}
    return {**untrained, **trained, "costs": partial(costs, 3 if quick else 9)}


def work() -> Path:
    """Text, checkpoints and heads, kept so that what takes minutes or hours goes on where it was ended."""
    return cache_dir() / "benchmarks" / "heads"


# -- training ----------------------------------------------------------------------------------------------------------


@cache
def default_model() -> tuple[Checkpoint, Any]:
    checkpoint = Checkpoint(resolve_model(MODEL))
    return checkpoint, TorchBackend(checkpoint, "auto", "cpu", None).model


def trained(text: str, tokens: int, quick: bool) -> dict[str, Path]:
    """The files of the heads, by kind."""
    checkpoint, model = default_model()
    settings = Settings(
        model_hash=checkpoint.hash,
        kinds=KINDS,
        exit_layers=(EXIT,),
        tokens=tokens,
        draft_vocabularies=(VOCABULARY,),
        slots=SLOTS,
        seed=1,
        format=FORMAT,
        train=TrainSettings(epochs=1, batch_tokens=2048) if quick else TrainSettings(),
    )
    folder = work() / f"{text}-{tokens}-{'quick' if quick else 'full'}"
    files = {kind: folder / f"{kind}.safetensors" for kind in KINDS}
    if all(file.exists() for file in files.values()):
        return files
    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.config.vocab_size)
    judges = [prompt.prompt for prompt in read_prompts(None)]
    cores = os.cpu_count() or 1
    job = Distillation(checkpoint, model, tokenizer, settings, folder, work() / f"{text}-text", judges, cores)
    job.prepare(resume=True)
    if text == "given":
        write_given(job.plan, work() / "self-generated-text", checkpoint, tokenizer, FORMAT)
    for _ in job.sample():
        pass
    for _ in job.train():
        pass
    job.save(lambda info, size: files[info.kind])
    return files


# -- judging -----------------------------------------------------------------------------------------------------------


def engine_with(head: str | Path) -> Engine:
    return Engine.from_pretrained(MODEL, backend="cpu", dtype=FORMAT, exit_head=head)


def measured(text: str, tokens: int, quick: bool) -> dict[str, Any]:
    return judged(trained(text, tokens, quick), quick)


def judged(heads: Mapping[str, str | Path], quick: bool) -> dict[str, Any]:
    """By head: how often it is right, held out and on the development prompts.

    survival: share of the rounds whose first 1, 2, ... drafts were all right.
    """
    prompts = first_of_each_family(read_prompts(None), 1 if quick else None)
    found = {}
    for name, head in heads.items():
        engine = engine_with(head)
        drafted, whole = draft_on_prompts(engine, prompts, 64 if quick else 256, LENGTH)
        if not whole:
            raise KeyboardInterrupt
        assert engine.head is not None
        found[name] = {
            "acceptance": drafted.greedy.acceptance,
            "warm": drafted.warm.acceptance,
            "survival": drafted.survival(LENGTH),
            "by_family": {family: totals.acceptance for family, totals in drafted.families.items()},
            "held_out": dict(engine.head.acceptance),
        }
    return found


def costs(rounds: int) -> dict[str, Any]:
    """By kind: a draft in plain steps, and a round of 1, 2, ... drafts. Heads take turns; training changes no cost."""
    checkpoint, model = default_model()
    heads: dict[str, str | Path] = {name: name for name in UNTRAINED}
    folder = work() / "untrained"
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        head = ExitHead.from_model(model, HeadInfo(kind, EXIT, checkpoint.name, checkpoint.hash), [*range(VOCABULARY)])
        heads[kind] = folder / f"{kind}.safetensors"
        head.save(folder / f"{kind}.safetensors")
    engines = {name: engine_with(head) for name, head in heads.items()}
    moments: dict[str, list[Any]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            assert isinstance(engine.backend, CpuBackend)
            moments[name].append(engine.backend.costs(again=True))
    found = {}
    for name, each in moments.items():
        cost = typical(each)
        rounds_of = [cost.turns.round(drafts) / cost.plain_seconds for drafts in range(1, MAX_CHUNK + 1)]
        found[name] = {"draft": cost.turns.draft_share(USUAL), "rounds": rounds_of}
        found[name]["each"] = [moment.turns.draft_share(USUAL) for moment in each]
    return found


# -- the page ----------------------------------------------------------------------------------------------------------


def predicted(survival: list[float], rounds: list[float]) -> tuple[float, int]:
    """(speed times plain decoding, draft length) of the best fixed length."""
    speeds = [(1 + sum(survival[:drafts])) / rounds[drafts - 1] for drafts in range(1, len(survival) + 1)]
    return max(speeds), 1 + speeds.index(max(speeds))


def cases(found: Found) -> list[tuple[str, str, int, dict[str, Any]]]:
    """(kind, text, tokens, figures) of every head, the untrained ones first."""
    rows = []
    for part, heads in found.items():
        text, _, tokens = part.partition(", ")
        if part != "costs":
            rows += [(name, text, int(tokens) if tokens.isdigit() else 0, head) for name, head in heads.items()]
    return rows


def table(found: Found) -> str:
    rows = []
    for kind, text, tokens, head in cases(found):
        held_out = head["held_out"].get("held_out_greedy")
        shares = ("-" if share is None else f"{share:.3f}" for share in (held_out, head["acceptance"], head["warm"]))
        worth = ("-", "-", "-")
        if "costs" in found:  # measured last
            cost = found["costs"][kind]
            speed, length = predicted(head["survival"], cost["rounds"])
            worth = (f"{cost['draft']:.3f}", f"{speed:.2f}", str(length))
        rows.append((f"`{kind}`", text, f"{tokens:,}" if tokens else "-", *shares, *worth))
    head_row = ("head", "text", "tokens", "held out", "development prompts", "the same, T = 0.8", "cost of a draft")
    return markdown((*head_row, "predicted x plain", "with drafts"), rows, left=2)


def charts(found: Found) -> dict[str, Chart]:
    def lines(of: Callable[[dict[str, Any]], float]) -> list[Line]:
        points: dict[str, list[tuple[float, float]]] = {}
        for kind, text, tokens, head in cases(found):
            if tokens:
                name = kind if text == "self-generated" else f"{kind}, {text} text"
                points.setdefault(name, []).append((tokens / 1000, of(head)))
        return [Line(name, each) for name, each in points.items()]

    panels = [
        Panel("held out", lines(lambda head: head["held_out"]["held_out_greedy"])),
        Panel("development prompts", lines(lambda head: head["acceptance"])),
    ]
    chart = Chart("Exit heads and their text", "thousand tokens", "acceptance", panels, 2)
    return {"heads": chart} if panels[0].lines else {}


HEADS = Experiment(
    "heads",
    (
        Claim("PPSD", "ablation of the exit head (Table 3; its figures were not available)", "the head's form matters"),
        Claim("EESD", "abstract", "one layer, distilled from the model's own output, drafts well"),
    ),
    parts,
    table,
    charts,
)
