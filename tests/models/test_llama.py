"""The module tree against transformers: the same numbers from the same checkpoint."""

import pytest
import torch
from support import FAMILIES, write_model

from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.llama import LlamaForCausalLM
from ppsd_rt.models.rope import Rope
from ppsd_rt.reference.passes import TorchPasses

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 9 for i in range(8)],
    "long_factor": [1.5 * 2**i for i in range(8)],
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "gqa, tied": {},
    "multi-head, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "multi-query, head_dim": {"num_key_value_heads": 1, "head_dim": 32},
    "llama bias": {"attention_bias": True},
    "llama mlp bias": {"mlp_bias": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "longrope": {"rope_scaling": LONGROPE},
    "qwen2 bias": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": False},
    **FAMILIES,
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def folder(request, tmp_path):
    return write_model(tmp_path / "model", **request.param)


@pytest.fixture
def peer(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def prompt(length: int = 90) -> torch.Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_batched_logits_equal_transformers(folder, peer):
    model = LlamaForCausalLM.from_checkpoint(Checkpoint(folder), torch.float32)
    ids = prompt()
    hidden, kept = model.forward_batch(ids, Rope(model.config, 128), keep=(2,))
    expected = peer(ids, output_hidden_states=True)
    torch.testing.assert_close(
        model.lm_head(hidden), expected.logits, rtol=1e-4, atol=1e-4 * expected.logits.abs().max()
    )
    torch.testing.assert_close(kept[2], expected.hidden_states[2], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_staged_logits_equal_transformers(folder, peer):
    model = LlamaForCausalLM.from_checkpoint(Checkpoint(folder), torch.float32)
    ids = prompt()
    logits = torch.from_numpy(TorchPasses(model, None).scores(ids[0].tolist())(0, ids.shape[1]))
    expected = peer(ids).logits[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * expected.abs().max())


@torch.no_grad()
def test_bfloat16_error_is_that_of_transformers_in_bfloat16(folder, peer):
    """The relative rule: at most twice the error that the peer makes in the same dtype."""
    ids = prompt()
    truth = peer(ids).logits
    model = LlamaForCausalLM.from_checkpoint(Checkpoint(folder), torch.bfloat16)
    ours = model.lm_head(model.forward_batch(ids, Rope(model.config, 128))[0]).float()
    theirs = peer.bfloat16()(ids).logits.float()
    assert (ours - truth).pow(2).mean() <= 4 * (theirs - truth).pow(2).mean()


def test_tied_head_is_the_embedding(tmp_path):
    model = LlamaForCausalLM.from_checkpoint(Checkpoint(write_model(tmp_path)), torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
