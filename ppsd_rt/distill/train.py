"""Training exit heads on sampled text: the frozen model shows, the heads learn to foresee."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.exit_head import ExitHead, chunked_attention
from ..models.llama import LlamaForCausalLM, causal_attention
from ..models.rope import Rope
from .samplers import in_areas
from .shards import Text

AREAS = {"cpu": 8192, "cuda": 32768}  # tokens, padding included, that pass through the model together
WINDOW = 16  # steps that share their texts out by length
LONGEST_CHUNK = 8  # drafts in a row that a feedback head is trained for
DEAF_SHARE = 0.1  # of the texts on which a feedback head receives nothing
ANSWERED = 0.65  # of what is sampled, the share that heads are trained on (docs/history/exit-heads.md: 3769 steps)
CHUNK = 2048  # rows whose logits are held at a time: [CHUNK, draft vocabulary] in float32


@dataclass(frozen=True)
class TrainSettings:
    learning_rate: float = 5e-3
    warm_up: float = 0.03  # share of all steps; then a cosine to zero
    top_weight: float = 0.5  # of the cross-entropy on the model's top token; the rest is the KL to its distribution
    batch_tokens: int = 4096  # answer tokens per step
    epochs: int = 3

    def steps(self, tokens: int) -> float:
        """On so many sampled tokens."""
        return self.epochs * ANSWERED * tokens / self.batch_tokens


class Trainer:
    """Several heads (exit layers) on the same passes of the frozen model.

    Loss per row, with p the model's distribution over the draft vocabulary and q the head's:

        (1 - w) KL(p || q) + w (-log q[argmax p])

    whose gradient is that of the cross-entropy of q against the mixture (1 - w) p + w onehot(argmax p).
    Parameters and optimizer are float32; matrix products run in the model's dtype.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        heads: Sequence[ExitHead],
        texts: Sequence[Text],
        settings: TrainSettings,
        steps: int,
        rate: float | None = None,
    ) -> None:
        """Texts that carry the frozen model's hidden states are believed; of others they are computed anew.

        rate: at its highest, instead of the settings' learning rate.
        """
        self.model, self.heads, self.texts = model, list(heads), texts
        self.settings, self.steps, self.step = settings, steps, 0
        self.rate = settings.learning_rate if rate is None else rate
        norm, self._layers = model.model.norm.weight, model.config.num_hidden_layers
        self.device, self.dtype = norm.device, norm.dtype
        self._rope = Rope(model.config, 0)
        # Rows of the LM head that belong to the draft vocabulary, [draft vocabulary, hidden]: the same for all heads.
        ids = self.heads[0].draft_ids
        self._lm_head = model.lm_head.weight if ids is None else model.lm_head.weight[ids.to(self.device)]
        self._ids = torch.arange(len(self._lm_head), device=self.device) if ids is None else ids.to(self.device)
        self._frequencies = _counts(texts, model.config.vocab_size).to(self.device)[self._ids].log().log_softmax(0)
        self.guess = torch.zeros((), device=self.device)  # the loss of the last step, had it been guessed by frequency
        for head in self.heads:
            head.to(self.device, torch.float32).requires_grad_(True)
        parameters = [parameter for head in self.heads for parameter in head.parameters()]
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(parameters, self.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu)

    def learn(self, batch: Sequence[int]) -> Tensor:
        """One step on the texts with these indices -> the loss of each head, in nats per row, [heads].

        Nothing here waits for a GPU, which is to be a step behind: whoever reads the losses does.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * self._warmth()
        self.optimizer.zero_grad(set_to_none=True)
        rows = sum(self.texts[index].tokens for index in batch)
        losses = torch.zeros(len(self.heads), device=self.device)
        self.guess = torch.zeros((), device=self.device)
        for part in self._areas(self.texts, batch):
            losses += self._backward(part, rows)
        for head in self.heads:
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return losses

    @torch.no_grad()
    def accept(
        self, texts: Sequence[Text], vocabularies: Sequence[Sequence[int] | None] = (None,)
    ) -> list[list[float]]:
        """For each head, and draft vocabulary within the trainer's own (None: that one), the share of tokens of greedy
        answers that it foresees, each given the true text before it.

        This is the acceptance of greedy drafting: a draft token is judged only when all before it were right, and then
        the head has seen nothing but true tokens.
        """
        out = [torch.zeros_like(self._ids, dtype=torch.bool) for _ in vocabularies]
        for mask, some in zip(out, vocabularies, strict=True):
            if some is not None:
                mask |= ~torch.isin(self._ids, torch.tensor(some, device=self.device))
        right, judged = torch.zeros(len(self.heads), len(vocabularies), device=self.device), 0
        greedy = [index for index, text in enumerate(texts) if text.greedy]
        for part in self._areas(texts, greedy):
            ids, rows = self._pad([texts[index] for index in part])
            states = self._teacher([texts[index] for index in part], ids)
            distances = chunk_places(ids.shape, judged)
            where = self._where(rows)
            following = ids.flatten()[where + 1]
            judged += len(following)
            for number, head in enumerate(self.heads):
                hidden = self._student(head, states, distances).flatten(0, 1)[where]
                for h, true in zip(hidden.split(CHUNK), following.split(CHUNK), strict=True):
                    logits = self._logits(h)
                    for which, mask in enumerate(out):
                        best = logits.masked_fill(mask, -torch.inf).argmax(-1)
                        right[number, which] += (self._ids[best] == true).sum()
        shares: list[list[float]] = (right.double() / max(judged, 1)).tolist()
        return shares

    def _areas(self, texts: Sequence[Text], batch: Sequence[int]) -> Iterator[list[int]]:
        return in_areas({index: len(texts[index].ids) for index in batch}, AREAS[self.device.type])

    def _warmth(self) -> float:
        warm = max(1, round(self.steps * self.settings.warm_up))
        if self.step < warm:
            return (self.step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (self.step - warm) / max(1, self.steps - warm)))

    def _pad(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """-> ids [batch, longest], and which rows are followed by an answer token, [batch, longest] bool on the CPU."""
        longest = max(len(text.ids) for text in texts)
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        rows = torch.zeros(len(texts), longest, dtype=torch.bool)
        for number, text in enumerate(texts):
            ids[number, : len(text.ids)] = text.ids
            rows[number, text.answer - 1 : len(text.ids) - 1] = True
        if longest > len(self._rope.cos):
            self._rope = Rope(self.model.config, longest, self.device)
        return ids.to(self.device, non_blocking=True), rows

    def _where(self, rows: Tensor) -> Tensor:
        """The places of a mask's rows among all of [batch, longest]; found on the CPU, so that no GPU is waited for."""
        return rows.flatten().nonzero()[:, 0].to(self.device, non_blocking=True)

    @torch.no_grad()
    def _teacher(self, texts: Sequence[Text], ids: Tensor) -> dict[int, Tensor]:
        """-> hidden states after the layers that the heads read, the last one's before the norm, and embeddings (0):
        [batch, longest, hidden]."""
        layers = {layer for head in self.heads for layer in head.info.states(self._layers)}
        if not all(layers <= text.states.keys() for text in texts):
            return self.model.forward_batch(ids, self._rope, keep={0, *layers})[1]
        return {0: self.model.model.embed_tokens(ids)} | {layer: self._padded(texts, layer, ids) for layer in layers}

    def _padded(self, texts: Sequence[Text], layer: int, ids: Tensor) -> Tensor:
        padded = torch.zeros(*ids.shape, self.model.config.hidden_size, dtype=self.dtype)
        for row, text in enumerate(texts):
            padded[row, : len(text.ids)] = text.after(layer)
        return padded.to(self.device)

    def _student(self, head: ExitHead, states: Mapping[int, Tensor], distances: Tensor) -> Tensor:
        x, attend = states[head.info.exit_layer], causal_attention(self._rope)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            if head.tap is not None and head.feedback is not None:
                tapped = states[head.info.tap]
                beside = head.tap.feedback(head.tap.norm(tapped))
                x = head.feedback.along(x, states[self._layers], distances, beside)
                attend = chunked_attention(self._rope, *head.verified(x, tapped), distances)
            elif head.feedback is not None:
                x = head.feedback.along(x, states[self._layers], distances)
            return head.hidden(x, attend)

    def _logits(self, hidden: Tensor) -> Tensor:  # [n, hidden] -> [n, draft vocabulary] float32
        return (hidden.to(self.dtype) @ self._lm_head.t()).float()

    def _backward(self, part: Sequence[int], total_rows: int) -> Tensor:
        """Add the gradients of these texts to every head -> each head's part of the loss, [heads]."""
        texts = [self.texts[index] for index in part]
        ids, rows = self._pad(texts)
        states = self._teacher(texts, ids)
        for head in self.heads:
            if self.step == 0 and head.tap is not None and not head.tap.norm.weight.any():
                head.tap.norm.measure(
                    torch.cat([kept[: len(text.ids)] for kept, text in zip(states[head.info.tap], texts, strict=True)])
                )
        distances = chunk_places(ids.shape, self.step * 1009 + part[0], deaf=DEAF_SHARE)
        where = self._where(rows)
        hidden = [self._student(head, states, distances).flatten(0, 1)[where] for head in self.heads]
        teacher = self.model.model.norm(states[self._layers].flatten(0, 1)[where])
        losses, gradients, guess = self._loss([h.detach() for h in hidden], teacher)
        self.guess += guess / total_rows
        for h, gradient in zip(hidden, gradients, strict=True):
            h.backward(gradient / total_rows)
        return losses / total_rows

    @torch.no_grad()
    def _loss(self, hidden: Sequence[Tensor], teacher: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """For each head's hidden states [n, hidden] the summed loss of the rows, and its gradient [n, hidden]; and the
        loss of a guess by frequency.

        By hand and in chunks: through the LM head autograd would keep several [n, draft vocabulary] tensors alive.
        """
        losses, guess = torch.zeros(len(hidden), device=self.device), torch.zeros((), device=self.device)
        gradients: list[list[Tensor]] = [[] for _ in hidden]
        for start in range(0, len(teacher), CHUNK):
            chunk = slice(start, start + CHUNK)
            target, least, guessed = self._target(teacher[chunk])
            guess += guessed
            for number, h in enumerate(hidden):
                log_q = self._logits(h[chunk]).log_softmax(-1)
                losses[number] -= (target * log_q).sum() + least
                gradients[number].append((log_q.exp_() - target).to(self.dtype) @ self._lm_head)
        return losses, [torch.cat(g).to(h.dtype) for g, h in zip(gradients, hidden, strict=True)], guess

    @torch.no_grad()
    def _target(self, teacher: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a head is to make of rows whose normed last hidden states these are [n, hidden]: [n, draft vocabulary].

        Then, summed over the rows, the part of the cross-entropy that no head can avoid, and the loss of a guess by
        frequency.
        """
        weight = self.settings.top_weight
        log_p = self._logits(teacher).log_softmax(-1)
        target = log_p.exp()
        least = (weight - 1) * (target * log_p).sum()
        best = target.argmax(-1, keepdim=True)
        target.mul_(1 - weight).scatter_add_(1, best, torch.full_like(best, weight, dtype=target.dtype))
        return target, least, -(target.sum(0) @ self._frequencies) - least


def _counts(texts: Sequence[Text], vocabulary: int) -> Tensor:
    """[vocabulary] float32: how often an id comes up in the answers, and once more."""
    counts = torch.ones(vocabulary)
    for text in texts:
        counts.index_add_(0, text.written, torch.ones(text.tokens))
    return counts


def chunk_places(shape: Sequence[int], seed: int, deaf: float = 0.0) -> Tensor:
    """[texts, rows] int64: how many rows each comes after the newest verified one. Rows come in chunks at random.

    1, 2, .. in each chunk, which is 1 to LONGEST_CHUNK long; 0 all along for a share of the texts, at random: `deaf`.
    """
    texts, rows = shape
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, LONGEST_CHUNK + 1, (texts, rows), generator=generator)
    ends = lengths.cumsum(1)  # a chunk for each row are more than enough
    row = torch.arange(rows).expand(texts, rows).contiguous()
    chunk = torch.searchsorted(ends, row, right=True)
    places = row - (ends - lengths).gather(1, chunk) + 1
    return places * (torch.rand(texts, 1, generator=generator) >= deaf)


def batches(texts: Sequence[Text], settings: TrainSettings, seed: int) -> list[list[int]]:
    """Indices of the texts of every step: each epoch in an order of its own, `batch_tokens` answer tokens a step.

    The texts of a step are of like length, so that little is padding: WINDOW steps share theirs out by length.
    """
    generator = torch.Generator().manual_seed(seed)
    answers = [text.tokens for text in texts]
    size = max(1, round(WINDOW * settings.batch_tokens * len(texts) / max(1, sum(answers))))
    steps: list[list[int]] = []
    for _ in range(settings.epochs):
        order = torch.randperm(len(texts), generator=generator)
        for window in order.split(size):
            of_window: list[list[int]] = [[]]
            tokens = 0
            for index in sorted(window.tolist(), key=lambda index: len(texts[index].ids)):
                if tokens >= settings.batch_tokens:
                    of_window.append([])
                    tokens = 0
                of_window[-1].append(index)
                tokens += answers[index]
            steps += [of_window[place] for place in torch.randperm(len(of_window), generator=generator).tolist()]
    return steps
