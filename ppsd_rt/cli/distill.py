"""`ppsd-run distill`: train exit heads on text that the model writes itself."""

import argparse
import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..backends import check_machine
from ..cpu.backend import CpuBackend
from ..cpu.formats import DEFAULT_FORMAT, refuses
from ..distill import run as distillation
from ..distill.deduplication import Deduplication
from ..distill.forecast import PAYS, Forecast, expected_speed
from ..distill.prompts import LONGEST, NO_PROMPTS, Prompts, prompts_of
from ..distill.rate import first_rate, rate_to_go_on
from ..distill.self_text import LEAST_ANSWER
from ..distill.shards import HELD_OUT_SLOTS, STEPS
from ..distill.train import TrainSettings
from ..engine import Engine
from ..errors import PpsdError, UsageError
from ..models.checkpoint import Checkpoint
from ..models.files import read_json_object
from ..models.head_file import NGRAM, HeadFile, HeadInfo, find_shipped, read_info
from ..models.resolve import resolve_model
from ..models.tokenizer import Tokenizer, load_tokenizer
from ..printable import printable, quoted
from ..reference.backend import TorchBackend, pick_device
from . import signals
from .commands import prompt_reader
from .notes import complain, note

TOKENS = 2_000_000  # to sample, where nothing is said
Value = TypeVar("Value")
FEW_PROMPTS = 32
LEAST_SLOTS = 4  # of which a shard is small enough for the shortest --hours
# On the development prompts (2026-11-21-amd-epyc-2-heads.json, 2026-11-24-amd-epyc-generate-1.5b.json and
# 2026-11-25-intel-xeon-5-generate-1.5b.json).
KNOWN = (
    "heads of the default model had an acceptance of 0.56 after 1.8 million tokens and 0.64 after 7.9 million, one of "
    "a model of 1.5 billion weights 0.36 after 0.3 million and 0.45 after 1.8 million"
)


def run(args: argparse.Namespace) -> None:
    check_machine(args.device, args.threads)
    if args.tokens is not None and args.hours is not None:
        raise UsageError("--tokens and --hours exclude each other: --hours says how many tokens there is time for")
    if "," in args.device:
        raise UsageError("distillation runs on one device; --device names one")
    settings, job_of, before, path = _asked(args)
    job = job_of(_planned(args, settings, job_of))
    job.prepare(args.resume)
    try:
        show(job.sample(), job.infos)
        show(job.train(), job.infos)
    except KeyboardInterrupt:
        complain(
            f"{signals.said()}; texts that had ended are kept: the same command with --resume goes on from {job.folder}"
        )
        raise
    for file in job.save(path):
        for line in _told(job, file, before):
            print(printable(f"{file}: {line}"))
        acceptance = read_info(file).acceptance.get("held_out_greedy")
        if job.infos and settings.format and acceptance is not None:
            worth = _worth(job.checkpoint.folder, file, settings.format, args.threads, acceptance)
            print(printable(f"{file}: {worth}"))


JobOf = Callable[[distillation.Settings], distillation.Distillation]


def _asked(
    args: argparse.Namespace,
) -> tuple[distillation.Settings, JobOf, Path | None, Callable[[HeadInfo, int], Path]]:
    """What the options say; what makes a job of it; the head that there is before; and the names of heads' files."""
    kinds = _kinds(args.kind)
    layers = _layers(args.exit_layer) if args.exit_layer else ()
    sizes = _sizes(args.draft_vocabulary)
    path = _path(args.out, len(kinds) > 1, len(layers) > 1, len(sizes) > 1)
    _check_writable(Path(args.out).parent)
    folder = resolve_model(args.model)
    checkpoint = Checkpoint(folder)
    config = checkpoint.config
    tokenizer = load_tokenizer(folder, config.vocab_size)
    judges = [prompt.prompt for prompt in prompt_reader()(args.judged_by)]
    prompts = _prompts(args, tokenizer, checkpoint, judges)
    before = _before(args, checkpoint)
    known = HeadFile.load(before, checkpoint) if before else None
    begin = known if known is not None and _begins(args, known.info, kinds, layers) else None
    rate = args.learning_rate if args.learning_rate is not None else first_rate(config.hidden_size)
    neurons, rank = _sizes_of_body(args, begin, checkpoint)
    layer = begin.info.exit_layer if begin else distillation.default_exit_layer(config.num_hidden_layers)
    settings = distillation.Settings(
        model_hash=checkpoint.hash,
        kinds=kinds,
        exit_layers=layers or (layer,),
        tokens=TOKENS if args.tokens is None else args.tokens,
        draft_vocabularies=tuple(size if size < config.vocab_size else 0 for size in sizes),
        slots=distillation.MOST_NATIVE_SLOTS if args.slots is None else args.slots,
        seed=args.seed,
        format=_format(args, checkpoint),
        begin=hashlib.sha256(before.read_bytes()).hexdigest()[:16] if before and begin else "",
        prompts=prompts.hash,
        prompts_share=prompts.share,
        intermediate_size=neurons,
        feedback_rank=rank,
        tap=args.tap if args.tap is not None else begin.info.tap if begin else 0,
        train=TrainSettings(learning_rate=rate, batch_tokens=args.batch_tokens, epochs=args.epochs),
    )
    dtype = "auto" if args.dtype in ("int8", "int4") else args.dtype
    model = TorchBackend(checkpoint, dtype, args.device, args.threads).model
    work = Path(args.work or f"{Path(args.out).with_suffix('')}-work")
    text, workers = Path(args.text) if args.text else work, args.threads or os.cpu_count() or 1

    def job_of(settings: distillation.Settings) -> distillation.Distillation:
        return distillation.Distillation(
            checkpoint, model, tokenizer, settings, work, text, judges, workers, begin, note, prompts, known
        )

    return settings, job_of, before, path


def _planned(args: argparse.Namespace, settings: distillation.Settings, job_of: JobOf) -> distillation.Settings:
    """With slots, tokens and a learning rate for this machine and the time there is, which is told, or those of the run
    that has begun."""
    job = job_of(settings)
    begun = _begun(job.folder, "tokens")
    if args.slots is None:
        settings = replace(settings, slots=_begun(job.folder, "slots") or job.usual_slots())
    if begun is None:
        forecast = job_of(settings).forecast()
        while args.slots is None and settings.slots > LEAST_SLOTS and _too_coarse(args.hours, forecast, settings.slots):
            settings = replace(settings, slots=settings.slots // 2)  # smaller shards
            forecast = job_of(settings).forecast()
        if args.hours is not None:
            settings = replace(settings, tokens=_within(args.hours, forecast, settings.slots))
        _tell(forecast, settings, job_of(settings))
    elif args.hours is not None:
        settings = replace(settings, tokens=begun)
    if job.begin is not None and args.learning_rate is None:
        rate = rate_to_go_on(job.checkpoint.config.hidden_size, settings.train.steps(settings.tokens))
        settings = replace(settings, train=replace(settings.train, learning_rate=rate))
    return settings


def _told(job: distillation.Distillation, file: Path, before: Path | None) -> Iterator[str]:
    """Of a head that has been trained. before: the head that it is compared with."""
    info = read_info(file)
    right = _share(info.acceptance.get("held_out_greedy"))
    if info.kind == NGRAM:
        yield f"{len(job.successors):,} successors, of held-out tokens they foresee {right}"
        return
    known = _share(info.acceptance.get("draft_vocabulary_coverage"))
    yield f"{info.kind} after layer {info.exit_layer}, held-out acceptance {right}, vocabulary covers {known}"
    if (now := info.acceptance.get("held_out_prompts")) is not None:
        was = "" if job.of_before is None else f"{job.of_before:.3f} before ({before}), "
        no_better = "; no better: sample more --tokens" if job.of_before is not None and now <= job.of_before else ""
        few = job.held_out_prompts < FEW_PROMPTS
        # As if a prompt were one throw of a coin, the least certain that it can be.
        sure = f", give or take {1 / math.sqrt(job.held_out_prompts):.2f}: too few to tell heads apart" if few else ""
        yield f"on {job.held_out_prompts} held-out prompts acceptance {was}{now:.3f} now{sure}{no_better}"


def _prompts(args: argparse.Namespace, tokenizer: Tokenizer, checkpoint: Checkpoint, judges: Sequence[str]) -> Prompts:
    """What --prompts holds, without what heads are judged by."""
    if args.prompts is None:
        return NO_PROMPTS
    longest = min(LONGEST, checkpoint.config.max_position_embeddings - LEAST_ANSWER)
    messages = [
        prompt.messages or ({"role": "user", "content": prompt.prompt},) for prompt in prompt_reader()(args.prompts)
    ]
    leaking = Deduplication(tokenizer, judges).leaking
    return prompts_of(messages, tokenizer, leaking, args.prompts_share, longest, args.seed, note)


def _before(args: argparse.Namespace, checkpoint: Checkpoint) -> Path | None:
    """The head that there is before: that of --begin, or for --prompts the one that ships."""
    if args.begin not in (None, "none"):
        return Path(args.begin)
    return find_shipped(checkpoint) if args.prompts is not None else None


def _begins(args: argparse.Namespace, before: HeadInfo, kinds: Sequence[str], layers: Sequence[int]) -> bool:
    """Does training go on from this head? Where --begin says nothing, it does if one just like it is to be trained."""
    same = (before.kind,) == tuple(kinds) and tuple(layers or (before.exit_layer,)) == (before.exit_layer,)
    return same if args.begin is None else bool(args.begin != "none")


def _begun(work: Path, name: str) -> int | None:
    """A number that an earlier run in this folder has planned with; None: there is none."""
    if not (work / "settings.json").exists():
        return None
    number = read_json_object(work / "settings.json").get(name)
    return number if isinstance(number, int) else None


def _too_coarse(hours: float | None, forecast: Forecast, slots: int) -> bool:
    """Would whole shards leave more than a fifth of the time?"""
    return hours is not None and 0 < hours < math.inf and forecast.shards_within(3600 * hours, slots) < 5


def _within(hours: float, forecast: Forecast, slots: int) -> int:
    """Tokens to sample, so that all is done in so many hours."""
    if not 0 < hours < math.inf:
        raise UsageError(f"--hours must be above 0, not {hours}")
    shards = forecast.shards_within(3600 * hours, slots)
    if shards == 0:
        shard, held_out = slots * STEPS, min(slots, HELD_OUT_SLOTS) * STEPS
        least = (forecast.sampling(shard + held_out) + forecast.training(shard)) / 3600
        raise UsageError(f"--hours {hours:g} is too short: the least that can be done takes about {least:.1f} here")
    return shards * slots * STEPS


def _tell(forecast: Forecast, settings: distillation.Settings, job: distillation.Distillation) -> None:
    """Time and disk of what no earlier run has sampled into this folder; PpsdError where the disk has no room."""
    sampled, shard = job.plan.tokens(job.plan.missing()), settings.slots * STEPS
    tokens = settings.shards * shard
    sampling, training = forecast.sampling(sampled), forecast.training(tokens)
    if tokens != settings.tokens:
        slots = f"{STEPS} in each of {settings.slots} slots; fewer --slots, smaller shards"
        note(f"--tokens {settings.tokens:,} becomes {tokens:,}: shards of {shard:,} ({slots}); one more is held out")
    states = len(job.plan.keep) * job.checkpoint.config.hidden_size * 2 if settings.format else 0
    disk = sampled * (states + 4)
    place = next(folder for folder in (job.text, *job.text.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < disk:
        raise PpsdError(
            f"the text takes {disk / 1e9:.2g} GB in {job.text}, and {free / 1e9:.2g} are free: fewer --tokens"
        )
    text = (
        f"sampling {sampled:,} tokens takes about {duration(sampling)} on this machine, and {disk / 1e9:.2g} GB of disk"
    )
    if sampled == 0:
        text = "all of its text has been sampled"
    if settings.kinds != (NGRAM,):
        steps = max(1, round(settings.train.steps(tokens)))
        text += f", training {steps:,} steps about {duration(training)}; {KNOWN}"
    note(text)


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _worth(folder: Path, head: Path, format: str, threads: int | None, acceptance: float) -> str:
    """What drafts cost with this head, measured, and what that lets expect."""
    engine = Engine.from_pretrained(folder, exit_head=head, backend="cpu", dtype=format, threads=threads)
    assert isinstance(engine.backend, CpuBackend)
    speed = expected_speed(engine.backend.costs(), acceptance)
    if speed < PAYS:
        return "no use on this machine: its drafts cost more than they save, and `auto` decodes plainly with it"
    return f"lets expect up to {speed:.2f}x plain decoding on this machine, in {format}"


def _share(value: float | None) -> str:
    return "unknown (no held-out answer is greedy: sample more --tokens)" if value is None else f"{value:.3f}"


def show(steps: Iterable[distillation.Progress], heads: Sequence[HeadInfo]) -> None:
    """A progress bar: tokens or steps, and the loss and the held-out acceptance of every head."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    kinds = len({info.kind for info in heads}) > 1
    names = [f"{info.kind} {info.exit_layer}" if kinds else str(info.exit_layer) for info in heads]
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None, figures="")
        for step in steps:
            figures = [f"{name}: loss {loss:.3f}" for name, loss in zip(names, step.losses, strict=False)]
            for place, acceptance in enumerate(step.acceptance or ()):
                figures[place] += f", acceptance {acceptance:.3f}"
            shown = " | ".join(figures)
            progress.update(task, description=step.phase, completed=step.done, total=step.total, figures=shown)


def _format(args: argparse.Namespace, checkpoint: Checkpoint) -> str:
    """In which the C++ engine samples; empty where torch does: on a GPU, and where C++ cannot run the model."""
    if pick_device(args.device).type != "cpu" or refuses(checkpoint.config):
        return ""
    return DEFAULT_FORMAT if args.dtype == "auto" else str(args.dtype)


def _kinds(text: str) -> tuple[str, ...]:
    return _once("--kind", text, tuple(kind.strip() for kind in text.split(",")), "kind")


def _layers(text: str) -> tuple[int, ...]:
    layers = tuple(sorted(_numbers("--exit-layer", text, "layer numbers, as in 3 or 3,6,10")))
    return _once("--exit-layer", text, layers, "layer")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_numbers("--draft-vocabulary", text, "numbers of ids, as in 4096 or 4096,8192,0")))


def _numbers(option: str, text: str, what: str) -> list[int]:
    try:
        return list(map(int, text.split(",")))
    except ValueError:
        raise UsageError(f"{option} takes {what}, not {quoted(text)}") from None


def _once(option: str, text: str, values: tuple[Value, ...], what: str) -> tuple[Value, ...]:
    if len(set(values)) != len(values):
        raise UsageError(f"{option} {text} names a {what} twice")
    return values


def _sizes_of_body(args: argparse.Namespace, begin: HeadFile | None, checkpoint: Checkpoint) -> tuple[int, int]:
    """Of the MLP and of the feedback: as asked for, else as the head has that training begins with."""
    neurons, rank = distillation.default_sizes(checkpoint.config)
    if begin is not None:
        neurons, rank = begin.info.intermediate_size, begin.info.feedback_rank
    neurons = neurons if args.intermediate_size is None else args.intermediate_size
    return neurons, rank if args.feedback_rank is None else args.feedback_rank


def _check_writable(folder: Path) -> None:
    """Now, and not when the head is trained."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PpsdError(f"cannot write --out to {folder}: {error.strerror}") from None


def _path(out: str, several_kinds: bool, several_layers: bool, several_sizes: bool) -> Callable[[HeadInfo, int], Path]:
    """The file of a head: `out` itself for one; for several, with kind, exit layer, draft vocabulary in its name."""
    path = Path(out)
    if path.suffix != ".safetensors":
        raise UsageError(f"--out must end in .safetensors, not {quoted(out)}")

    def name(info: HeadInfo, size: int) -> Path:
        parts = ((info.kind, several_kinds), (str(info.exit_layer), several_layers), (f"v{size}", several_sizes))
        return path.with_name("-".join([path.stem, *(part for part, told in parts if told)]) + path.suffix)

    return name
