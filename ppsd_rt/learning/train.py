"""Training the head that drafts on what was answered before, and judging it before it comes into use.

Self-distillation as in `ppsd-run distill` (EESD, arXiv 2406.03853), on a user's own traffic as in Online Speculative
Decoding (arXiv 2310.07177): here while nothing is asked, in the engine's own number format. A head that is no better is
dropped.
"""

import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ..cpu.backend import CpuBackend
from ..cpu.machine import spare_memory
from ..distill.deduplication import Deduplication, runs_of
from ..distill.forecast import native_speed, step_seconds
from ..distill.mix import STARTERS, mix_of
from ..distill.prompts import Prompts, encode
from ..distill.rate import first_rate
from ..distill.samplers import NativeSampler
from ..distill.self_text import LEAST_ANSWER, MAX_ANSWER
from ..distill.shards import HELD_OUT, Plan, Text, native_samplers, read_shard, write_shards
from ..distill.train import CHUNK, Trainer, TrainSettings, batches
from ..errors import PpsdError
from ..models.checkpoint import Checkpoint
from ..models.exit_head import ExitHead
from ..models.files import read_json_object
from ..models.head_file import HeadFile
from ..models.llama import LlamaForCausalLM
from ..models.tokenizer import Tokenizer
from .heads import WORSE, LearnedHeads, Outcome
from .kept import LEAST_ANSWER as LEAST_KEPT
from .kept import Record, newest, remove

MOST_TOKENS = 200_000  # of answers and their prompts, the newest: what bounds time and memory
MOST_IDS = 2048  # of a text: the last ones of a longer one
MOST_STATES = 1 << 30  # bytes of their hidden states
NEAR, LONG_PROMPT = 8, 64  # ids: prompts so long that differ in the last few may be one that was typed on
JUDGED, LEAST_JUDGED, MOST_JUDGED = 0.1, 8, 64  # of the answers, the newest: never trained on
SETTINGS = TrainSettings(epochs=6, batch_tokens=1024)  # small steps: 153 of them learn more from 28,000 tokens than 53
RATE = 0.15  # of that for a fresh head: 7.5e-4 for the default model
# Of what was learned the new head keeps the largest of these shares with which it foresees answers to general prompts
# as before (weights between two models: WiSE-FT, arXiv 2109.01903).
SHARES = (1.0, 0.7, 0.5, 0.35)
GENERAL = 0.5  # share of own text that answers general prompts
TOGETHER = 16  # texts that pass through the model side by side
SLOTS = 64  # of own text: 65,536 tokens to train on, and as many of which answers to general prompts judge


@dataclass
class Learning:
    """A training: `run` yields (what it does, done, of) and ends with `outcome`."""

    folder: Path
    heads: LearnedHeads
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    model: LlamaForCausalLM
    format: str  # of the engine whose answers were kept
    threads: int
    slots: int = SLOTS
    settings: TrainSettings = SETTINGS
    seed: int = 0
    outcome: Outcome | None = None

    def run(self) -> Iterator[tuple[str, int, int]]:
        """Raises PpsdError where there is too little to learn from, no head to go on from, or no room."""
        config, names = self.checkpoint.config, self.heads.state.names
        self.heads.enough()
        before = self.heads.load()
        assert before is not None
        layers = before.info.states(config.num_hidden_layers)
        plan = self._own_text(layers)
        if not plan.prompts.held_out:
            raise PpsdError("no general prompt fits this model's context: nothing would show what a head forgets")
        self._check_room(before, 2 * len(layers) * config.hidden_size * plan.tokens(plan.missing()))
        unique = Deduplication(self.tokenizer, ())
        judged, learned, place = self._divide(unique, self._most(layers))
        for tokens in write_shards(plan, native_samplers(self.checkpoint, self.format, plan)):
            yield "writing text to mix in", tokens, plan.tokens(range(2))
        held_out, general = unique.new(read_shard(plan.folder, HELD_OUT)), len(plan.mix.names)
        fixed = [text for text in held_out if text.family == general]  # of prompts that the other shard does not have
        own = [text for text in held_out if text.family != general] + unique.new(read_shard(plan.folder, 1))
        texts: list[Text] = []
        for text in self._with_states([*judged, *learned], layers):
            texts.append(text)
            yield "reading answers", len(texts), len(judged) + len(learned)
        judged, learned = texts[: len(judged)], texts[len(judged) :]
        old, new = self._head(before), self._head(before)
        tokens = sum(text.tokens for text in learned)
        mixed = [*learned, *own[newest([text.tokens for text in own], tokens) :]]
        steps = batches(mixed, self.settings, self.seed)
        judge = Trainer(self.model, [old], [], self.settings, 1)
        trainer = Trainer(self.model, [new], mixed, self.settings, len(steps), RATE * first_rate(config.hidden_size))
        for number, batch in enumerate(steps, 1):
            trainer.learn(batch)
            yield "training", number, len(steps)
        self.outcome = self._judge(judge, trainer, judged, fixed, tokens)
        path = None
        if self.outcome.better and self.heads.state.names == names:  # else the user went back meanwhile
            path = self.heads.new_path()
            facts = {"kept_answers": round(self.outcome.after, 4), "kept_answers_before": round(self.outcome.before, 4)}
            recipe = {**before.info.recipe, "learned_tokens": tokens}
            new.info = replace(
                before.info,
                model=self.checkpoint.name,
                model_hash=self.checkpoint.hash,
                sample=self.checkpoint.sample,
                recipe=recipe,
                acceptance={**before.info.acceptance, **facts},
            )
            new.save(path, torch.int8, None, before.successors)
        self.heads.trained(place, self.outcome, path)

    def forecast(self) -> float:
        """Seconds, measured in moments: of writing own text that is missing, reading the answers, and training."""
        before = self.heads.load()
        if before is None:
            return 0.0
        layers = before.info.states(self.checkpoint.config.num_hidden_layers)
        speed = native_speed(self.checkpoint, self.format, self.threads, self.slots, layers)
        plan = self._own_text(layers)
        judged, learned, _ = self._divide(Deduplication(self.tokenizer, ()), self._most(layers))
        passed = plan.tokens(plan.missing()) + sum(len(text.ids) for text in (*judged, *learned))
        trained = 2 * self.settings.epochs * sum(text.tokens for text in learned)
        accepted = 2 * sum(text.tokens for text in judged) + (1 + len(SHARES)) * len(plan.prompts.held_out) * MAX_ANSWER
        steps = (trained + accepted / 3) / self.settings.batch_tokens  # to judge takes a third: nothing goes back
        return passed / speed + steps * step_seconds(self.model, [self._head(before)], self.settings, True)

    def _most(self, layers: Sequence[int]) -> int:
        """Ids to learn from."""
        return min(MOST_TOKENS, MOST_STATES // (2 * len(layers) * self.checkpoint.config.hidden_size))

    def _own_text(self, layers: Sequence[int]) -> Plan:
        """Written once: a shard to judge by, with the answers to a third of the general prompts, and one to mix in."""
        mix = mix_of(self.tokenizer, frozenset(self.checkpoint.config.eos_token_ids))
        asked = enumerate(read_json_object(STARTERS)["prompts"], 1)
        ids = [encode(self.tokenizer, [{"role": "user", "content": text}], number) for number, text in asked]
        ids = [one for one in ids if len(one) <= self.checkpoint.config.max_position_embeddings - LEAST_ANSWER]
        prompts = Prompts(GENERAL, tuple(one for place, one in enumerate(ids) if place % 3), tuple(ids[::3]))
        folder = self.folder / "-".join(["own", self.format, prompts.hash, *map(str, layers)])
        for other in {*self.folder.glob("own-*")} - {folder}:
            remove(other)
        folder.mkdir(mode=0o700, exist_ok=True)
        return Plan(folder, 2, self.slots, self.seed, mix, tuple(layers), prompts)

    def _check_room(self, head: HeadFile, disk: int) -> None:
        config = self.checkpoint.config
        width = 4 if self.format == "float32" else 2  # bytes, at most; the model to train on has been loaded
        rows = TOGETHER * MOST_IDS * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        reading = width * (self.checkpoint.parameters + rows)
        drafts = config.vocab_size if head.draft_ids is None else len(head.draft_ids)
        weights = sum(tensor.size for tensor in head.tensors.values())
        # Of float32: what `Trainer` holds of a chunk's probabilities; two heads, one of them with its gradient, Adam's
        # two moments and a copy.
        training = 4 * (5 * CHUNK * drafts + 6 * weights)
        memory = MOST_STATES + max(reading, training)
        for what, needed, free in (
            ("memory", memory, spare_memory()),
            (f"of the disk of {self.folder}", disk, shutil.disk_usage(self.folder).free),
        ):
            if free < needed:
                raise PpsdError(f"learning needs {needed / 1e9:.1f} GB {what}, and {free / 1e9:.1f} are free")

    def _divide(self, unique: Deduplication, most: int) -> tuple[list[Text], list[Text], int]:
        """The newest answers, to judge by; those before, to learn from, of `most` ids; and the id of the last one."""
        records = self.heads.enough()
        texts, whole = [], {}  # by its text: a record before it is cut
        for record, _ in records:
            if record.free and (cut := max(0, len(record.ids) - MOST_IDS)) < record.answer:
                # Called greedy: what counts is whether a head foresees it, however it was drawn.
                texts.append(Text(torch.from_numpy(record.ids[cut:].astype("int64")), record.answer - cut, True))
                whole[id(texts[-1])] = record
        texts = unique.new(texts)
        first = len(texts) - max(LEAST_JUDGED, min(MOST_JUDGED, int(JUDGED * len(texts))))
        judged, texts = texts[max(0, first) :], texts[: max(0, first)]
        asked = [whole[id(text)] for text in judged]
        texts = [text for text in texts if not any(_alike(whole[id(text)], one) for one in asked)]
        others = texts[newest([len(text.ids) for text in texts], most) :]
        if not others:
            raise PpsdError(f"{self.folder} has {len(judged)} answers to judge by, and no others to learn from")
        return judged, others, records[-1][1]

    def _judge(
        self, judge: Trainer, trainer: Trainer, judged: Sequence[Text], fixed: Sequence[Text], tokens: int
    ) -> Outcome:
        sizes = [text.tokens for text in judged]
        own_before, own_after = judge.accept(fixed)[0][0], 0.0
        whole = [weight.detach().clone() for weight in trainer.heads[0].parameters()]
        for kept in SHARES:
            weights = zip(trainer.heads[0].parameters(), judge.heads[0].parameters(), whole, strict=True)
            for weight, old, learned in weights:
                weight.data = torch.lerp(old.data, learned, kept)
            own_after = trainer.accept(fixed)[0][0]
            if own_after > own_before - WORSE:
                break
        before, after = ([one.accept([text])[0][0] for text in judged] for one in (judge, trainer))
        gain, error = gain_of(before, after, sizes)
        share = sum(right * size for right, size in zip(before, sizes, strict=True)) / sum(sizes)
        return Outcome(tokens, share, share + gain, error, own_before, own_after, round(time.time()))

    def _with_states(self, texts: Sequence[Text], layers: Sequence[int]) -> Iterator[Text]:
        """With the hidden states of their rows, as the engine computes them in its own format."""
        backend = CpuBackend(self.checkpoint, self.format, "cpu", self.threads)
        for start in range(0, len(texts), TOGETHER):
            some = texts[start : start + TOGETHER]
            longest = max(len(text.ids) for text in some) + 1
            sampler = NativeSampler(backend, len(some), longest, layers, ())
            written = [sampler.write(text.ids.tolist(), 0.0, 0, 1) for text in some]
            while not all(one.over for one in written):
                sampler.step()
            for text, one in zip(some, written, strict=True):
                rows = one.states()
                assert rows is not None
                yield replace(text, states={layer: rows[: len(text.ids), kind] for kind, layer in enumerate(layers)})

    def _head(self, file: HeadFile) -> ExitHead:
        ids = None if file.draft_ids is None else file.draft_ids.tolist()
        return ExitHead.from_model(self.model, file.info, ids, file)


def _alike(record: Record, other: Record) -> bool:
    """Is one the other's prompt answered again, at a temperature or with a few more letters?"""
    prompt, its = record.ids[: record.answer], other.ids[: other.answer]
    if np.array_equal(prompt, its):
        return True
    same = max(len(prompt), len(its)) - NEAR
    if same < LONG_PROMPT - NEAR or not np.array_equal(prompt[:same], its[:same]):
        return False
    runs = ({*runs_of(one.ids[one.answer :], LEAST_KEPT).tolist()} for one in (record, other))
    return not set.isdisjoint(*runs)


def gain_of(before: Sequence[float], after: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    """Of all tokens together, and its standard error: answers vary, tokens of one answer are alike.

    before, after: shares of each answer's tokens; sizes: how many it has.
    """
    gains = [size * (new - old) for old, new, size in zip(before, after, sizes, strict=True)]
    gain = sum(gains) / sum(sizes)
    squares = sum((one - gain * size) ** 2 for one, size in zip(gains, sizes, strict=True))
    return gain, math.sqrt(squares * len(sizes) / max(1, len(sizes) - 1)) / sum(sizes)
