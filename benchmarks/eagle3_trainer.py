"""An EAGLE-3 head in training (arXiv 2503.01840, section 3.2): its steps are unrolled, each with the loss of distill.

Step k reads what step k - 1 came to one row earlier, as a chain of drafts does. train_eagle3.py runs it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ppsd_rt.distill.shards import Text
from ppsd_rt.distill.train import CHUNK, Trainer, in_areas
from ppsd_rt.models.config import LayerAttention
from ppsd_rt.models.eagle3 import Eagle3Config
from ppsd_rt.models.eagle3_head import Eagle3Head
from ppsd_rt.models.head_file import EAGLE3, HeadInfo
from ppsd_rt.models.llama import Attend, LlamaForCausalLM
from ppsd_rt.models.rope import Rope

STEPS = 5  # unrolled
LATER = 0.8  # weight of a step's loss, over that of the step before: SafeAILab's
SLOWER = 0.1  # rate of the LM head, over that of the rest: docs/papers.md, EESD's own head


class Slowly(nn.Module):
    """A matrix that learns at a fraction of the rate: what it begins as, and a change."""

    def __init__(self, begin: Tensor) -> None:
        super().__init__()
        self.register_buffer("begin", begin.clone())

    def forward(self, change: Tensor) -> Tensor:
        return self.begin + SLOWER * change


def fresh_head(
    model: LlamaForCausalLM, taps: Sequence[int], draft_ids: Sequence[int], name: str, hash: str
) -> Eagle3Head:
    """Of the model's shape. It begins as the model's last layer, whose attention reads the feature alone at first; the
    feature as the last tap."""
    config = replace(model.config, num_hidden_layers=1, tie_word_embeddings=False)
    eagle = Eagle3Config(config, tuple(taps), norm_before_residual=True, fc_norm=True)
    head = Eagle3Head(eagle, HeadInfo(EAGLE3, 0, name, hash), len(draft_ids))
    last = {name: weight.float() for name, weight in model.model.layers[-1].state_dict().items()}
    for kind in "qkv":
        weight = last[f"self_attn.{kind}_proj.weight"]
        last[f"self_attn.{kind}_proj.weight"] = torch.cat((torch.zeros_like(weight), weight), dim=1)
    last["hidden_norm.weight"] = last["input_layernorm.weight"]
    head.layers[0].load_state_dict(last)
    hidden = config.hidden_size
    with torch.no_grad():
        for norm in head.fc_norm or ():
            norm.weight.fill_(1.0)
        head.fc.weight.zero_()
        head.fc.weight[:, -hidden:] = torch.eye(hidden)
        head.norm.weight.copy_(model.model.norm.weight)
    head.draft_ids = torch.tensor(draft_ids)
    head.lm_head.weight = nn.Parameter(model.lm_head.weight[head.draft_ids].float().clone())
    parametrize.register_parametrization(head.lm_head, "weight", Slowly(head.lm_head.weight.detach()))
    head.lm_head.parametrizations.weight.original.data.zero_()
    return head


def shifted(x: Tensor, rows: int) -> Tensor:
    """[..., rows, n] with what stood `rows` rows before, and zeros in the first ones."""
    return F.pad(x, (0, 0, rows, -rows))


def chain_attention(rope: Rope, earlier: list[tuple[Tensor, Tensor]]) -> Attend:
    """attend() of one step over whole texts. earlier: keys and values of the steps before; those of this one join them.

    A row of step k (from 0) sees the first step's rows down to k rows before its own, and of each later step the one
    row that stands between: what a chain that leaves verified text k rows before it would find in its KV cache.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, how: LayerAttention) -> Tensor:
        length, step = q.shape[1], len(earlier)
        q, k = (rope.rotate(x, slice(0, length)) if how.rotary else x for x in (q, k))
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # [batch, kv heads, rows, head_dim]
        earlier.append((k, v))
        q = q.transpose(1, 2).unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5  # .., kv heads, heads of a group, ..
        first_keys, first_values = earlier[0]
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-step)
        scores = (q.flatten(2, 3) @ first_keys.transpose(2, 3)).unflatten(2, q.shape[2:4]).float()
        between = [[shifted(x, step - number)[:, :, None] for x in earlier[number]] for number in range(1, step + 1)]
        beside = [(q * keys).sum(-1, keepdim=True).float() for keys, _ in between]
        weights = torch.cat((scores.masked_fill(~seen, -torch.inf), *beside), dim=-1).softmax(-1).to(v.dtype)
        mixed = (weights[..., :length].flatten(2, 3) @ first_values).unflatten(2, q.shape[2:4])
        for number, (_, values) in enumerate(between):
            mixed = mixed + weights[..., length + number, None] * values
        return mixed.flatten(1, 2).transpose(1, 2)

    return attend


def unrolled(head: Eagle3Head, embeddings: Tensor, taps: Tensor, rope: Rope, steps: int) -> list[Tensor]:
    """What the head's layer comes to in each step, [batch, rows, hidden].

    embeddings: of the token after each row's own, [batch, rows, hidden]; taps [batch, rows, taps * hidden]. The first k
    rows of step k (from 0) mean nothing: there is no text that such a chain could have left.
    """
    (layer,) = head.layers
    feature, earlier, outputs = head.feature(taps), [], []
    for _ in range(steps):
        outputs.append(layer(torch.cat((embeddings, feature), dim=-1), chain_attention(rope, earlier)))
        feature = shifted(head.next_feature(outputs[-1]), 1)
    return outputs


class EagleTrainer(Trainer):
    """Trainer's loss for every step of the one head, whose LM head learns too."""

    steps_of_head = STEPS

    def _outputs(self, part: Sequence[Text]) -> tuple[list[Tensor], Tensor, Tensor]:
        """-> what each step comes to in the rows that foresee an answer token [n, hidden], what the model's last layer
        did [n, hidden], and the tokens [n]. The same rows for all steps: but for the first ones of a text."""
        (head,) = self.heads
        ids, rows = self._pad(part)
        rows[:, : self.steps_of_head] = False
        layers = (*head.eagle.taps, self.model.config.num_hidden_layers)
        *taps, last = (self._padded(part, layer, ids) for layer in layers)
        own = F.pad(rows[:, 1:], (0, 1))  # row i of the head foresees what row i + 1 of the model does
        embeddings = self.model.model.embed_tokens(F.pad(ids[:, 1:], (0, 1)))
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            outputs = unrolled(head, embeddings, torch.cat(taps, dim=-1), self._rope, self.steps_of_head)
        return [output[own] for output in outputs], last[rows], ids.roll(-1, 1)[rows]

    def _head_logits(self, output: Tensor) -> Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.heads[0].logits(output).float()

    def _backward(self, part: Sequence[int], total_rows: int) -> Tensor:
        outputs, last, _ = self._outputs([self.texts[index] for index in part])
        leaves = [output.detach().requires_grad_() for output in outputs]
        shares = LATER ** torch.arange(self.steps_of_head)
        total = torch.zeros(1)
        for start in range(0, len(last), CHUNK):  # in chunks, for logits are large
            chunk = slice(start, start + CHUNK)
            target, least, guess = self._target(self.model.model.norm(last[chunk]))
            self.guess += guess / total_rows
            for leaf, share in zip(leaves, (shares / shares.sum()).tolist(), strict=True):
                off = -(target * self._head_logits(leaf[chunk]).log_softmax(-1)).sum() - least
                (share * off / total_rows).backward()
                total += share * off.detach()
        torch.autograd.backward(outputs, [leaf.grad for leaf in leaves])
        return total / total_rows

    @torch.no_grad()
    def accept(self, texts: Sequence[Text], vocabularies: Sequence[Any] = (None,)) -> list[list[float]]:
        """The mean of the steps. by_step: of each."""
        right, judged = [0] * self.steps_of_head, 0
        greedy = [index for index, text in enumerate(texts) if text.greedy]
        for part in in_areas(texts, greedy):
            outputs, _, following = self._outputs([texts[index] for index in part])
            judged += len(following)
            for step, output in enumerate(outputs):
                for h, true in zip(output.split(CHUNK), following.split(CHUNK), strict=True):
                    right[step] += int((self._ids[self._head_logits(h).argmax(-1)] == true).sum())
        self.by_step = [count / max(judged, 1) for count in right]
        return [[sum(self.by_step) / len(self.by_step)] * len(vocabularies)]
