"""EESD's own head: a layer, a norm and an LM head that are trained together, beside `layer`, which shares the model's.

All begin alike (the model's last layer, norm and rows of the LM head), read the same text in the same order, and are
judged by the same held-out answers of the model. The LM head has the rows of the draft vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn

from ppsd_rt.distill.run import HELD_OUT, Distillation, Settings
from ppsd_rt.distill.shards import Text, read_shard
from ppsd_rt.distill.train import CHUNK, Trainer, TrainSettings, batches, in_areas
from ppsd_rt.lab.cli.prompt_files import read_prompts
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import HeadInfo
from ppsd_rt.models.tokenizer import load_tokenizer

from .experiment import Claim, Experiment, Found, Parts, markdown
from .heads import EXIT, FORMAT, SLOTS, VOCABULARY, default_model, work

AMOUNTS, SEEDS = (65_536, 262_144), (1, 2, 3)  # answer tokens, read once; orders of the texts
# Whose LM head, and how fast that learns beside the layer: 0, not at all. EESD's rate is not known, so there are two.
FORMS = {"the model's: `layer`": 0.0, "its own: EESD's": 1.0, "its own, a tenth of the rate": 0.1}


class OwnHeads(Trainer):
    """A head for each of FORMS; its LM head: the model's rows and a change, [draft vocabulary, hidden], that learns."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.changes = [nn.Parameter(torch.zeros_like(self._lm_head, dtype=torch.float32)) for _ in FORMS]
        self.optimizer.add_param_group({"params": self.changes})

    def _rows_of(self, number: int) -> Tensor:
        rate = tuple(FORMS.values())[number]
        return (self._lm_head.float() + rate * self.changes[number]).to(self.dtype) if rate else self._lm_head

    @torch.no_grad()
    def _loss(self, hidden: Sequence[Tensor], teacher: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """As of Trainer, which says what the loss is. The sums of the changes' gradients are kept for _backward."""
        losses, guess = torch.zeros(len(hidden)), torch.zeros(())
        gradients: list[list[Tensor]] = [[] for _ in hidden]
        rows = [self._rows_of(number) for number in range(len(hidden))]
        self._sums = [torch.zeros_like(change) for change in self.changes]
        for start in range(0, len(teacher), CHUNK):
            chunk = slice(start, start + CHUNK)
            target, least, guessed = self._target(teacher[chunk])
            guess += guessed
            for number, (h, rate) in enumerate(zip(hidden, FORMS.values(), strict=True)):
                x = h[chunk].to(self.dtype)
                log_q = (x @ rows[number].t()).float().log_softmax(-1)
                losses[number] -= (target * log_q).sum() + least
                off = (log_q.exp_() - target).to(self.dtype)
                gradients[number].append(off @ rows[number])
                if rate:
                    self._sums[number] += rate * (off.t() @ x).float()
        return losses, [torch.cat(g).to(h.dtype) for g, h in zip(gradients, hidden, strict=True)], guess

    def _backward(self, part: Sequence[int], total_rows: int) -> Tensor:
        losses = super()._backward(part, total_rows)
        for change, added in zip(self.changes, self._sums, strict=True):
            change.grad = added / total_rows if change.grad is None else change.grad + added / total_rows
        return losses

    @torch.no_grad()
    def foresees(self, texts: Sequence[Text]) -> list[float]:
        """The share of the tokens of greedy answers that each head names, given the true text before them."""
        right, judged = [0] * len(FORMS), 0
        for part in in_areas(texts, [index for index, text in enumerate(texts) if text.greedy]):
            group = [texts[index] for index in part]
            ids, rows = self._pad(group)
            *exits, last = self._teacher(group, ids)
            following = ids[:, 1:][rows[:, :-1]]
            judged += len(following)
            nowhere = torch.zeros(ids.shape, dtype=torch.int64)
            for number, (head, states) in enumerate(zip(self.heads, exits, strict=True)):
                hidden = self._student(head, states, last, nowhere)[rows].to(self.dtype)
                named = self._ids[(hidden @ self._rows_of(number).t()).argmax(-1)]
                right[number] += int((named == following).sum())
        return [count / max(judged, 1) for count in right]


def parts(quick: bool) -> Parts:
    amounts, seeds = (AMOUNTS[:1], SEEDS[:1]) if quick else (AMOUNTS, SEEDS)
    return {f"{tokens:,} tokens, seed {seed}": partial(measured, tokens, seed) for tokens in amounts for seed in seeds}


@cache
def texts_of(tokens: int) -> tuple[list[Text], list[Text], list[int]]:
    """Held-out texts, texts to train on, and the draft vocabulary: sampled once, for all seeds."""
    checkpoint, model = default_model()
    settings = Settings(
        model_hash=checkpoint.hash,
        kinds=("layer",),
        exit_layers=(EXIT,),
        tokens=tokens,
        draft_vocabularies=(VOCABULARY,),
        slots=SLOTS,
        seed=1,
        format=FORMAT,
    )
    folder = work() / f"eesd-head-{tokens}"
    tokenizer = load_tokenizer(checkpoint.folder, checkpoint.config.vocab_size)
    judges = [prompt.prompt for prompt in read_prompts(None)]
    job = Distillation(checkpoint, model, tokenizer, settings, folder, work() / "self-generated-text", judges, 2)
    job.prepare(resume=True)
    for _ in job.sample():
        pass
    held_out = [text for text in read_shard(job.text, HELD_OUT) if text.greedy]
    texts = [text for number in range(1, settings.shards + 1) for text in read_shard(job.text, number)]
    counts = Counter(id for text in texts for id in text.ids[text.answer :].tolist())
    return held_out, texts, sorted(id for id, _ in counts.most_common(VOCABULARY))


def measured(tokens: int, seed: int) -> dict[str, Any]:
    checkpoint, model = default_model()
    held_out, texts, ids = texts_of(tokens)
    settings = TrainSettings(epochs=1, batch_tokens=2048)
    plan = batches(texts, settings, seed)
    info = HeadInfo("layer", EXIT, checkpoint.name, checkpoint.hash)
    heads = [ExitHead.from_model(model, info, ids) for _ in FORMS]
    trainer = OwnHeads(model, heads, texts, settings, len(plan))
    for batch in plan:
        losses = trainer.learn(batch)
    shares = trainer.foresees(held_out)
    judged = sum(len(text.ids) - text.answer for text in held_out)
    return {"tokens": tokens, "judged": judged, "steps": len(plan), "losses": losses.tolist(), "acceptance": shares}


def table(found: Found) -> str:
    rows = []
    for tokens in dict.fromkeys(case["tokens"] for case in found.values()):
        cases = [case for case in found.values() if case["tokens"] == tokens]
        for number, form in enumerate(FORMS):
            shares = [case["acceptance"][number] for case in cases]
            beside = [case["acceptance"][number] - case["acceptance"][0] for case in cases]
            losses = mean(case["losses"][number] for case in cases)
            figures = f"{mean(shares):.3f}", f"{min(shares):.3f} to {max(shares):.3f}"
            more = f"{min(beside):+.3f} to {max(beside):+.3f}" if number else "-"
            rows.append((f"{tokens:,}", form, str(len(cases)), *figures, more, f"{losses:.2f}"))
    head = ("tokens", "LM head", "seeds", "acceptance, held out: mean", "least to most", "less `layer`'s, by seed")
    after = f"\n\nJudged by {next(iter(found.values()))['judged']:,} held-out tokens of the model's greedy answers."
    return markdown((*head, "last loss, nats"), rows, left=2) + after


EESD_HEAD = Experiment(
    "eesd_head",
    (Claim("EESD", "abstract", "an early-exiting layer with an LM head and a norm of its own, self-distilled"),),
    parts,
    table,
)
