#!/usr/bin/env python3
"""Several answers at once, and an EAGLE-3 head, on a GPU: tokens a second by the loop, all answers added up.

benchmarks/gpu_company.py -m random:llama-3.1-8b        the last line is JSON
benchmarks/gpu_company.py --host        what the host does in a round, with launches that do nothing: needs no GPU

The head has the sizes of SafeAILab's for the model and no weights that mean anything: an oracle says which drafts are
right, at the cost of real ones. Every answer is compared with plain decoding's.
"""

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from ppsd_rt import Engine, PpsdError, SamplingParams, _native
from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.cuda.passes import CudaPasses
from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.eagle3 import Eagle3Config, Eagle3File, head_shapes
from ppsd_rt.models.head_file import EAGLE3, HeadInfo
from ppsd_rt.pipeline.rounds import Limits
from ppsd_rt.pipeline.schedule import parse_schedule

AT_ONCE = (1, 8, 16, 48)
DRAFT_VOCABULARY = 32000


def eagle_head(engine: Engine) -> Eagle3File:
    config = engine.config
    layers, draft = config.num_hidden_layers, min(DRAFT_VOCABULARY, config.vocab_size)
    eagle = Eagle3Config(replace(config, num_hidden_layers=1), (min(2, layers), layers // 2, max(layers - 3, 1)))
    tensors = {name: np.zeros(shape, np.uint16) for name, shape in head_shapes(eagle, draft).items()}  # of bfloat16
    info = HeadInfo(EAGLE3, 0, "random", "", intermediate_size=config.intermediate_size)
    return Eagle3File(info, tensors, np.arange(draft, dtype=np.int32), eagle=eagle)


class Nothing:
    """Graphs of steps that are not launched."""

    def launch(self, key: tuple[str, int], step: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass


def host_round(hidden: int, count: int, tokens: int = 96) -> float:
    """Seconds of a round of plain decoding, the best of three times `tokens`; a thread reads each answer."""
    shape = {"hidden_size": hidden, "num_attention_heads": hidden // 64, "num_key_value_heads": 1, "head_dim": 64}
    others = {"intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 1024, "max_position_embeddings": 512}
    config = LlamaConfig.from_dict({"model_type": "llama", **shape, **others})
    passes = CudaPasses(DeviceWeights.random(config, "float32", "cpu"), 2 * count, graphs=Nothing())
    passes._prompt_rows = lambda *_: None
    loop, params = _native.Loop.of_passes(passes, 2 * count, 64, 64), SamplingParams(max_tokens=tokens)
    seconds = []
    for _ in range(3):
        begun = perf_counter()
        asked = ([1, 2, 3 + number] for number in range(count))
        streams = [loop.add(prompt, params, parse_schedule("plain"), Limits(3 + tokens)) for prompt in asked]
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(list, streams))
        seconds.append((perf_counter() - begun) / tokens)
    return min(seconds)


def prompt_of(number: int, length: int, vocabulary: int) -> list[int]:
    return [(7 * number + 3 * place + 1) % vocabulary for place in range(length)]


class Company:
    def __init__(self, engine: Engine, prompt: int, tokens: int, repeats: int) -> None:
        self.engine, self.repeats = engine, repeats
        self.params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.prompts = [prompt_of(number, prompt, engine.config.vocab_size) for number in range(max(AT_ONCE))]
        self.truth: dict[int, tuple[int, ...]] = {}

    def measure(self, count: int, schedule: str, oracle: float | None = None) -> dict[str, Any]:
        """Medians of all but the first repeat, which warms up."""
        speeds, differing = list[float](), 0
        for repeat in range(self.repeats + 1):
            begun = perf_counter()
            with ThreadPoolExecutor(count) as pool:
                ids = list(pool.map(partial(self.answer, schedule, oracle, repeat), range(count)))
            speeds.append(count * (self.params.max_tokens or 0) / (perf_counter() - begun))
            differing += sum(self.truth.setdefault(number, its) != its for number, its in enumerate(ids))
        head = self.engine.head.kind if self.engine.head else "none"
        return {
            "answers": count, "head": head, "schedule": schedule, "oracle": oracle, "differing": differing,
            "tokens_per_second": median(speeds[1:]), "samples": speeds[1:],
        }  # fmt: skip

    def answer(self, schedule: str, oracle: float | None, repeat: int, number: int) -> tuple[int, ...]:
        prompt = self.prompts[number]
        truth = None if oracle is None else Oracle((*prompt, *self.truth[number]), oracle, repeat * 2**32 + number)
        return self.engine.generate(prompt, self.params, schedule, RunOptions(oracle=truth)).run().ids


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="random:llama-3.1-8b")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda", help="cpu: in Triton's interpreter, to rehearse")
    parser.add_argument("--host", action="store_true", help="what the host does in a round; nothing else")
    args = parser.parse_args()
    if args.host:
        torch.set_num_threads(1)
        shapes = {"smollm2-135m": 576, "llama-3.2-1b": 2048, "llama-3.1-8b": 4096}
        rows = [
            {"model": model, "answers": count, "microseconds": round(1e6 * host_round(hidden, count))}
            for model, hidden in shapes.items()
            for count in AT_ONCE
        ]
        print(json.dumps({"measurement": "gpu-host-rounds", "rows": rows}))
        return 0
    try:
        engine = Engine.from_pretrained(args.model, exit_head="none", backend="cuda", device=args.device)
        company = Company(engine, args.prompt, args.tokens, args.repeats)
        results = [company.measure(count, "plain") for count in (AT_ONCE if args.device != "cpu" else AT_ONCE[:2])]
        engine.backend.use_head(eagle_head(engine))
        results.append(company.measure(1, "plain"))
        results += [company.measure(1, f"eesd:length={length},stop_rule=fixed", 0.8) for length in (3, 4, 5)]
    except PpsdError as error:
        print(f"gpu_company: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"measurement": "gpu-company", "model": args.model, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
