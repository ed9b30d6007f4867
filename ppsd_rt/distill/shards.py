"""Sampled texts on disk: token ids in safetensors shards, each reproducible from the seed and its number.

Beside the shards lie the hidden states of their rows, where the sampler hands them out: they came for nothing while the
text was written, and to compute them again would cost as much as the sampling did.
"""

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..cpu.backend import CpuBackend
from ..errors import PpsdError
from ..models.checkpoint import Checkpoint, read_file, save
from ..models.stored import Array
from .mix import Mix
from .prompts import FAMILY, NO_PROMPTS, Ids, Prompts
from .samplers import NativeSampler, Sampler, States, TorchSampler
from .self_text import MAX_ANSWER, Conversation, SelfText

STEPS = 1024  # tokens that each slot writes for a shard: less than a minute with 64 slots on one core
HELD_OUT = 0  # number of the shard that is never trained on
HELD_OUT_SLOTS = 128  # at most, of that shard: of thousands a GPU would write more than is ever judged by

Samplers = Callable[[int, int], Sampler]  # a fresh one, of so many slots, for each seed


@dataclass(frozen=True)
class Text:
    """ids [length] int64, of which ids[answer:] was written as the answer, greedily or not.

    states: by layer, [length, hidden] bfloat16 bits on the disk: what that many layers made of it; empty: not kept.
    """

    ids: Tensor
    answer: int
    greedy: bool
    family: int = 0
    states: Mapping[int, States] = field(default_factory=dict)

    @property
    def written(self) -> Tensor:
        return self.ids[self.answer :]

    @property
    def tokens(self) -> int:
        """Of the answer."""
        return len(self.ids) - self.answer

    def after(self, layer: int) -> Tensor:
        """[length, hidden] bfloat16: the hidden states after this many layers."""
        return torch.from_numpy(self.states[layer]).view(torch.bfloat16)


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"text-{number:05}.safetensors"


def states_path(folder: Path, number: int) -> Path:
    return beside(shard_path(folder, number))


def beside(text: Path) -> Path:
    """Where the hidden states of a file of texts are."""
    return text.with_name(text.name.replace("text", "states", 1))


def cuts(folder: Path, number: int) -> dict[int, Path]:
    """What interrupted runs have written of a shard, in order, by the step that each ended with."""
    found = folder.glob(f"text-{number:05}-*.safetensors")
    return dict(sorted((int(path.stem.rpartition("-")[2]), path) for path in found))


@dataclass(frozen=True)
class Plan:
    """Which shards there are to be, and what decides their content."""

    folder: Path
    shards: int
    slots: int
    seed: int
    mix: Mix
    keep: tuple[int, ...]  # the layers whose hidden states are kept, in order
    prompts: Prompts = NO_PROMPTS

    def missing(self) -> list[int]:
        return [number for number in range(self.shards) if not shard_path(self.folder, number).exists()]

    def slots_of(self, number: int) -> int:
        return min(self.slots, HELD_OUT_SLOTS) if number == HELD_OUT else self.slots

    def tokens(self, numbers: Iterable[int]) -> int:
        """That these shards take."""
        return sum(self.slots_of(number) * STEPS for number in numbers)

    @property
    def there(self) -> int:
        """Tokens of the shards that are there, and of those that have begun."""
        begun = sum(self.slots_of(number) * self.begun(number) for number in self.missing())
        return self.tokens(range(self.shards)) - self.tokens(self.missing()) + begun

    def begun(self, number: int) -> int:
        """Steps of this shard that interrupted runs have done."""
        return max(cuts(self.folder, number), default=0)

    def of_shard(self, number: int, seed: int) -> Iterator[tuple[Ids, bool]]:
        """Its prompts. All that are its own are answered: few texts take as many rows as a prompt and MAX_ANSWER."""
        learned = self.prompts.learned
        rows = MAX_ANSWER + sum(map(len, learned)) / max(1, len(learned))
        own = max(1, int(self.prompts.share * self.slots * STEPS / rows))
        return self.prompts.of_shard(number, own, random.Random(seed))

    @property
    def families(self) -> list[str]:
        """Shards have the place of a text's family in this list."""
        return [*self.mix.names, FAMILY]

    def capacity(self, context: int) -> int:
        """Tokens of the longest text that can come up, within the model's context."""
        return min(max(self.mix.longest, self.prompts.longest) + MAX_ANSWER, context)


def write_shards(plan: Plan, samplers: Samplers, workers: int = 1) -> Iterator[int]:
    """Sample what is missing; yields the number of tokens so far, those of earlier runs included.

    workers: threads that write a shard each; they do more than as many threads of one sampler. How many there are does
    not change the shards.
    """
    if workers > 1:
        yield from _write_side_by_side(plan, samplers, workers)
    else:
        for number in plan.missing():
            done = plan.there
            with closing(_write_shard(plan, number, samplers)) as written:
                for tokens in written:
                    yield done + tokens
    yield plan.there


def _write_side_by_side(plan: Plan, samplers: Samplers, workers: int) -> Iterator[int]:
    begun, done, stop = plan.there, dict.fromkeys(plan.missing(), 0), Event()

    def write(number: int) -> None:
        with closing(_write_shard(plan, number, samplers)) as written:
            for tokens in written:
                done[number] = tokens
                if stop.is_set():
                    return

    pool = futures.ThreadPoolExecutor(workers)
    try:
        pending = {pool.submit(write, number) for number in done}
        while pending:
            ended, pending = futures.wait(pending, timeout=0.2)
            for future in ended:
                future.result()
            yield begun + sum(done.values())
    finally:
        stop.set()  # after the step at hand each saves the texts that are whole
        pool.shutdown(cancel_futures=True)


def native_samplers(checkpoint: Checkpoint, format: str, plan: Plan, threads: int = 1) -> Samplers:
    """C++ samplers with one thread each, on weights that `threads` have packed once for all."""
    backend = CpuBackend(checkpoint, format, "cpu", threads).beside(1)
    longest = plan.capacity(checkpoint.config.max_position_embeddings)
    return lambda slots, seed: NativeSampler(backend, slots, longest, plan.keep, plan.mix.end_ids)


def torch_samplers(model: Any, plan: Plan) -> Samplers:
    longest = plan.capacity(model.config.max_position_embeddings)
    return lambda slots, seed: TorchSampler(model, slots, longest, seed, plan.mix.end_ids)


def _write_shard(plan: Plan, number: int, samplers: Samplers) -> Generator[int, None, None]:
    """Sample one shard (slots * STEPS tokens), or what is left of it, and save it; yields the tokens so far.

    Where it is cut off, the texts that there are by then are saved.
    """
    begun, path = plan.begun(number), shard_path(plan.folder, number)
    seed = plan.seed * 1_000_003 + number + (begun << 40)
    generated = SelfText(
        samplers(plan.slots_of(number), seed), plan.mix, seed, plan.prompts.share, plan.of_shard(number, seed)
    )
    done = 0
    try:
        for tokens in generated.run(STEPS - begun):
            done = tokens // plan.slots_of(number)
            yield tokens
    except (GeneratorExit, KeyboardInterrupt):
        generated.end()
        if generated.finished:
            _save(path.with_stem(f"{path.stem}-{begun + done}"), plan, generated.finished)
        raise
    _save(path, plan, generated.finished)


def _save(path: Path, plan: Plan, texts: Sequence[Conversation]) -> None:
    metadata = {"seed": str(plan.seed), "slots": str(plan.slots)}
    rows = [c.states for c in texts if c.states is not None]
    if rows and plan.keep:
        states = np.concatenate(rows)
        by_layer = {str(layer): states[:, kind] for kind, layer in enumerate(plan.keep)}
        save(beside(path), by_layer, metadata)
    save(path, _pack(texts, plan.families), metadata)  # last: it says that all is there


def read_shard(folder: Path, number: int) -> list[Text]:
    """PpsdError for a damaged one: sampling it anew gives the same text, and its states, again."""
    texts = []
    for path in (*cuts(folder, number).values(), shard_path(folder, number)):
        try:
            texts += _read_texts(path)
        except (PpsdError, KeyError, ValueError, RuntimeError):
            raise PpsdError(
                f"{path} or the states beside it are damaged: delete {path.name}, and --resume samples it anew"
            ) from None
    return texts


def _read_texts(path: Path) -> list[Text]:
    tensors = read_file(path, integers=True)
    if any(tensor.dtype != np.int32 or tensor.ndim != 1 or (tensor < 0).any() for tensor in tensors.values()):
        raise ValueError("lists of numbers from 0")
    lengths = tensors["lengths"].tolist()
    if (tensors["answers"] > tensors["lengths"]).any():
        raise ValueError("answers begin within their texts")
    texts = torch.from_numpy(tensors["ids"]).long().split(lengths)
    states: list[dict[int, States]] = [{} for _ in texts]
    if beside(path).exists():
        ends = np.cumsum(lengths)
        kept = read_file(beside(path))
        if any(rows.dtype != np.uint16 or rows.ndim != 2 or len(rows) != sum(lengths) for rows in kept.values()):
            raise ValueError("a row of bfloat16 for each token")
        for of_text, end, length in zip(states, ends, lengths, strict=True):
            of_text.update({int(layer): rows[end - length : end] for layer, rows in kept.items()})
    facts = zip(texts, *(tensors[name].tolist() for name in ("answers", "greedy", "families")), states, strict=True)
    return [Text(ids, answer, bool(greedy), family, rows) for ids, answer, greedy, family, rows in facts]


def _pack(conversations: Sequence[Conversation], families: Sequence[str]) -> dict[str, Array]:
    def integers(values: Sequence[int]) -> Array:
        return np.array(values, dtype=np.int32)

    return {
        "ids": integers([id for c in conversations for id in c.ids]),
        "lengths": integers([len(c.ids) for c in conversations]),
        "answers": integers([c.answer for c in conversations]),
        "greedy": integers([c.temperature == 0 for c in conversations]),
        "families": integers([families.index(c.beginning.family) for c in conversations]),
    }
