"""What a run will take on this machine: measured in moments, before."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..cpu.backend import CpuBackend
from ..models.checkpoint import Checkpoint
from ..models.exit_head import ExitHead
from ..models.llama import LlamaForCausalLM
from .samplers import NativeSampler, Sampler
from .shards import HELD_OUT_SLOTS, STEPS, Text
from .train import Trainer, TrainSettings

Clock = Callable[[], float]  # -> seconds


@dataclass(frozen=True)
class Forecast:
    """tokens_per_second: sampled. step_seconds: of training on `batch_tokens` answer tokens."""

    tokens_per_second: float
    step_seconds: float
    settings: TrainSettings

    def sampling(self, tokens: int) -> float:
        """Seconds."""
        return tokens / self.tokens_per_second

    def training(self, tokens: int) -> float:
        """Seconds."""
        return self.settings.steps(tokens) * self.step_seconds

    def shards_within(self, hours: float, slots: int) -> int:
        """Shards of training text that can be sampled, with one that is held out, and trained on; perhaps none."""
        shard, held_out = slots * STEPS, min(slots, HELD_OUT_SLOTS) * STEPS
        return max(0, int((3600 * hours - self.sampling(held_out)) / (self.sampling(shard) + self.training(shard))))


def sampling_speed(sampler: Sampler, clock: Clock = time.perf_counter, steps: int = 6) -> float:
    """Tokens a second, of texts of usual length."""
    begin = [0] * min(193, sampler.capacity // 2)  # of which the texts share three blocks
    texts = [sampler.write(begin, 0.0, 0, steps * sampler.stride + 1) for _ in range(sampler.slots)]
    while not all(text.begun for text in texts):  # warms up
        sampler.step()
    before = clock()
    for _ in range(steps - 1):
        sampler.step()
    return sampler.slots * sampler.stride * (steps - 1) / (clock() - before)


def native_speed(checkpoint: Checkpoint, format: str, threads: int, slots: int, keep: Sequence[int]) -> float:
    """Of the C++ engine; its model and KV caches are gone before anything else is measured."""
    backend = CpuBackend(checkpoint, format, "cpu", threads)
    longest = min(512, checkpoint.config.max_position_embeddings)
    return sampling_speed(NativeSampler(backend, slots, longest, keep, ()))


def step_seconds(
    model: LlamaForCausalLM,
    heads: list[ExitHead],
    settings: TrainSettings,
    states: bool,
    clock: Clock = time.perf_counter,
) -> float:
    """Of training these heads, which are spoilt by it. states: the text comes with its hidden states, as from C++."""
    config = model.config
    length, answer = min(256, config.max_position_embeddings), min(256, config.max_position_embeddings) // 3
    generator = torch.Generator().manual_seed(0)
    layers = [layer for head in heads for layer in head.info.states(config.num_hidden_layers)] if states else []
    texts = []
    for _ in range(-(-settings.batch_tokens // (length - answer))):
        ids = torch.randint(config.vocab_size, (length,), generator=generator)
        rows = torch.randn(length, config.hidden_size, generator=generator).bfloat16().view(torch.uint16).numpy()
        texts.append(Text(ids, answer, True, states=dict.fromkeys(layers, rows)))
    trainer = Trainer(model, heads, texts, settings, steps=2)
    trainer.learn(range(len(texts))).tolist()  # which waits for a GPU
    before = clock()
    trainer.learn(range(len(texts))).tolist()
    return clock() - before
