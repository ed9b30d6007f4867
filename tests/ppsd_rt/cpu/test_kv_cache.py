"""An int8 KV cache: near its formula, chosen where it fits, refused where it does not."""

import numpy as np
import pytest
import torch
from support import write_model

from ppsd_rt import Engine, _native
from ppsd_rt.cpu.formats import kv_format
from ppsd_rt.errors import UsageError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.llama import LlamaForCausalLM
from ppsd_rt.models.rope import Rope

SHAPES = {
    "one block": {"head_dim": 32},
    "two blocks": {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 96},
    "three blocks": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 96},
}
IDS = [(7 * i * i + 3 * i) % 250 for i in range(150)]  # more than two attention blocks of 64
SPAN, BLOCK = 64, 32
SIGNED_SHARES = ("avx2", "neon", "dotprod")  # of 7 bits, for their products take no others


def in_blocks(x, levels=127):
    """[..., n] as whole numbers [..., n / 32, 32] and their scales [..., n / 32]."""
    x = x.unflatten(-1, (-1, BLOCK))
    scales = x.abs().amax(-1) / levels
    return torch.round(x / scales.clamp_min(1e-30)[..., None]), scales


def rotary_order(head_dim):
    """Which channels lie in each panel of 16: eight, and the eight that they are rotated with."""
    return [p * 8 + lane % 8 + (0 if lane < 8 else head_dim // 2) for p in range(head_dim // 16) for lane in range(16)]


def attend_by_formula(rope, most_share):
    """What the kernels compute, in plain torch: products of whole numbers, weights rounded span by span."""

    def attend(q, k, v, _how):
        length, heads, head_dim = q.shape[-3:]
        order, group = rotary_order(head_dim), heads // k.shape[-2]
        q, k = (rope.rotate(x, slice(0, length))[..., order] for x in (q / head_dim**0.5, k))
        (q, q_scales), (k, k_scales), (v, v_scales) = (in_blocks(x) for x in (q, k, v))
        k, k_scales, v, v_scales = (x.repeat_interleave(group, 2) for x in (k, k_scales, v, v_scales))
        scores = torch.einsum("bqhni,bkhni,bqhn,bkhn->bhqk", q, k, q_scales, k_scales)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = torch.exp(
            scores.masked_fill(later, -torch.inf) - scores.masked_fill(later, -torch.inf).amax(-1, True)
        )
        mixed = torch.zeros(*q.shape)
        for begin in range(0, length, SPAN):
            span = slice(begin, begin + SPAN)
            shares = torch.einsum("bhqk,bkhn->bqhnk", weights[..., span], v_scales[:, span])
            unit = shares.amax(-1, keepdim=True) / most_share
            shares = torch.round(shares / unit.clamp_min(1e-30)) * unit
            mixed += torch.einsum("bqhnk,bkhni->bqhni", shares, v[:, span])
        return mixed.flatten(-2) / weights.sum(-1).transpose(1, 2)[..., None]

    return attend


def logits_of(model, attend):
    with torch.no_grad():
        x = model.model.embed_tokens(torch.tensor(IDS)[None])
        for layer in model.model.layers:
            x = layer(x, attend)
        return model.lm_head(model.model.norm(x))[0].numpy()


def load(folder, isa, monkeypatch, **options):
    monkeypatch.setenv("PPSD_ISA", isa)
    return Engine.from_pretrained(folder, exit_head="none", backend="cpu", threads=1, **options).backend


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_keys_and_values_follow_the_formula(tmp_path, shape, isa, monkeypatch):
    folder = write_model(tmp_path / "model", **SHAPES[shape])
    checkpoint = Checkpoint(folder)
    model = LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)
    most_share = 127 if isa in SIGNED_SHARES else 255
    formula = logits_of(model, attend_by_formula(Rope(checkpoint.config, len(IDS)), most_share))
    exact = load(folder, isa, monkeypatch, dtype="float32").logits(IDS, len(IDS))
    ours = load(folder, isa, monkeypatch, dtype="float32", kv_dtype="int8").logits(IDS, len(IDS))
    lost = np.abs(formula - exact).mean()
    assert 0 < lost < 0.05 * np.abs(exact).mean()
    assert np.abs(ours - formula).mean() < 0.25 * lost  # a rounded share may fall to the other side


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_it_costs_little_beside_int8_weights(tmp_path, isa, monkeypatch):
    folder = write_model(tmp_path / "model", **SHAPES["two blocks"])
    exact = load(folder, isa, monkeypatch, dtype="float32").logits(IDS, len(IDS))
    wide, narrow = (
        np.abs(load(folder, isa, monkeypatch, dtype="int8", kv_dtype=kv).logits(IDS, len(IDS)) - exact).mean()
        for kv in ("bfloat16", "int8")
    )
    assert narrow < 1.5 * wide


def test_the_cache_takes_the_format_of_the_model():
    assert [kv_format(dtype, 64) for dtype in ("float32", "bfloat16", "int8", "int4")] == [
        "float32", "bfloat16", "int8", "int8",
    ]  # fmt: skip
    assert kv_format("int8", 80) == kv_format("int4", 288) == "bfloat16"  # what the kernels do not take
    assert kv_format("int8", 64, "bfloat16") == "bfloat16"


def test_bad_kv_dtypes_are_refused(tmp_path):
    narrow = write_model(tmp_path / "narrow", head_dim=16)
    with pytest.raises(UsageError, match="kv_dtype 'int3' is unknown"):
        Engine.from_pretrained(narrow, kv_dtype="int3")
    with pytest.raises(UsageError, match="head_dim that is a multiple of 32 up to 256, not 16"):
        Engine.from_pretrained(narrow, kv_dtype="int8")
    with pytest.raises(UsageError, match="kv_dtype needs --backend cpu"):
        Engine.from_pretrained(narrow, backend="torch", kv_dtype="int8")
