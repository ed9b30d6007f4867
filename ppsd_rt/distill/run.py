"""A distillation from beginning to end, in a folder of its own, resumable at any moment."""

import hashlib
import json
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import PpsdError, UsageError
from ..models.checkpoint import Checkpoint
from ..models.config import LlamaConfig
from ..models.exit_head import ExitHead
from ..models.files import one_line, read_json_object
from ..models.head_file import KINDS, NGRAM, HeadFile, HeadInfo, save_head
from ..models.llama import LlamaForCausalLM
from ..models.tokenizer import Tokenizer
from .deduplication import Deduplication
from .forecast import Forecast, native_speed, sampling_speed, step_seconds
from .mix import mix_of
from .prompts import FAMILY, NO_PROMPTS, Prompts
from .rate import first_rate, judged, next_rate, trial_steps
from .samplers import MOST_SLOTS, TorchSampler, slots_within
from .shards import HELD_OUT, STEPS, Plan, Text, native_samplers, read_shard, torch_samplers, write_shards
from .successors import count_successors, foreseen
from .train import Trainer, TrainSettings, batches

CHECKPOINT_SECONDS = 45.0  # an interruption loses less than a minute
PEEK_STEPS = 25  # steps between looks at the held-out text
READ_STEPS = {"cpu": 1, "cuda": 8}  # steps between reads of the losses, for which a GPU is waited for
PEEK_TEXTS = 48  # greedy texts of such a look; the end uses all
TOKENS = 2_000_000  # to sample, where nothing is said
MOST_NATIVE_SLOTS = 64  # rows of one pass of the C++ engine
SLOTS = f"from 1 to {MOST_NATIVE_SLOTS} on a CPU, to 100,000 on a GPU"
KNOWN_COUNT = 4  # times more that an id counts which the head drafts that training begins with
WIDE = 1024  # from this hidden size on, a whole layer of the model is more than a head needs
TEXT_SETTINGS = ("model_hash", "slots", "seed", "format", "prompts", "prompts_share")  # that decide what is sampled


def default_exit_layer(layers: int) -> int:
    """Of a model of so many layers: a tenth of them, as was found best for 30 (docs/history/exit-heads.md)."""
    return max(1, round(layers / 10))


def default_sizes(config: LlamaConfig) -> tuple[int, int]:
    """The width of a head's MLP and the rank of its feedback; 0: the model's, and full rank."""
    wide = config.hidden_size >= WIDE
    return (config.hidden_size * 5 // 6 // 32 * 32, config.hidden_size // 6 // 32 * 32) if wide else (0, 0)


@dataclass(frozen=True)
class Settings:
    """What decides the outcome; a run can be resumed only with the same."""

    model_hash: str
    kinds: tuple[str, ...]
    exit_layers: tuple[int, ...]  # ascending; a head of each kind after each; 0: on the embeddings, which nobody keeps
    tokens: int
    draft_vocabularies: tuple[int, ...]  # sizes, 0: all ids; the largest is trained with, a file is written for each
    slots: int
    seed: int
    format: str = ""  # that the C++ engine samples in; empty: torch samples
    begin: str = ""  # the hash of the head's file that training begins with; empty: the model's last layers
    prompts: str = ""  # the hash of the user's prompts; empty: there are none
    prompts_share: float = 0.0
    intermediate_size: int = 0  # of the heads' MLPs; 0: the model's
    feedback_rank: int = 0  # HeadInfo.feedback_rank
    tap: int = 0  # HeadInfo.tap
    train: TrainSettings = field(default_factory=TrainSettings)

    def __post_init__(self) -> None:
        trained = (*KINDS[1:], NGRAM)
        for what, value, fits, wanted in (
            ("--kind", self.kinds, set(self.kinds) <= {*trained}, f"of {', '.join(trained)}"),
            ("--tokens", self.tokens, self.tokens > 0, "at least 1"),
            ("--slots", self.slots, 0 < self.slots <= (MOST_NATIVE_SLOTS if self.format else 10**5), SLOTS),
            ("--learning-rate", self.train.learning_rate, 0 < self.train.learning_rate < math.inf, "above 0"),
            ("--draft-vocabulary", self.draft_vocabularies, min(self.draft_vocabularies) >= 0, "0 (all ids) or more"),
            ("--seed", self.seed, 0 <= self.seed < 2**32, "from 0 to 2^32 - 1"),
        ):
            if not fits:
                raise UsageError(f"{what} must be {wanted}, not {value}")

    @classmethod
    def from_args(
        cls, args: Namespace, checkpoint: Checkpoint, begin: HeadFile | None, prompts: Prompts, format: str
    ) -> "Settings":
        """What the options of `ppsd-run distill` say, and what is usual where they say nothing."""
        config, info = checkpoint.config, begin.info if begin else None
        neurons, rank = (info.intermediate_size, info.feedback_rank) if info else default_sizes(config)
        layer = info.exit_layer if info else default_exit_layer(config.num_hidden_layers)

        def said(value: int | None, usual: int) -> int:
            return usual if value is None else value

        return cls(
            model_hash=checkpoint.hash,
            kinds=args.kind,
            exit_layers=tuple(sorted(args.exit_layer or (layer,))),
            tokens=said(args.tokens, TOKENS),
            draft_vocabularies=tuple(size if size < config.vocab_size else 0 for size in args.draft_vocabulary),
            slots=said(args.slots, MOST_NATIVE_SLOTS),
            seed=args.seed,
            format=format,
            begin=hashlib.sha256(begin.path.read_bytes()).hexdigest()[:16] if begin and begin.path else "",
            prompts=prompts.hash,
            prompts_share=prompts.share,
            intermediate_size=said(args.intermediate_size, neurons),
            feedback_rank=said(args.feedback_rank, rank),
            tap=said(args.tap, info.tap if info else 0),
            train=TrainSettings(
                first_rate(config.hidden_size) if args.learning_rate is None else args.learning_rate,
                batch_tokens=args.batch_tokens,
                epochs=args.epochs,
            ),
        )

    @property
    def shards(self) -> int:
        """Of training text; the held-out shard comes on top."""
        return -(-self.tokens // (self.slots * STEPS))


@dataclass(frozen=True)
class Progress:
    """phase: `sampling` or `training`; done of total (tokens, steps); the latest figures of each head."""

    phase: str
    done: int
    total: int
    losses: tuple[float, ...] = ()
    acceptance: tuple[float, ...] = ()


@dataclass
class Distillation:
    """sample() then train() then save(); both of the former yield Progress and may be cut off anywhere.

    text: the folder of the sampled text, which several runs can share. judges: prompts that heads are judged by; text
    that holds one is not trained on. workers: threads that sample side by side on a CPU; they do not change what is
    sampled. begin: a head that training goes on from. tell: of what the user should know. before: a head that the new
    ones are compared with, on held-out prompts.
    """

    checkpoint: Checkpoint
    model: LlamaForCausalLM
    tokenizer: Tokenizer
    settings: Settings
    folder: Path
    text: Path
    judges: Sequence[str] = ()
    workers: int = 1
    begin: HeadFile | None = None
    tell: Callable[[str], None] = lambda text: None
    prompts: Prompts = NO_PROMPTS
    before: HeadFile | None = None

    def __post_init__(self) -> None:
        model, settings, checkpoint = self.model, self.settings, self.checkpoint
        self.trials: list[tuple[float, float]] = []  # loss and rate of each
        self.judged = False  # the learning rate stays
        self.infos = [
            HeadInfo(
                kind,
                layer,
                checkpoint.name,
                settings.model_hash,
                intermediate_size=settings.intermediate_size if kind != "adapter" else 0,
                feedback_rank=settings.feedback_rank if kind == "feedback" else 0,
                tap=settings.tap if kind == "feedback" else 0,
                sample=checkpoint.sample,
            )
            for kind in settings.kinds
            if kind != NGRAM
            for layer in settings.exit_layers
        ]
        for info in self.infos:
            info.check(model.config)
            if self.begin is not None:
                self.begin.check_grows(info, model.config)
        mix = mix_of(self.tokenizer, frozenset(checkpoint.config.eos_token_ids))
        keep = tuple(sorted({layer for info in self.infos for layer in info.states(model.config.num_hidden_layers)}))
        self.plan = Plan(self.text, settings.shards + 1, settings.slots, settings.seed, mix, keep, self.prompts)
        self.device = model.model.norm.weight.device
        if self.device.type == "cuda":
            torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for each shape

    def with_settings(self, **changes: Any) -> "Distillation":
        """The same job, of changed settings; nothing has begun yet."""
        return replace(self, settings=replace(self.settings, **changes))

    def usual_slots(self) -> int:
        """As many as a pass, or a GPU's memory, has room for, but so few that the text to sample has four shards."""
        if self.device.type != "cuda":
            return max(4, min(MOST_NATIVE_SLOTS, self.settings.tokens // (4 * STEPS)))
        longest = self.plan.capacity(self.model.config.max_position_embeddings)
        room = slots_within(0.9 * torch.cuda.mem_get_info(self.device)[0], self.model, longest)
        return max(1, min(room, MOST_SLOTS, self.settings.tokens // STEPS))

    def prepare(self, resume: bool) -> None:
        """Claim the folders, or take up what an earlier run with the same settings left in them."""
        wanted = json.loads(json.dumps(asdict(self.settings)))
        if not _claim(self.folder / "settings.json", wanted) and not resume:
            raise PpsdError(f"{self.folder} holds an earlier run: add --resume, or choose another --work folder")
        sampled = {name: wanted[name] for name in TEXT_SETTINGS}
        _claim(self.text / "text.json", {**sampled, "layers": list(self.plan.keep)}, at_least="layers")
        self.plan = replace(self.plan, keep=tuple(read_json_object(self.text / "text.json")["layers"]))

    def forecast(self) -> Forecast:
        """Measured now, in seconds; with one sampler of `workers` threads, a little slower than so many samplers."""
        settings, longest = self.settings, min(512, self.checkpoint.config.max_position_embeddings)
        if settings.format:
            speed = native_speed(self.checkpoint, settings.format, self.workers, settings.slots, self.plan.keep)
        else:
            speed = sampling_speed(TorchSampler(self.model, settings.slots, longest, settings.seed, ()))
        size = 0 if 0 in settings.draft_vocabularies else max(settings.draft_vocabularies)
        heads = [ExitHead.from_model(self.model, info, [*range(size)] or None) for info in self.infos]
        seconds = step_seconds(self.model, heads, settings.train, bool(settings.format)) if heads else 0.0
        return Forecast(speed, seconds, settings.train)

    def sample(self) -> Iterator[Progress]:
        """Text: the held-out shard, then the shards to train on; those that are there already are kept."""
        plan = self.plan
        if self.settings.format:
            samplers = native_samplers(self.checkpoint, self.settings.format, plan, self.workers)
            written = write_shards(plan, samplers, self.workers)
        else:
            written = write_shards(plan, torch_samplers(self.model, plan))
        for tokens in written:
            yield Progress("sampling", tokens, plan.tokens(range(plan.shards)))

    def train(self) -> Iterator[Progress]:
        unique = Deduplication(self.tokenizer, self.judges)
        held_out = [text for text in unique.new(read_shard(self.text, HELD_OUT)) if text.greedy]
        numbers = range(1, self.settings.shards + 1)
        texts = [text for number in numbers for text in unique.new(read_shard(self.text, number))]
        self._log(texts=len(texts), doubles=unique.doubles, leaks=unique.leaks)
        self.successors = count_successors(texts)
        self.foreseen = foreseen(self.successors, held_out)
        self._log(successors=len(self.successors), foreseen=self.foreseen)
        if not self.infos:
            return
        self.frequent = self._by_frequency(texts)
        plan = batches(texts, self.settings.train, self.settings.seed)
        self._begin_training(texts, len(plan), self.settings.train.learning_rate)
        self._load()
        acceptance: tuple[float, ...] = ()
        losses: list[float] = []
        saved = time.monotonic()
        trial = trial_steps(len(plan), self.settings.train.batch_tokens)
        unread: list[torch.Tensor] = []
        while self.trainer.step < len(plan):
            unread.append(torch.stack([*self.trainer.learn(plan[self.trainer.step]), self.trainer.guess]))
            step = self.trainer.step
            peeks = step % PEEK_STEPS == 0 or step == len(plan)
            if step % READ_STEPS[self.device.type] and step != trial and not peeks:
                continue
            read = torch.stack(unread).tolist()
            unread = []
            *losses, self.guess = read[-1]
            if self._begins_anew(read, trial, len(plan)):
                continue
            if peeks:
                shares = self.trainer.accept(held_out[:PEEK_TEXTS]) if held_out else []
                acceptance = tuple(of_head[-1] for of_head in shares)
                self._log(step=step, losses=losses, peek_acceptance=acceptance)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self._save()
                saved = time.monotonic()
            yield Progress("training", step, len(plan), tuple(losses), acceptance)
        self._save()
        if losses and not max(losses) < self.guess:
            self.tell(
                f"these heads have learned nothing: their loss is {max(losses):.2f}, and a guess by frequency has "
                f"{self.guess:.2f}; sample more --tokens, or give a lower --learning-rate"
            )
        vocabularies = [self._draft_ids(size) for size in self.settings.draft_vocabularies]
        shares = self.trainer.accept(held_out, vocabularies)
        self.acceptance = [[share if held_out else None for share in of_head] for of_head in shares]
        self.coverage = [_coverage(held_out, ids) for ids in vocabularies]
        self._compare([text for text in held_out if self.plan.families[text.family] == FAMILY], vocabularies)
        facts = {"of_prompts": self.of_prompts, "of_before": self.of_before} if self.held_out_prompts else {}
        self._log(
            step=len(plan), acceptance=self.acceptance, coverage=self.coverage, held_out_texts=len(held_out), **facts
        )

    def _compare(self, answers: Sequence[Text], vocabularies: Sequence[list[int] | None]) -> None:
        """On greedy answers to held-out prompts: acceptance of each head and vocabulary, and of the head before."""
        self.of_prompts, self.of_before = self.trainer.accept(answers, vocabularies), None
        self.held_out_prompts = len(answers)
        if self.before is not None and self.before.drafts and answers:
            head = ExitHead.from_file(self.before, self.model)
            ((self.of_before,),) = Trainer(self.model, [head], [], self.settings.train, 1).accept(answers)

    def _begin_training(self, texts: Sequence[Text], steps: int, rate: float) -> None:
        self.trainer = Trainer(self.model, self._fresh_heads(), texts, self.settings.train, steps, rate)
        self.trial: list[Sequence[float]] = []  # of the first steps the losses of the heads, and that of a guess

    def _begins_anew(self, read: Sequence[Sequence[float]], trial: int, steps: int) -> bool:
        """With another learning rate, where the first `trial` steps have taught nothing. read: of each step since the
        last time the losses of the heads and of a guess."""
        if self.trainer.step > trial or self.judged:
            return False
        self.trial += read
        if self.trainer.step < trial:
            return False
        loss, guess = judged(self.trial)
        self.trials.append((loss, self.trainer.rate))
        now, rate = self.trainer.rate, self.trainer.rate if loss < guess else next_rate(self.trials)
        self.judged = rate >= now
        self._log(trial={"rate": now, "loss": loss, "guess": guess}, next_rate=rate)
        if loss < guess:
            return False
        goes_on = "goes on all the same, for no rate did better" if rate == now else f"begins anew with {rate:.2g}"
        self.tell(
            f"a learning rate of {now:.2g} teaches nothing: after {trial} steps the loss is {loss:.2f}, and a guess by "
            f"frequency has {guess:.2f}; training {goes_on}"
        )
        if rate != now:
            self._begin_training(self.trainer.texts, steps, rate)
        return rate != now

    def save(self, path: Callable[[HeadInfo, int], Path]) -> list[Path]:
        """Write every head, cut to every draft vocabulary, to path(head, size) -> the files.

        Each says what it was made from, and how well it foresees held-out text, if some of that was greedy.
        """
        written = []
        if NGRAM in self.settings.kinds:
            info = HeadInfo(NGRAM, 0, self.checkpoint.name, self.settings.model_hash, asdict(self.settings))
            if self.foreseen is not None:
                info = replace(info, acceptance={"held_out_greedy": round(self.foreseen, 4)})
            written.append(path(info, 0))
            save_head(written[-1], info, {}, None, successors=self.successors)
        if not self.infos:
            return written
        sizes = self.settings.draft_vocabularies
        for head, shares, prompts in zip(self.trainer.heads, self.acceptance, self.of_prompts, strict=True):
            for size, share, of_prompts, coverage in zip(sizes, shares, prompts, self.coverage, strict=True):
                recipe = {**asdict(self.settings), "steps": self.trainer.step, "learning_rate": self.trainer.rate}
                right = of_prompts if self.held_out_prompts else None
                facts = {"held_out_greedy": share, "draft_vocabulary_coverage": coverage, "held_out_prompts": right}
                known = {name: round(value, 4) for name, value in facts.items() if value is not None}
                head.info = replace(head.info, recipe=recipe, acceptance=known)
                written.append(path(head.info, size))
                head.save(written[-1], torch.int8, self._draft_ids(size), self.successors)
        return written

    def _by_frequency(self, texts: Sequence[Text]) -> list[int]:
        """All ids: the special ones, then the others as often as they come up in the sampled answers."""
        config = self.checkpoint.config
        special = [id for id in sorted(self.tokenizer.special_ids) if id < config.vocab_size]
        counts = torch.cat([text.written for text in texts]).bincount(minlength=config.vocab_size)
        if self.begin is not None and self.begin.draft_ids is not None:
            counts[torch.from_numpy(self.begin.draft_ids).long()] += KNOWN_COUNT
        return list(dict.fromkeys([*special, *counts.argsort(descending=True, stable=True).tolist()]))

    def _draft_ids(self, size: int) -> list[int] | None:
        return sorted(self.frequent[:size]) if size else None

    def _fresh_heads(self) -> list[ExitHead]:
        sizes = self.settings.draft_vocabularies
        largest = None if 0 in sizes else self._draft_ids(max(sizes))
        return [ExitHead.from_model(self.model, info, largest, self.begin) for info in self.infos]

    def _save(self) -> None:
        state = {
            "step": self.trainer.step,
            "heads": [head.state_dict() for head in self.trainer.heads],
            "optimizer": self.trainer.optimizer.state_dict(),
            "rate": self.trainer.rate,
            "trial": self.trial,
            "trials": self.trials,
            "judged": self.judged,
        }
        path = self.folder / "training.pt"
        unfinished = path.with_suffix(".unfinished")
        torch.save(state, unfinished)
        unfinished.replace(path)

    def _load(self) -> None:
        path = self.folder / "training.pt"
        if path.exists():
            try:
                state: dict[str, Any] = torch.load(path, map_location=self.trainer.device, weights_only=True)
                for head, parameters in zip(self.trainer.heads, state["heads"], strict=True):
                    head.load_state_dict(parameters)
                self.trainer.optimizer.load_state_dict(state["optimizer"])
                self.trainer.step, self.trainer.rate = state["step"], state["rate"]
                self.trial, self.trials, self.judged = state["trial"], state["trials"], state["judged"]
            except MemoryError:
                raise
            except Exception:  # torch and pickle raise of every kind
                raise PpsdError(
                    f"{path} is damaged: delete it, and --resume trains from the beginning, on the text that is there"
                ) from None

    def _log(self, **facts: object) -> None:
        with open(self.folder / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time()), **facts}) + "\n")


def _claim(path: Path, wanted: dict[str, Any], at_least: str = "") -> bool:
    """Write `wanted` to a new file: True. Or compare it with what is there, where `at_least` may hold more: False."""
    if path.exists():
        found = read_json_object(path)
        for key, value in wanted.items():
            have = found.get(key)
            known = {item for item in have if type(item) is int} if isinstance(have, list) else set()
            if have != value and not (key == at_least and known.issuperset(value)):
                raise PpsdError(
                    f"{path.parent} was begun with {key} = {one_line(have)}, not {value}: "
                    "resume with the same options, or choose another folder"
                )
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(wanted, indent=1) + "\n")
        unfinished.replace(path)
    except OSError as error:
        raise PpsdError(f"cannot write to the folder {path.parent}: {error.strerror}") from None
    return True


def _coverage(texts: Sequence[Text], draft_ids: Sequence[int] | None) -> float | None:
    """Share of the answers' tokens that the draft vocabulary can draft at all; None: there are none."""
    if draft_ids is None:
        return 1.0
    if not texts:
        return None
    known = torch.tensor(sorted(draft_ids))
    answers = torch.cat([text.written for text in texts])
    return float(torch.isin(answers, known).float().mean())
