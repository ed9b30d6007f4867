"""What the Triton kernels compute, by their formulas, in torch: one function for each kernel's file."""

import torch
import torch.nn.functional as F
from noise_twin import gumbel
from torch import Tensor

from ppsd_rt.triton_kernels.linear import Weight, normalise_twin
from ppsd_rt.triton_kernels.state import ACCEPTED, COMMITTED, DRAFTED, EPOCH, ROWS, START, TOKEN


def linear_twin(
    x: Tensor, weight: Weight, *, norm: Tensor | None = None, eps: float = 0.0,
    bias: Tensor | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """x [rows, inputs] -> float32 [rows, outputs]."""
    y = (x.float() if norm is None else normalise_twin(x, norm, eps)) @ weight.wide().t()
    y = y if bias is None else y + bias.float()
    return y if residual is None else residual.float() + y


def attention_twin(queries: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None = None) -> Tensor:
    """queries [rows, heads, head_dim] at positions start.. -> float32 [rows, heads, head_dim], by the formula."""
    rows, heads, head_dim = queries.shape
    length, group = start + rows, heads // len(keys)
    k, v = (cache[:, :length].float().repeat_interleave(group, 0) for cache in (keys, values))
    scores = torch.einsum("rhd,hpd->hrp", queries.float(), k) * head_dim**-0.5
    behind = start + torch.arange(rows, device=k.device)[:, None] - torch.arange(length, device=k.device)
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return torch.einsum("hrp,hpd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def embedding_twin(text: Tensor, table: Tensor, start: int, rows: int) -> Tensor:
    """float32 [rows, hidden]."""
    return table[text[start : start + rows].long()].float()


def feedback_twin(
    x: Tensor, last_hidden: Tensor, norm: Tensor, eps: float, weight: Weight, start: int, rows: int, known: int
) -> Tensor:
    """float32 [rows, hidden]."""
    hidden = x.shape[1]
    y, distance = x[start : start + rows].float().clone(), start + rows - known
    if known > 0 and 1 <= distance <= weight.outputs // hidden:
        matrix = Weight(weight.wide()[(distance - 1) * hidden : distance * hidden])
        y[-1] += linear_twin(last_hidden[known - 1 : known], matrix, norm=norm, eps=eps)[0]
    return y


def heads_twin(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, start: int, *, seed: int = 0, temperature: float = 0.0,
    draft_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x [rows, hidden] -> choices and confidences [rows], scores and logits [rows, outputs]."""
    logits = linear_twin(x, weight, norm=norm, eps=eps)
    ids = torch.arange(weight.outputs, device=x.device) if draft_ids is None else draft_ids.long()
    positions = start + 1 + torch.arange(len(x), device=x.device)
    scores = logits
    if temperature > 0:
        noise = [torch.from_numpy(gumbel(seed, int(p), ids.cpu().numpy())) for p in positions]
        scores = scores / temperature + torch.stack(noise).to(x.device)
    best = scores.argmax(-1, keepdim=True)
    return ids[best[:, 0]], logits.softmax(-1).gather(1, best)[:, 0], scores, logits


def qkv_twin(
    x: Tensor, norm: Tensor, eps: float, weight: Weight, bias: Tensor | None, rotations: Tensor | None,
    heads: int, kv_heads: int, start: int, *,
    kv: Weight | None = None, norms: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [rows, hidden] -> float32 queries [rows, heads, head_dim], keys and values [rows, kv_heads, head_dim]."""
    weight = weight if kv is None else Weight(torch.cat([weight.wide(), kv.wide()]))
    y = linear_twin(x, weight, norm=norm, eps=eps, bias=bias).unflatten(1, (heads + 2 * kv_heads, -1))
    q, k, v = y.split((heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = normalise_twin(q, norms[0], eps), normalise_twin(k, norms[1], eps)
    if rotations is None:
        return q, k, v
    cos, sin = rotations[start : start + len(x), None].chunk(2, dim=-1)

    def turned(y: Tensor) -> Tensor:
        a, b = y.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    return turned(q), turned(k), v


def swiglu_twin(x: Tensor, norm: Tensor, eps: float, weight: Weight) -> Tensor:
    """x [rows, hidden] -> float32 [rows, inner]."""
    gate, up = linear_twin(x, weight, norm=norm, eps=eps).chunk(2, dim=-1)
    return F.silu(gate) * up


def verdict_twin(text: list[int], choices: list[int], late: dict[int, int], state: dict[int, int]) -> None:
    """One token after another."""
    state[ACCEPTED] = state[COMMITTED] = 0
    if late[ROWS] == 0 or late[EPOCH] != state[EPOCH]:
        return
    for choice in choices[: late[ROWS]]:
        place = state[START] + 1
        drafted = place < state[DRAFTED]
        agree = drafted and text[place] == choice
        text[place], state[TOKEN], state[START] = choice, choice, place
        state[COMMITTED] += 1
        state[ACCEPTED] += agree
        state[DRAFTED] = max(state[DRAFTED], place + 1)
        if drafted and not agree:
            state[EPOCH] += 1
            state[DRAFTED] = place + 1
        if not agree:
            break
