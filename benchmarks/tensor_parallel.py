#!/usr/bin/env python3
"""A baseline for pipelines: tensor-parallel plain decoding, greedy, on the ranks that torchrun starts.

    torchrun --standalone --nproc-per-node 2 benchmarks/tensor_parallel.py --link-ms 1       rank 0 prints JSON

Every rank holds some heads, some inner channels of the MLP and some of the vocabulary of *every* layer (Shoeybi et al.,
Megatron-LM, arXiv 1909.08053), in the packed kernels of the cpu backend. Two all-reduces a layer add up what the ranks
make of a row. All ranks work on every token at once, one thread each. Sums are made in another order than in one
process, so that near ties may fall otherwise: the answers are not held to those of the schedules.

--link-ms: every all-reduce takes this much longer, the least that a link with this delay costs.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np
import numpy.typing as npt

from ppsd_rt import PpsdError, _native
from ppsd_rt._native import testing
from ppsd_rt.cpu.formats import FORMATS, kv_format, shape_of
from ppsd_rt.models.checkpoint import Array, Checkpoint, as_float32
from ppsd_rt.models.resolve import resolve_model
from ppsd_rt.models.rotary import inverse_frequencies
from ppsd_rt.models.tokenizer import load_tokenizer
from ppsd_rt.ranks.slices import layers_of

PROMPT = "Why is the sky blue?"
_PASS = 64  # rows of a pass over a prompt
_BLOCK = 32  # widths are multiples of this

Rows = npt.NDArray[np.float32]


def shares(total: int, ranks: int, step: int) -> list[int]:
    """`total` in parts that are multiples of `step`, as even as can be."""
    units, rest = divmod(total, step)
    if rest or units < ranks:
        raise PpsdError(f"{total} cannot be cut into {ranks} parts of whole {step}s: take fewer ranks")
    return [step * (units * (rank + 1) // ranks - units * rank // ranks) for rank in range(ranks)]


def pack_share(checkpoint: Checkpoint, rank: int, ranks: int, dtype: str) -> tuple[testing.LayerShares, int, int]:
    """(the share, its first id of the vocabulary, packed bytes)"""
    config = checkpoint.config
    group = config.num_attention_heads // config.num_key_value_heads
    keys = layers_of(shares(config.num_key_value_heads, ranks, 1), rank)
    inner = layers_of(shares(config.intermediate_size, ranks, _BLOCK), rank)
    ids = layers_of(shares(config.vocab_size, ranks, 1), rank)
    wide = config.head_dim
    tensors: dict[str, Array] = {}
    for name, tensor in checkpoint.tensors.items():
        if ".self_attn.q_proj." in name:
            tensor = tensor[keys[0] * group * wide : keys[1] * group * wide]
        elif ".self_attn.k_proj." in name or ".self_attn.v_proj." in name:
            tensor = tensor[keys[0] * wide : keys[1] * wide]
        elif name.endswith("o_proj.weight"):
            tensor = np.ascontiguousarray(tensor[:, keys[0] * group * wide : keys[1] * group * wide])
        elif name.endswith("o_proj.bias") and rank > 0:
            continue  # added once
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            tensor = tensor[inner[0] : inner[1]]
        elif name.endswith("down_proj.weight"):
            tensor = np.ascontiguousarray(tensor[:, inner[0] : inner[1]])
        elif name in ("lm_head.weight", "model.embed_tokens.weight"):
            tensor = tensor[ids[0] : ids[1]]
        tensors[name] = tensor
    shape = shape_of(
        replace(
            config,
            vocab_size=ids[1] - ids[0],
            intermediate_size=inner[1] - inner[0],
            num_attention_heads=(keys[1] - keys[0]) * group,
            num_key_value_heads=keys[1] - keys[0],
        )
    )
    frequencies = inverse_frequencies(config).tolist()
    model = _native.Model(shape, tensors, frequencies, dtype, kv_format(dtype, wide), 1)
    return testing.LayerShares(model), ids[0], model.packed_bytes


class Rank:
    """add_up: makes of a rank's part of a row the sum of all ranks' parts, in place. best: of all ranks' best (logit,
    -id)."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        share: testing.LayerShares,
        first_id: int,
        add_up: Callable[[Rows], None],
        best: Callable[[tuple[float, int]], tuple[float, int]],
    ) -> None:
        self._share, self._first_id, self._add_up, self._best = share, first_id, add_up, best
        self._embedding = checkpoint.tensors["model.embed_tokens.weight"]
        self._layers = checkpoint.config.num_hidden_layers

    def answer(self, prompt: list[int], count: int) -> tuple[list[int], float]:
        """The greedy answer, on every rank alike, and the seconds after its first token."""
        self._share.reserve(len(prompt) + count + 1)
        for first in range(0, len(prompt), _PASS):
            rows = self._pass(prompt[first : first + _PASS], first)
        tokens, begun = [self._choose(rows)], perf_counter()
        while len(tokens) < count:
            tokens.append(self._choose(self._pass(tokens[-1:], len(prompt) + len(tokens) - 1)))
        return tokens, perf_counter() - begun

    def _pass(self, ids: list[int], start: int) -> Rows:
        x = np.ascontiguousarray(as_float32(self._embedding[ids]))
        part = np.zeros_like(x)
        for layer in range(self._layers):
            self._share.attention(layer, x, start, part)
            self._add_up(part)
            x += part
            self._share.mlp(layer, x, part)
            self._add_up(part)
            x += part
        return x

    def _choose(self, rows: Rows) -> int:
        score, index = self._share.best(np.ascontiguousarray(rows[-1:]))
        return -self._best((score, -(self._first_id + index)))[1]  # equal logits: the lowest id


def measure(args: argparse.Namespace) -> dict[str, object]:
    """As one of the ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # torch computes nothing here
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    checkpoint = Checkpoint(Path(resolve_model(args.model)))
    share, first_id, packed_bytes = pack_share(checkpoint, rank, ranks, args.dtype)

    def add_up(part: Rows) -> None:
        dist.all_reduce(torch.from_numpy(part))
        if args.link_ms:
            _native.sleep_until(_native.wire_clock() + int(args.link_ms * 1e6))

    def best(mine: tuple[float, int]) -> tuple[float, int]:
        everyone = [torch.zeros(2, dtype=torch.float64) for _ in range(ranks)]
        dist.all_gather(everyone, torch.tensor(mine, dtype=torch.float64))
        return max((score, int(id)) for score, id in (each.tolist() for each in everyone))

    prompt = load_tokenizer(checkpoint.folder, checkpoint.config.vocab_size).encode(PROMPT)
    work = Rank(checkpoint, share, first_id, add_up, best)
    answers = [work.answer(prompt, args.tokens) for _ in range(args.repeats)]
    if any(ids != answers[0][0] for ids, _ in answers):
        raise PpsdError("the same prompt has given two answers")
    seconds = [seconds for _, seconds in answers]
    quartile = sorted(seconds)[len(seconds) // 4]  # as in ranks.py: what it takes when nothing disturbs it
    dist.destroy_process_group()
    return {
        "measurement": "tensor-parallel",
        "model": args.model,
        "dtype": args.dtype,
        "ranks": ranks,
        "rank": rank,
        "link_ms": args.link_ms,
        "share_megabytes": round(packed_bytes / 1e6, 1),
        "seconds": seconds,
        "tokens_per_second": (args.tokens - 1) / quartile,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="int8", choices=FORMATS)
    parser.add_argument("-n", "--tokens", type=int, default=192)
    parser.add_argument("-r", "--repeats", type=int, default=4)
    parser.add_argument("--link-ms", type=float, default=0.0)
    try:
        result = measure(parser.parse_args())
    except PpsdError as error:
        print(f"tensor_parallel: {error}", file=sys.stderr)
        return 1
    if result["rank"] == 0:
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
