#!/usr/bin/env python3
"""Several answers at once, and an EAGLE-3 head, on a GPU: tokens a second by the loop, all answers added up.

benchmarks/gpu_company.py -m random:llama-3.1-8b        the last line is JSON

The head has the sizes of SafeAILab's for the model and no weights that mean anything: an oracle says which drafts are
right, at the cost of real ones. Every answer is compared with plain decoding's.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from ppsd_rt import Engine, PpsdError, SamplingParams
from ppsd_rt.backend import Oracle, RunOptions
from ppsd_rt.models.eagle3 import Eagle3Config, Eagle3File, head_shapes
from ppsd_rt.models.head_file import EAGLE3, HeadInfo

AT_ONCE = (1, 8, 16, 48)
DRAFT_VOCABULARY = 32000
REPEATS = 3


def eagle_head(engine: Engine) -> Eagle3File:
    config = engine.config
    layers, draft = config.num_hidden_layers, min(DRAFT_VOCABULARY, config.vocab_size)
    eagle = Eagle3Config(replace(config, num_hidden_layers=1), (min(2, layers), layers // 2, max(layers - 3, 1)))
    tensors = {name: np.zeros(shape, np.uint16) for name, shape in head_shapes(eagle, draft).items()}  # of bfloat16
    info = HeadInfo(EAGLE3, 0, "random", "", intermediate_size=config.intermediate_size)
    return Eagle3File(info, tensors, np.arange(draft, dtype=np.int32), eagle=eagle)


def prompt_of(number: int, length: int, vocabulary: int) -> list[int]:
    return [(7 * number + 3 * place + 1) % vocabulary for place in range(length)]


class Company:
    def __init__(self, engine: Engine, prompt: int, tokens: int) -> None:
        self.engine, self.params = engine, SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.prompts = [prompt_of(number, prompt, engine.config.vocab_size) for number in range(max(AT_ONCE))]
        self.truth: dict[int, tuple[int, ...]] = {}

    def measure(self, count: int, schedule: str, oracle: float | None = None) -> dict[str, Any]:
        """Medians of all but the first repeat, which warms up."""
        speeds, differing = list[float](), 0
        for repeat in range(REPEATS + 1):
            begun = perf_counter()
            with ThreadPoolExecutor(count) as pool:
                ids = list(pool.map(lambda number: self.answer(number, schedule, oracle, repeat), range(count)))
            speeds.append(count * (self.params.max_tokens or 0) / (perf_counter() - begun))
            differing += sum(self.truth.setdefault(number, its) != its for number, its in enumerate(ids))
        head = self.engine.head.kind if self.engine.head else "none"
        return {
            "answers": count, "head": head, "schedule": schedule, "oracle": oracle, "differing": differing,
            "tokens_per_second": median(speeds[1:]), "samples": speeds[1:],
        }  # fmt: skip

    def answer(self, number: int, schedule: str, oracle: float | None, repeat: int) -> tuple[int, ...]:
        prompt = self.prompts[number]
        truth = None if oracle is None else Oracle((*prompt, *self.truth[number]), oracle, repeat * 2**32 + number)
        return self.engine.generate(prompt, self.params, schedule, RunOptions(oracle=truth)).run().ids


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="random:llama-3.1-8b")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--device", default="cuda", help="cpu: in Triton's interpreter, to rehearse")
    args = parser.parse_args()
    results = []
    try:
        engine = Engine.from_pretrained(args.model, exit_head="none", backend="cuda", device=args.device)
        company = Company(engine, args.prompt, args.tokens)
        for count in AT_ONCE if args.device != "cpu" else AT_ONCE[:2]:
            results.append(company.measure(count, "plain"))
        engine.backend.use_head(eagle_head(engine))
        for schedule in ("plain", *(f"eesd:length={length},stop_rule=fixed" for length in (3, 5))):
            results.append(company.measure(1, schedule, None if schedule == "plain" else 0.8))
    except PpsdError as error:
        print(f"gpu_company: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"measurement": "gpu-company", "model": args.model, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
