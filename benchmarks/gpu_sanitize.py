#!/usr/bin/env python3
"""Every kernel once or twice on a small model: what compute-sanitizer looks at.

compute-sanitizer --tool memcheck --error-exitcode 9 python3 benchmarks/gpu_sanitize.py
compute-sanitizer --tool racecheck --error-exitcode 9 python3 benchmarks/gpu_sanitize.py
"""

import argparse
import sys

import torch

from ppsd_rt.backend import Oracle
from ppsd_rt.cuda.stages import DeviceStages
from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.sampling.params import SamplingParams
from ppsd_rt.triton_kernels.state import REPORT, START

CONFIG = {
    "model_type": "qwen2", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 259,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
# Groups of heads and sizes of heads by which attention's tiles differ: the first one, the 8B shape's, the 13B shape's.
HEADS = ({}, {"num_attention_heads": 4, "head_dim": 64}, {"num_attention_heads": 2, "head_dim": 128})


def exercise(device: str, format: str, heads: dict[str, int], tokens: int) -> None:
    """A prompt longer than a block, then chunks of several sizes, sampled with every filter; odd sizes everywhere."""
    on_gpu = device == "cuda"
    weights = DeviceWeights.random(LlamaConfig.from_dict({**CONFIG, **heads}), format, device, scale=0.1)
    pdl = on_gpu and torch.cuda.get_device_capability() >= (9, 0)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    ):
        stages = DeviceStages(weights.with_random_head("feedback", 1, range(0, 259, 2)), 512, (2,), pdl=pdl)
        prompt = list(range(3, 133))
        end = len(prompt) + tokens
        oracle = Oracle(tuple(prompt + [5] * tokens), 0.5, 1)
        stages.begin(prompt, params, end=end, most=15, lookahead=15, oracle=oracle)
        stages.buffers.state[REPORT] = 1
        launches = 0
        while stages.buffers.state[START].item() < end - 1 and launches < tokens:
            for _ in range(launches % 4):
                stages.draft_step()
            stages.plain_step()
            launches += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda", help="cpu: in Triton's interpreter (TRITON_INTERPRET=1)")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--formats", help="separated by commas; all, if not given")
    args = parser.parse_args()
    every = "bfloat16,int8,int4,fp8" if args.device == "cuda" else "float32,int8,int4,fp8"
    for format in (args.formats or every).split(","):
        for heads in HEADS:
            exercise(args.device, format, heads, args.tokens)
    if args.device == "cuda":
        torch.cuda.synchronize()
    print("every kernel has run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
