"""Sampled conversations on disk: token ids in safetensors shards, each reproducible from the seed and its number."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..models.checkpoint import read_file, save
from ..models.llama import LlamaForCausalLM
from .talk import Conversation, Frame, Talk

STEPS = 512  # tokens that each slot writes for a shard


@dataclass(frozen=True)
class Text:
    """ids [length] int64, of which ids[answer:] was written as the answer, greedily or not."""

    ids: Tensor
    answer: int
    greedy: bool


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"text-{number:05}.safetensors"


def write_shard(
    folder: Path, number: int, model: LlamaForCausalLM, frame: Frame, slots: int, seed: int
) -> Iterator[int]:
    """Sample shard `number` (slots * STEPS tokens) and save it whole; yields the tokens so far."""
    talk = Talk(model, frame, slots, seed * 1_000_003 + number)
    yield from talk.run(STEPS)
    save(shard_path(folder, number), _pack(talk.finished), {"seed": str(seed), "slots": str(slots)})


def read_shard(folder: Path, number: int) -> list[Text]:
    tensors = dict(read_file(shard_path(folder, number), integers=True))
    texts = tensors["ids"].long().split(tensors["lengths"].tolist())
    facts = zip(texts, tensors["answers"].tolist(), tensors["greedy"].tolist(), strict=True)
    return [Text(ids, answer, bool(greedy)) for ids, answer, greedy in facts]


def _pack(conversations: Sequence[Conversation]) -> dict[str, Tensor]:
    def integers(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return {
        "ids": integers([id for c in conversations for id in c.ids]),
        "lengths": integers([len(c.ids) for c in conversations]),
        "answers": integers([c.answer for c in conversations]),
        "greedy": integers([c.temperature == 0 for c in conversations]),
    }
