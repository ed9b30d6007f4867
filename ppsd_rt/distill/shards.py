"""Sampled conversations on disk: token ids in safetensors shards, each reproducible from the seed and its number."""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PpsdError
from ..models.checkpoint import Array, Checkpoint, read_file, save
from ..models.llama import LlamaForCausalLM
from .talk import Conversation, Frame, Talk

STEPS = 512  # tokens that each slot writes for a shard: less than a minute with 48 slots on one core


@dataclass(frozen=True)
class Text:
    """ids [length] int64, of which ids[answer:] was written as the answer, greedily or not."""

    ids: Tensor
    answer: int
    greedy: bool


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"text-{number:05}.safetensors"


@dataclass(frozen=True)
class Plan:
    """Which shards there are to be, and what decides their content."""

    folder: Path
    shards: int
    slots: int
    seed: int

    def missing(self) -> list[int]:
        return [number for number in range(self.shards) if not shard_path(self.folder, number).exists()]


def write_shards(plan: Plan, model: LlamaForCausalLM, frame: Frame) -> Iterator[int]:
    """Sample what is missing; yields the number of tokens so far, those of earlier runs included."""
    each = plan.slots * STEPS
    done = (plan.shards - len(plan.missing())) * each
    for number in plan.missing():
        for tokens in _write_shard(plan, number, model, frame):
            yield done + tokens
        done += each
    yield done


def write_shards_in_processes(
    plan: Plan, checkpoint: Checkpoint, dtype: torch.dtype, frame: Frame, workers: int
) -> Iterator[int]:
    """The same with one thread in each of `workers` processes: on a CPU they do twice the work of one with two threads.

    How many there are does not change the shards, for each always works with one thread.
    """
    each = plan.slots * STEPS
    done = (plan.shards - len(plan.missing())) * each
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", done)
    pool = ProcessPoolExecutor(workers, context, _start_worker, (checkpoint.folder, dtype, frame, counter))
    try:
        pending: list[Future[None]] = [pool.submit(_write_in_worker, plan, number) for number in plan.missing()]
        while pending:
            time.sleep(0.2)
            for future in pending:
                if future.done():
                    _result(future)
            pending = [future for future in pending if not future.done()]
            yield counter.value
    finally:
        for process in list((pool._processes or {}).values()):  # a shard is saved whole or not at all
            process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _result(future: Future[None]) -> None:
    """Raises what the worker raised."""
    try:
        future.result()
    except BrokenProcessPool:
        raise PpsdError(
            "a sampling process ended abruptly (memory?): go on with --resume, with fewer --threads or --slots"
        ) from None


_worker: dict[str, Any] = {}


def _start_worker(folder: Path, dtype: torch.dtype, frame: Frame, counter: Any) -> None:
    torch.set_num_threads(1)
    _worker.update(model=LlamaForCausalLM.from_checkpoint(Checkpoint(folder), dtype), frame=frame, counter=counter)


def _write_in_worker(plan: Plan, number: int) -> None:
    for _ in _write_shard(plan, number, _worker["model"], _worker["frame"]):
        with _worker["counter"].get_lock():
            _worker["counter"].value += plan.slots


def _write_shard(plan: Plan, number: int, model: LlamaForCausalLM, frame: Frame) -> Iterator[int]:
    """Sample one shard (slots * STEPS tokens) and save it whole; yields the tokens so far."""
    talk = Talk(model, frame, plan.slots, plan.seed * 1_000_003 + number)
    yield from talk.run(STEPS)
    save(shard_path(plan.folder, number), _pack(talk.finished), {"seed": str(plan.seed), "slots": str(plan.slots)})


def read_shard(folder: Path, number: int) -> list[Text]:
    tensors = read_file(shard_path(folder, number), integers=True)
    texts = torch.from_numpy(tensors["ids"]).long().split(tensors["lengths"].tolist())
    facts = zip(texts, tensors["answers"].tolist(), tensors["greedy"].tolist(), strict=True)
    return [Text(ids, answer, bool(greedy)) for ids, answer, greedy in facts]


def _pack(conversations: Sequence[Conversation]) -> dict[str, Array]:
    def integers(values: Sequence[int]) -> Array:
        return np.array(values, dtype=np.int32)

    return {
        "ids": integers([id for c in conversations for id in c.ids]),
        "lengths": integers([len(c.ids) for c in conversations]),
        "answers": integers([c.answer for c in conversations]),
        "greedy": integers([c.temperature == 0 for c in conversations]),
    }
