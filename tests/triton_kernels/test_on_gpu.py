"""The kernels at the sizes of real models, in every format, on a GPU.

The same bodies run on a small shape in float32 where there is none (Triton's interpreter gets bfloat16 wrong), so that
they work when a GPU comes.
"""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import torch.nn.functional as F
from kernel_support import DEVICE, make, paged, state_of, table, unpaged
from kernel_twins import attention_twin, linear_twin, qkv_twin, swiglu_twin
from support import slow

from ppsd_rt.cuda.stages import DeviceStages
from ppsd_rt.cuda.weights import DeviceWeights
from ppsd_rt.models.config import LlamaConfig
from ppsd_rt.models.random_weights import SHAPES
from ppsd_rt.sampling.params import SamplingParams
from ppsd_rt.triton_kernels.attention import Partials, attention
from ppsd_rt.triton_kernels.cache import PAGE
from ppsd_rt.triton_kernels.heads import Scratch, heads, sampling_words
from ppsd_rt.triton_kernels.linear import (
    Weight,
    linear,
    normalise_twin,
    quantise,
    quantise_fp8,
    quantise_int4,
    tiling,
)
from ppsd_rt.triton_kernels.prompt_attention import prompt_attention
from ppsd_rt.triton_kernels.prompt_layers import normalise, prompt_linear, prompt_qkv, prompt_swiglu
from ppsd_rt.triton_kernels.qkv import qkv
from ppsd_rt.triton_kernels.state import START
from ppsd_rt.triton_kernels.swiglu import swiglu

GPU = DEVICE == "cuda"
TINY = LlamaConfig.from_dict(
    {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 100,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }
)  # fmt: skip
# So many heads that a program has 32 outputs: two warps share them where weights are int4, one has all of int8's.
WIDE = LlamaConfig.from_dict(
    {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 100,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 512,
    }
)  # fmt: skip
CONFIGS = {"tiny": TINY, "wide": WIDE, **SHAPES}
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")]
MODELS = ["tiny", *(pytest.param(m, marks=ON_GPU) for m in ("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b"))]
HAS_FP8 = not GPU or torch.cuda.get_device_capability() >= (8, 9)
FORMATS = ["plain", "int8", "int4", *(["fp8"] if HAS_FP8 else [])]
DTYPE = torch.bfloat16 if GPU else torch.float32
PDL = GPU and torch.cuda.get_device_capability() >= (9, 0)
COUNTS = range(1, 17) if GPU else (1, 6)
EPS = 1e-5

model_shapes = pytest.mark.parametrize("model", MODELS)
formats = pytest.mark.parametrize("format", FORMATS)


def weight_of(outputs, inputs, format, seed=0):
    """Made on the device: the largest have half a billion numbers."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    wide = torch.randn(outputs, inputs, generator=generator, device=DEVICE, dtype=torch.float32) / math.sqrt(inputs)
    makers = {"int8": quantise, "int4": quantise_int4, "fp8": quantise_fp8}
    return makers.get(format, lambda wide: Weight(wide.to(DTYPE)))(wide)


def projections(heads_all, c, format):
    """Of queries, keys and values; int4 leaves keys and values int8."""
    if format != "int4":
        return weight_of(heads_all * c.head_dim, c.hidden_size, format), None
    of_queries = c.num_attention_heads * c.head_dim
    others = heads_all * c.head_dim - of_queries
    return weight_of(of_queries, c.hidden_size, format), weight_of(others, c.hidden_size, "int8", seed=1)


def eager(x, weight):
    """torch in the kernels' own precision: what sets the bar for the error."""
    return F.linear(x.to(DTYPE), weight.wide().to(DTYPE)).float()


def relative(found, truth):
    return ((found.float() - truth).norm() / truth.norm()).item()


def rounded(format):
    """Relative error of float32 sums: int4 adds up 128 + code, of which most cancels."""
    return 1e-5 if format == "int4" else 1e-6


def near(found, truth, theirs, format=None):
    """At most twice the error that eager torch makes in the same precision."""
    assert torch.isfinite(found).all()
    assert relative(found, truth) <= 2 * relative(theirs, truth) + rounded(format)


def same_rows(run, whole):
    """run(count) -> results of a pass of so many rows: the bits of the whole pass's first rows."""
    for count in COUNTS:
        assert torch.equal(run(count), whole[:count]), f"{count} rows"


def empty_cache(capacity, c):
    size = capacity // PAGE, 2 * c.num_key_value_heads, PAGE, c.head_dim
    return torch.zeros(size, device=DEVICE, dtype=DTYPE)


def pages_of(cache):
    return torch.arange(len(cache), dtype=torch.int32, device=DEVICE)


@formats
@pytest.mark.parametrize("model", [*MODELS, "wide"])
def test_qkv(model, format):
    c = CONFIGS[model]
    heads_all, start, capacity = c.num_attention_heads + 2 * c.num_key_value_heads, 37, 256
    weight, kv = projections(heads_all, c, format)
    x, norm = make(16, c.hidden_size, seed=1), 1 + 0.1 * make(c.hidden_size, seed=2).to(DTYPE)
    rotations = table(capacity, c.head_dim)

    def run(count):
        queries = torch.full((16, c.num_attention_heads, c.head_dim), torch.nan, device=DEVICE)
        cache = empty_cache(capacity, c)
        qkv(x, norm, EPS, weight, None, rotations, queries, cache, state_of(count, start), kv=kv, pdl=PDL)
        rows = [t[:, start : start + count].transpose(0, 1).float() for t in unpaged(cache)]
        return torch.cat([queries[:count], *rows], 1)

    whole = run(16)
    twin = qkv_twin(
        x, norm, EPS, weight, None, rotations, c.num_attention_heads, c.num_key_value_heads, start, kv=kv
    )  # fmt: skip
    both = weight if kv is None else Weight(torch.cat([weight.wide(), kv.wide()]))
    theirs = eager(normalise_twin(x, norm, EPS), both).unflatten(1, (heads_all, -1))
    truth = linear_twin(x, both, norm=norm, eps=EPS).unflatten(1, (heads_all, -1))
    assert relative(whole, torch.cat(twin, 1)) <= 2 * relative(theirs.to(DTYPE), truth) + 4e-3 * GPU + rounded(
        format
    )  # the cache is rounded
    same_rows(run, whole)


@formats
@model_shapes
@pytest.mark.parametrize("which", ["out", "down"])
def test_linear(model, format, which):
    c = CONFIGS[model]
    inputs = c.num_attention_heads * c.head_dim if which == "out" else c.intermediate_size
    weight = weight_of(c.hidden_size, inputs, format)
    x, residual = make(16, inputs, seed=1).to(DTYPE), make(16, c.hidden_size, seed=2)
    partial = torch.full((tiling(weight).splits, 16, c.hidden_size), torch.nan, device=DEVICE)

    def run(count):
        out = residual.clone()
        linear(x, weight, out, state_of(count), residual=out, partial=partial, pdl=PDL)
        return out[:count]

    whole = run(16)
    near(whole - residual, linear_twin(x, weight), eager(x, weight), format)
    same_rows(run, whole)


@formats
@model_shapes
def test_swiglu(model, format):
    c = CONFIGS[model]
    weight = weight_of(2 * c.intermediate_size, c.hidden_size, format)
    x, norm = make(16, c.hidden_size, seed=1), 1 + 0.1 * make(c.hidden_size, seed=2).to(DTYPE)

    def run(count):
        out = torch.full((16, c.intermediate_size), torch.nan, device=DEVICE, dtype=DTYPE)
        swiglu(x, norm, EPS, weight, out, state_of(count), pdl=PDL)
        return out[:count]

    whole = run(16)
    gate, up = F.linear(normalise_twin(x, norm, EPS).to(DTYPE), weight.wide().to(DTYPE)).chunk(2, -1)
    near(whole, swiglu_twin(x, norm, EPS, weight), F.silu(gate) * up, format)
    same_rows(run, whole)


@formats
@model_shapes
def test_heads(model, format):
    c = CONFIGS[model]
    weight, norm = weight_of(c.vocab_size, c.hidden_size, format), torch.ones(c.hidden_size, device=DEVICE).to(DTYPE)
    x, scratch = make(16, c.hidden_size, seed=1), Scratch(weight)
    for params in (SamplingParams(), SamplingParams(temperature=0.9, seed=3)):
        sampling = sampling_words(params, DEVICE)

        def run(count, sampling=sampling):
            choices, chances = torch.zeros(16, dtype=torch.int32, device=DEVICE), torch.zeros(16, device=DEVICE)
            logits = torch.full((16, c.vocab_size), torch.nan, device=DEVICE)
            heads(
                x, norm, EPS, weight, sampling, scratch, choices, chances, state_of(count, 20), logits=logits, pdl=PDL
            )  # fmt: skip
            return torch.cat([choices[:, None].float(), chances[:, None], logits], 1)[:count]

        whole = run(16)
        theirs = eager(normalise_twin(x, norm, EPS), weight)
        near(whole[:, 2:], linear_twin(x, weight, norm=norm, eps=EPS), theirs, format)
        if not params.temperature:
            assert torch.equal(whole[:, 0].long(), whole[:, 2:].argmax(-1))
        same_rows(run, whole)


@model_shapes
@pytest.mark.parametrize("start", [0, 250, *(pytest.param(s, marks=ON_GPU) for s in (4090, 8170))])
def test_attention(model, start):
    c = CONFIGS[model]
    shape = (c.num_key_value_heads, start + 32, c.head_dim)
    keys, values = make(*shape, seed=1).to(DTYPE), make(*shape, seed=2).to(DTYPE)
    keys[:, start + 16 :] = values[:, start + 16 :] = torch.nan  # must not be read
    queries = make(16, c.num_attention_heads, c.head_dim, seed=3)
    partials, cache = Partials(c.num_attention_heads, c.num_key_value_heads, c.head_dim, DEVICE), paged(keys, values)

    def run(count):
        out = torch.full(queries.shape, torch.nan, device=DEVICE, dtype=DTYPE)
        attention(queries, cache, partials, out, state_of(count, start), pdl=PDL)
        return out[:count]

    whole, truth = run(16), attention_twin(queries, keys, values, start)
    k, v = (t[None, :, : start + 16] for t in (keys, values))
    mask = torch.ones(16, start + 16, dtype=torch.bool, device=DEVICE).tril(start)
    theirs = F.scaled_dot_product_attention(
        queries.to(DTYPE).transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True
    )
    near(whole, truth, theirs[0].transpose(0, 1).float() if GPU else truth)
    same_rows(run, whole)
    if start == 250:
        alone = torch.full((128, *queries.shape[1:]), torch.nan, device=DEVICE, dtype=DTYPE)[:16]
        prompt_attention(queries.to(DTYPE), cache, pages_of(cache), alone, start)
        near(alone, truth, theirs[0].transpose(0, 1).float() if GPU else truth)


@formats
@model_shapes
def test_prompt(model, format):
    """A prompt's kernels: near the twins, and the same for a row wherever the pass begins."""
    c, rows = CONFIGS[model], 300 if GPU else 140
    inner = weight_of(2 * c.intermediate_size, c.hidden_size, format)
    down = weight_of(c.hidden_size, c.intermediate_size, format, seed=1)
    x, norm = make(rows, c.hidden_size, seed=1), 1 + 0.1 * make(c.hidden_size, seed=2).to(DTYPE)

    def run(first):
        normed = torch.full((rows - first, c.hidden_size), torch.nan, device=DEVICE, dtype=DTYPE)
        middle = torch.full((rows - first, c.intermediate_size), torch.nan, device=DEVICE, dtype=DTYPE)
        out = x[first:].clone()
        normalise(x[first:], norm, EPS, normed)
        prompt_swiglu(normed, inner, middle)
        prompt_linear(middle, down, out, residual=out)
        return middle, out

    middle, out = run(0)
    gate, up = F.linear(normalise_twin(x, norm, EPS).to(DTYPE), inner.wide().to(DTYPE)).chunk(2, -1)
    near(middle, swiglu_twin(x, norm, EPS, inner), F.silu(gate) * up)
    near(out - x, linear_twin(middle, down), eager(middle, down))
    for first in (5, 131):
        again = run(first)
        assert torch.equal(again[0], middle[first:])
        assert torch.equal(again[1], out[first:])


@formats
@model_shapes
def test_prompt_attention_layer(model, format):
    c, rows, start = CONFIGS[model], 300 if GPU else 140, 37
    count = c.num_attention_heads + 2 * c.num_key_value_heads
    weight, kv = projections(count, c, format)
    x, rotations = make(rows, c.hidden_size, seed=1).to(DTYPE), table(512, c.head_dim)
    queries = torch.full((rows, c.num_attention_heads, c.head_dim), torch.nan, device=DEVICE, dtype=DTYPE)
    cache = empty_cache(512, c)
    prompt_qkv(x, weight, None, rotations, queries, cache, pages_of(cache), start, kv=kv)
    keys, values = unpaged(cache)
    ones = torch.ones(c.hidden_size, device=DEVICE)
    size = x.float().square().mean(-1, keepdim=True).sqrt()  # the twin normalises: this takes it back
    twin = qkv_twin(x, ones, 0.0, weight, None, rotations, c.num_attention_heads, c.num_key_value_heads, start, kv=kv)
    assert relative(queries, twin[0] * size[:, :, None]) < (1e-2 if GPU else 1e-5)
    inside = slice(start, start + rows)
    assert relative(keys[:, inside].transpose(0, 1), twin[1] * size[:, :, None]) < (1e-2 if GPU else 1e-5)
    assert relative(values[:, inside].transpose(0, 1), twin[2] * size[:, :, None]) < (1e-2 if GPU else 1e-5)


def answer(stages, prompt, params, tokens, ahead):
    end = len(prompt) + tokens
    stages.begin(prompt, params, end=end, most=15, lookahead=15)
    launches = 0
    while stages.buffers.state[START].item() < end - 1:
        for _ in range(ahead):
            stages.draft_step()
        stages.plain_step()
        launches += 1
        assert launches <= tokens
    return stages.buffers.text[:end].tolist()


@pytest.mark.parametrize("params", [slow(SamplingParams()), SamplingParams(temperature=0.8, seed=4)])
@pytest.mark.parametrize("format", ["bfloat16", *FORMATS[1:]] if GPU else ["float32"])
@pytest.mark.parametrize(
    "model", ["tiny", *(pytest.param(m, marks=ON_GPU) for m in ("smollm2-135m", "llama-3.2-1b"))]
)  # fmt: skip
def test_every_chunk_size_answers_as_plain_decoding(model, format, params):
    config = CONFIGS[model]
    kind = "layer" if model == "tiny" else "norm"
    exits = config.num_hidden_layers - 1 if GPU else 1  # on real sizes: drafts that are right now and then
    weights = DeviceWeights.random(config, format, DEVICE, scale=0.05).with_random_head(kind, exits)
    stages = DeviceStages(weights, 512, pdl=PDL)
    prompt, tokens = [3 + i % 90 for i in range(300 if GPU else 5)], 64 if GPU else 3
    plain = answer(stages, prompt, params, tokens, 0)
    for ahead in (1, 2, 3, 5, 8, 15) if GPU else (2,):
        assert answer(stages, prompt, params, tokens, ahead) == plain


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
def test_two_streams_in_any_order_answer_as_plain_decoding():
    """Draft steps and verification really at the same time, with nothing between them but the answer's lock."""
    weights = DeviceWeights.random(SHAPES["smollm2-135m"], "bfloat16", DEVICE, scale=0.05).with_random_head("norm", 28)
    stages = DeviceStages(weights, 1024, pdl=PDL)
    prompt, tokens = list(range(3, 40)), 400
    plain = answer(stages, prompt, SamplingParams(), tokens, 0)
    draft, verify = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    end = len(prompt) + tokens
    for number in range(3):
        stages.begin(prompt, SamplingParams(), end=end, most=7, lookahead=12)
        torch.cuda.synchronize()
        launches = 0
        while stages.buffers.state[START].item() < end - 1:
            with torch.cuda.stream(draft):
                for _ in range(3 + number):
                    stages.draft_step()
            with torch.cuda.stream(verify):
                for _ in range(2):
                    stages.verification()
            launches += 1
            if launches % 8 == 0:
                torch.cuda.synchronize()
            assert launches < 4 * tokens
        torch.cuda.synchronize()
        assert stages.buffers.text[:end].tolist() == plain


@pytest.mark.gpu
@pytest.mark.skipif(not PDL, reason="needs a Hopper GPU: dependent launches")
def test_dependent_launches_change_nothing():
    """A kernel that begins before its predecessor has ended would read what is not there yet."""
    weights = DeviceWeights.random(SHAPES["smollm2-135m"], "bfloat16", DEVICE, scale=0.05).with_random_head("norm", 6)
    texts = []
    for pdl in (False, True):
        stages = DeviceStages(weights, 512, pdl=pdl)
        graph = torch.cuda.CUDAGraph()
        stages.begin(list(range(3, 40)), SamplingParams(), end=500, most=15, lookahead=15)
        for step in (stages.draft_step, stages.plain_step):
            step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(3):
                stages.draft_step()
            stages.plain_step()
        stages.begin(list(range(3, 40)), SamplingParams(), end=500, most=15, lookahead=15)
        for _ in range(470):
            graph.replay()
        torch.cuda.synchronize()
        assert stages.buffers.state[START].item() == 499
        texts.append(stages.buffers.text[:500].tolist())
    assert texts[0] == texts[1]
