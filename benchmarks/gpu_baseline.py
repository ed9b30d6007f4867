#!/usr/bin/env python3
"""Plain decoding in torch as gpt-fast does it, with this project's weights, and in transformers: baselines on a GPU.

gpt-fast's way: a static KV cache, a layer compiled by torch.compile (coordinate-descent tuned, one compilation for all
layers), the whole step captured in one CUDA graph, greedy. int8: weights int8 with a scale for each output, made
bfloat16 on the way, which the compiler fuses into the product. `--eager`: the same step without the compiler, captured
all the same.

transformers: `generate` of a model of the same shape with weights of its own, where it is installed.

    benchmarks/gpu_baseline.py -m random:llama-3.2-1b            the last line is a JSON object
"""

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ppsd_rt.cuda.weights import DeviceWeights, Layer
from ppsd_rt.errors import PpsdError
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.rope import Rope
from ppsd_rt.triton_kernels.linear import Weight

REPEATS = 7
SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "tie_word_embeddings",
)  # fmt: skip


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def product(x: Tensor, weight: Weight) -> Tensor:
    if weight.scales is None:
        return F.linear(x, weight.values)
    return F.linear(x, weight.values.to(x.dtype)) * weight.scales[:, 0].to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Decoder:
    """One token a step; `step` reads and writes device memory only."""

    def __init__(self, weights: DeviceWeights, capacity: int, wrap: Callable[..., Callable[..., Tensor]]) -> None:
        """wrap: what is done to the function of a layer before it is used (torch.compile, or nothing)."""
        config, device = weights.config, weights.device
        self.weights, self.capacity = weights, capacity
        rope = Rope(config, capacity, device)
        self.cos, self.sin = rope.cos, rope.sin
        self.places = torch.arange(capacity, device=device)
        shape = (1, config.num_key_value_heads, capacity, config.head_dim)
        self.keys = [torch.zeros(shape, dtype=weights.dtype, device=device) for _ in weights.layers]
        self.values = [torch.zeros(shape, dtype=weights.dtype, device=device) for _ in weights.layers]
        self.token = torch.zeros(1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._layer = wrap(self._through)
        self._last = wrap(self._choose)

    def step(self) -> None:
        x = self.weights.embedding[self.token]
        cos, sin = self.cos[self.position], self.sin[self.position]
        seen = (self.places <= self.position)[None, None, None]
        for layer, keys, values in zip(self.weights.layers, self.keys, self.values, strict=True):
            x = self._layer(layer, x, keys, values, cos, sin, seen, self.position)
        self.token.copy_(self._last(x))
        self.position += 1

    def _through(
        self, layer: Layer, x: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor, seen: Tensor, at: Tensor
    ) -> Tensor:
        config = self.weights.config
        heads, kv_heads, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
        y = product(norm(x, layer.norm, eps), layer.qkv)
        y = y if layer.qkv_bias is None else y + layer.qkv_bias
        q, k, v = y.view(1, -1, config.head_dim).transpose(0, 1).split((heads, kv_heads, kv_heads))
        keys.index_copy_(2, at, turned(k, cos, sin)[None])
        values.index_copy_(2, at, v[None])
        mixed = F.scaled_dot_product_attention(turned(q, cos, sin)[None], keys, values, attn_mask=seen, enable_gqa=True)
        out = product(mixed.reshape(1, -1), layer.out)
        x = x + (out if layer.out_bias is None else out + layer.out_bias)
        assert layer.gate_up is not None
        assert layer.down is not None
        assert layer.post_norm is not None
        gate, up = product(norm(x, layer.post_norm, eps), layer.gate_up).chunk(2, -1)
        return x + product(F.silu(gate) * up, layer.down)

    def _choose(self, x: Tensor) -> Tensor:
        weights = self.weights
        return product(norm(x, weights.norm, weights.config.rms_norm_eps), weights.lm_head).argmax(-1)


def fused() -> AbstractContextManager[None]:
    """With a mask and grouped heads the other kinds of attention refuse or are slower; the compiler fuses this one."""
    return sdpa_kernel(SDPBackend.MATH)


def measure(weights: DeviceWeights, context: int, tokens: int, *, compiled: bool) -> dict[str, object]:
    begun = perf_counter()
    if compiled:
        import torch._inductor.config as inductor

        inductor.coordinate_descent_tuning = True
        torch._dynamo.config.cache_size_limit = 64

    def wrap(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return torch.compile(function, fullgraph=True, dynamic=False) if compiled else function

    with torch.inference_mode():
        decoder = Decoder(weights, context + tokens + 1, wrap)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), fused():
            for _ in range(3):
                decoder.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with fused(), torch.cuda.graph(graph):
            decoder.step()
        prepared = perf_counter() - begun
        samples = []
        for _ in range(REPEATS):
            decoder.position.fill_(context)
            torch.cuda.synchronize()
            begun = perf_counter()
            for _ in range(tokens):
                graph.replay()
            torch.cuda.synchronize()
            samples.append((perf_counter() - begun) / tokens * 1e3)
    return {
        "milliseconds_per_token": median(samples),
        "samples": samples,
        "tokens_per_second": 1e3 / median(samples),
        "compiled": compiled,
        "context": context,
        "tokens": tokens,
        "bytes_per_token": weights.bytes,
        "seconds_to_prepare": prepared,
    }


def measure_transformers(
    config: LlamaConfig, dtype: torch.dtype, device: str, context: int, tokens: int
) -> dict[str, object]:
    """What `generate` takes for a token, the prompt's pass included; as it comes, without a compiler."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    import transformers

    shape = transformers.LlamaConfig(**{name: getattr(config, name) for name in SHAPE})
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype).eval()
    prompt = torch.arange(context, device=device)[None] % config.vocab_size
    samples = []
    for _ in range(4):  # the first one warms up
        begun = perf_counter()
        ids = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        count = len(ids[0].tolist()) - context  # and all of them are here
        samples.append((perf_counter() - begun) / count * 1e3)
    return {
        "transformers": transformers.__version__,
        "transformers_milliseconds_per_token": median(samples[1:]),
        "transformers_tokens": count,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-m", "--model", default="smollm2-135m", help="a model's name, or random:SHAPE")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or int8")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--eager", action="store_true", help="without the compiler")
    parser.add_argument("--device", default="cuda", help="cpu: transformers alone, to rehearse")
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        print("gpu_baseline: torch sees no GPU", file=sys.stderr)
        return 1
    try:
        from ppsd_rt.engine import open_model

        checkpoint, _ = open_model(args.model, "cuda")
        weights = DeviceWeights.from_checkpoint(checkpoint, args.dtype, args.device)
    except PpsdError as error:
        print(f"gpu_baseline: {error}", file=sys.stderr)
        return 1
    result: dict[str, object] = {}
    if args.device != "cpu":
        result = measure(weights, args.context, args.tokens, compiled=not args.eager)
    result |= measure_transformers(checkpoint.config, weights.dtype, args.device, args.context, args.tokens)
    print(json.dumps({"measurement": "gpu-baseline", "model": args.model, "dtype": args.dtype, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
