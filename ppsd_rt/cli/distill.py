"""`ppsd-run distill`: train exit heads on text that the model writes itself."""

import argparse
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..backends import check_machine
from ..cpu.formats import DEFAULT_FORMAT, refuses
from ..distill import run as distillation
from ..distill.deduplication import Deduplication
from ..distill.forecast import Forecast
from ..distill.prompts import LONGEST, NO_PROMPTS, Prompts, prompts_of
from ..distill.rate import rate_to_go_on
from ..distill.run import Distillation
from ..distill.self_text import LEAST_ANSWER
from ..distill.shards import HELD_OUT_SLOTS, STEPS
from ..engine import Engine, open_model
from ..errors import PpsdError, UsageError
from ..models.checkpoint import Checkpoint
from ..models.files import read_json_object
from ..models.head_file import NGRAM, HeadFile, HeadInfo, find_shipped, read_info
from ..models.tokenizer import Tokenizer
from ..pipeline.price import expected_speed, measured_price
from ..printable import printable, quoted
from ..reference.backend import TorchBackend, pick_device
from . import signals
from .commands import prompt_reader
from .notes import complain, note
from .progress import progress_bar

FEW_PROMPTS = 32
DRAFTS = 4  # of a round, to measure what they cost
PAYS = 1.02  # times plain decoding: from here on drafts are worth their head
LEAST_SLOTS = 4  # of which a shard is small enough for the shortest --hours


def run(args: argparse.Namespace) -> None:
    check_machine(args.device, args.threads)
    if args.tokens is not None and args.hours is not None:
        raise UsageError("--tokens and --hours exclude each other: --hours says how many tokens there is time for")
    if args.hours is not None and not 0 < args.hours < math.inf:
        raise UsageError(f"--hours must be above 0, not {args.hours}")
    if "," in args.device:
        raise UsageError("distillation runs on one device; --device names one")
    path = _path(args)
    job = _planned(args, _asked(args))
    job.prepare(args.resume)
    try:
        for phase in (job.sample, job.train):
            show(phase(), job.infos)
    except KeyboardInterrupt:
        complain(
            f"{signals.said()}; texts that had ended are kept: the same command with --resume goes on from {job.folder}"
        )
        raise
    for file in job.save(path):
        for line in _told(job, file, args.threads):
            print(printable(f"{file}: {line}"))


def _asked(args: argparse.Namespace) -> Distillation:
    """What the options say."""
    checkpoint, tokenizer = open_model(args.model, "torch")
    judges = [prompt.prompt for prompt in prompt_reader()(args.judged_by)]
    prompts = _prompts(args, tokenizer, checkpoint, judges)
    before = find_shipped(checkpoint) if args.prompts is not None else None
    if args.begin not in (None, "none"):
        before = Path(args.begin)
    known = HeadFile.load(before, checkpoint) if before else None
    begin = known if known is not None and _begins(args, known.info) else None
    format = DEFAULT_FORMAT if args.dtype == "auto" else args.dtype
    if pick_device(args.device).type != "cpu" or refuses(checkpoint.config):
        format = ""  # then torch samples
    settings = distillation.Settings.from_args(args, checkpoint, begin, prompts, format)
    dtype = "auto" if args.dtype in ("int8", "int4") else args.dtype
    model = TorchBackend(checkpoint, dtype, args.device, args.threads).model
    work = Path(args.work or f"{Path(args.out).with_suffix('')}-work")
    text, workers = Path(args.text) if args.text else work, args.threads or os.cpu_count() or 1
    return Distillation(
        checkpoint, model, tokenizer, settings, work, text, judges, workers, begin, note, prompts, known
    )


def _planned(args: argparse.Namespace, job: Distillation) -> Distillation:
    """With slots, tokens and a learning rate for this machine and the time there is, which is told, or those of the run
    that has begun."""
    settings = read_json_object(job.folder / "settings.json", missing_ok=True)
    begun = {name: value for name, value in settings.items() if type(value) is int}
    if args.slots is None:
        job = job.with_settings(slots=begun.get("slots") or job.usual_slots())
    if "tokens" not in begun:
        forecast, slots = job.forecast(), job.settings.slots
        # Whole shards would leave more than a fifth of the time: smaller ones.
        while (
            args.hours and args.slots is None and slots > LEAST_SLOTS and forecast.shards_within(args.hours, slots) < 5
        ):
            slots //= 2
            job = job.with_settings(slots=slots)
            forecast = job.forecast()
        if args.hours is not None:
            job = job.with_settings(tokens=_within(args.hours, forecast, slots))
        _tell(forecast, job)
    elif args.hours is not None:
        job = job.with_settings(tokens=begun["tokens"])
    if job.begin is not None and args.learning_rate is None:
        train = job.settings.train
        rate = rate_to_go_on(job.checkpoint.config.hidden_size, train.steps(job.settings.tokens))
        job = job.with_settings(train=replace(train, learning_rate=rate))
    return job


def _told(job: Distillation, file: Path, threads: int | None) -> Iterator[str]:
    """Of a head that has been trained."""
    info, before = read_info(file), job.before
    share = info.acceptance.get("held_out_greedy")
    right = "unknown (no held-out answer is greedy: sample more --tokens)" if share is None else f"{share:.3f}"
    if info.kind == NGRAM:
        yield f"{len(job.successors):,} successors, of held-out tokens they foresee {right}"
    else:
        known = info.acceptance.get("draft_vocabulary_coverage")
        covers = "unknown" if known is None else f"{known:.3f}"
        yield f"{info.kind} after layer {info.exit_layer}, held-out acceptance {right}, vocabulary covers {covers}"
    if (now := info.acceptance.get("held_out_prompts")) is not None:
        was = "" if job.of_before is None else f"{job.of_before:.3f} before ({before.path if before else ''}), "
        no_better = "; no better: sample more --tokens" if job.of_before is not None and now <= job.of_before else ""
        few = job.held_out_prompts < FEW_PROMPTS
        # As if a prompt were one throw of a coin, the least certain that it can be.
        sure = f", give or take {1 / math.sqrt(job.held_out_prompts):.2f}: too few to tell heads apart" if few else ""
        yield f"on {job.held_out_prompts} held-out prompts acceptance {was}{now:.3f} now{sure}{no_better}"
    if job.infos and job.settings.format and share is not None:
        yield _worth(job.checkpoint.folder, file, job.settings.format, threads, share)


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


def _begins(args: argparse.Namespace, before: HeadInfo) -> bool:
    """Does training go on from this head? Where --begin says nothing, it does if one just like it is to be trained."""
    same = args.kind == (before.kind,) and args.exit_layer in (None, (before.exit_layer,))
    return same if args.begin is None else bool(args.begin != "none")


def _within(hours: float, forecast: Forecast, slots: int) -> int:
    """Tokens to sample, so that all is done in so many hours."""
    shards = forecast.shards_within(hours, slots)
    if shards == 0:
        shard, held_out = slots * STEPS, min(slots, HELD_OUT_SLOTS) * STEPS
        least = (forecast.sampling(shard + held_out) + forecast.training(shard)) / 3600
        raise UsageError(f"--hours {hours:g} is too short: the least that can be done takes about {least:.1f} here")
    return shards * slots * STEPS


def _tell(forecast: Forecast, job: Distillation) -> None:
    """Time and disk of what no earlier run has sampled into this folder; PpsdError where the disk has no room."""
    settings = job.settings
    sampled, shard = job.plan.tokens(job.plan.missing()), settings.slots * STEPS
    tokens = settings.shards * shard
    if tokens != settings.tokens:
        slots = f"{STEPS} in each of {settings.slots} slots; fewer --slots, smaller shards"
        note(f"--tokens {settings.tokens:,} becomes {tokens:,}: shards of {shard:,} ({slots}); one more is held out")
    states = len(job.plan.keep) * job.checkpoint.config.hidden_size * 2 if settings.format else 0
    disk = sampled * (states + 4)
    place = next(folder for folder in (job.text, *job.text.absolute().parents) if folder.exists())
    if (free := shutil.disk_usage(place).free) < disk:
        needed = f"the text takes {disk / 1e9:.2g} GB in {job.text}, and {free / 1e9:.2g} are free"
        raise PpsdError(f"{needed}: fewer --tokens")
    time = duration(forecast.sampling(sampled))
    text = f"sampling {sampled:,} tokens takes about {time} on this machine, and {disk / 1e9:.2g} GB of disk"
    if sampled == 0:
        text = "all of its text has been sampled"
    if settings.kinds != (NGRAM,):
        steps = max(1, round(settings.train.steps(tokens)))
        text += f", training {steps:,} steps about {duration(forecast.training(tokens))}"
    note(text)


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _worth(folder: Path, head: Path, format: str, threads: int | None, acceptance: float) -> str:
    """What drafts cost with this head, measured, and what that lets expect."""
    engine = Engine.from_pretrained(folder, exit_head=head, backend="cpu", dtype=format, threads=threads)
    speed = expected_speed(acceptance, measured_price(engine, DRAFTS))
    if speed < PAYS:
        return "no use on this machine: its drafts cost more than they save, and `auto` decodes plainly with it"
    return f"lets expect up to {speed:.2f}x plain decoding on this machine, in {format}"


def show(steps: Iterable[distillation.Progress], heads: Sequence[HeadInfo]) -> None:
    """A progress bar: tokens or steps, and the loss and the held-out acceptance of every head."""
    kinds = len({info.kind for info in heads}) > 1
    names = [f"{info.kind} {info.exit_layer}" if kinds else str(info.exit_layer) for info in heads]
    with progress_bar("") as advance:
        for step in steps:
            figures = [f"{name}: loss {loss:.3f}" for name, loss in zip(names, step.losses, strict=False)]
            for place, acceptance in enumerate(step.acceptance or ()):
                figures[place] += f", acceptance {acceptance:.3f}"
            advance(step.done, step.total, step.phase, " | ".join(figures))


def _path(args: argparse.Namespace) -> Callable[[HeadInfo, int], Path]:
    """The file of a head: `--out` itself for one; for several, with kind, exit layer, draft vocabulary in its name.

    Raises UsageError for another kind of file, and PpsdError where none can be written: now, and not after training.
    """
    path = Path(args.out)
    several = [len(values or ()) > 1 for values in (args.kind, args.exit_layer, args.draft_vocabulary)]
    if path.suffix != ".safetensors":
        raise UsageError(f"--out must end in .safetensors, not {quoted(args.out)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise PpsdError(f"cannot write --out to {path.parent}: {error.strerror}") from None

    def name(info: HeadInfo, size: int) -> Path:
        parts = zip((info.kind, str(info.exit_layer), f"v{size}"), several, strict=True)
        return path.with_name("-".join([path.stem, *(part for part, told in parts if told)]) + path.suffix)

    return name
