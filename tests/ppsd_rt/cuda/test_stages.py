"""The device's stages, launched eagerly: every order of launches commits what plain decoding in torch says."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from stage_support import (
    PROMPT,
    VOCAB,
    decoded_in_any_order,
    head_of,
    model_of,
    plain_of,
    records_of,
    text_of,
    told,
    weights_of,
)
from support import slow, write_model

import ppsd_rt.cuda.prompt
from ppsd_rt import _native
from ppsd_rt.cpu.importance import importance_for
from ppsd_rt.cuda.stages import DeviceStages
from ppsd_rt.cuda.weights import NO_ID, DeviceWeights
from ppsd_rt.errors import UsageError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import MOST_TEXT_IDS, HeadFile
from ppsd_rt.models.llama import from_numpy
from ppsd_rt.reference.passes import TorchPasses
from ppsd_rt.sampling.params import SamplingParams
from ppsd_rt.triton_kernels.linear import Weight, quantise, quantise_int4
from ppsd_rt.triton_kernels.state import (
    RECORD_ACCEPTED,
    START,
)

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, seed=2**33 + 7)
DRAFTABLE = [i for i in range(VOCAB) if i % 5]


@pytest.mark.parametrize(
    ("changes", "kind", "draft_ids", "cuts", "params"),
    [
        ({}, "norm", None, (), GREEDY),
        ({"num_key_value_heads": 2, "attention_bias": True}, "layer", DRAFTABLE, (), SAMPLED),
        slow({"tie_word_embeddings": False, "head_dim": 32}, "adapter", None, (2,), SAMPLED),
        slow({"model_type": "qwen2", "num_attention_heads": 4, "head_dim": 16}, "layer", DRAFTABLE, (2,), SAMPLED),
        ({"model_type": "qwen3", "head_dim": 32}, "layer", None, (), GREEDY),
        ({"model_type": "mistral", "sliding_window": 7}, "layer", None, (2,), SAMPLED),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0, 1]}, "norm", None, (), GREEDY),
    ],
    ids=["norm", "layer", "adapter", "grouped", "head norms", "sliding", "unrotated"],
)  # fmt: skip
def test_any_order_of_launches_commits_the_references_text(changes, kind, draft_ids, cuts, params):
    model = model_of(**changes)
    records = decoded_in_any_order(DeviceStages(weights_of(model, kind, 1, draft_ids), 64, cuts), model, params, 12)
    assert max(record[RECORD_ACCEPTED] for record in records) > 1


@pytest.mark.parametrize(
    ("kind", "exit_layer"), [slow("norm", 1), slow("two-layer", 1), ("feedback", 1), slow("feedback", 0)]
)
def test_drafts_are_the_references(kind, exit_layer):
    """Three draft tokens after two plain steps, each drawn by the torch head from the same text."""
    model = model_of()
    stages = DeviceStages(weights_of(model, kind, exit_layer), 64)
    stages.begin(PROMPT, GREEDY, most=15, lookahead=15)
    stages.plain_step()
    stages.plain_step()
    known = stages.buffers.state[START].item()
    for _ in range(3):
        stages.draft_step()
    text = stages.buffers.text[: known + 4].tolist()
    torch_stages = _native.Stages.of_passes(TorchPasses(model, head_of(model, kind, exit_layer)), GREEDY)
    torch_stages.reserve(64)
    torch_stages.draft(0, text[:known], False)
    torch_stages.verify(0, text[:known], 1)
    torch_stages.learn(known - 1)
    for place in range(known, known + 3):
        assert text[place + 1] == torch_stages.draft(place, [text[place]], True)[0]
    stages.early_step()
    stages.verification()
    assert text_of(stages) == plain_of(model, PROMPT, GREEDY, stages.buffers.state[START].item() + 1)


def test_without_a_head_and_from_answer_to_answer(monkeypatch):
    """Plain decoding; a second answer that keeps rows of the first one's prompt says what it says alone."""
    monkeypatch.setattr(ppsd_rt.cuda.prompt, "ROWS", 7)
    model = model_of(num_hidden_layers=2)
    stages = DeviceStages(weights_of(model), 64)
    second = PROMPT[:12] + [7, 7]
    for number, (prompt, params, keep) in enumerate(
        [(PROMPT, SAMPLED, 0), (second, GREEDY, 12), (second, SAMPLED, 99)]
    ):
        stages.begin(prompt, params, keep, end=len(prompt) + 2)
        assert stages.prompt_rows == len(prompt) - 1
        for _ in range(2):
            stages.plain_step()
        truth = plain_of(model, prompt, params, len(prompt) + 2)
        assert text_of(stages) == truth
        assert told(records_of(stages, 2 * number + 1), prompt) == truth


@pytest.mark.parametrize("format", ["float32", *map(slow, ("int8", "int4", "fp8"))])
def test_ids_of_the_text_may_be_drafted_too(format):
    """Their rows are those that a head has which lists them; they are of one text."""
    weights, ids = weights_of(model_of(num_hidden_layers=2), format=format), [5, 9]
    of_text = [token for token in dict.fromkeys(PROMPT) if token not in ids]
    few, more = (weights.with_random_head("layer", 1, listed) for listed in (ids, sorted([*ids, *of_text])))
    stages = DeviceStages(few, 64)
    sampled = SamplingParams(temperature=3.0, seed=0)
    for text in (PROMPT, [5, 9, 5], PROMPT):
        stages.begin(text, sampled, end=60, most=15, lookahead=15)
        places = dict(zip(few.head.draft_ids.tolist(), few.head.lm_head.wide(), strict=True))
        assert places.keys() - {NO_ID} == {*ids, *text}
        listed = dict(zip(more.head.draft_ids.tolist(), more.head.lm_head.wide(), strict=True))
        assert all(torch.equal(row, listed[token]) for token, row in places.items() if token != NO_ID)
    for _ in range(4):
        stages.draft_step()
    drafts = set(stages.buffers.text[len(PROMPT) : len(PROMPT) + 4].tolist())
    assert drafts <= {*ids, *PROMPT}
    assert drafts & set(of_text)


def test_the_newest_ids_of_a_text_take_the_places_of_the_oldest():
    head = weights_of(model_of(num_hidden_layers=2)).with_random_head("layer", 1, [0]).head
    rows = torch.arange(2 * MOST_TEXT_IDS, dtype=torch.float32)[:, None].expand(-1, head.lm_head.inputs)
    head = replace(head, rows=lambda ids: Weight(rows[ids]))
    head.follow([*range(1, MOST_TEXT_IDS + 40), 3, 1])
    assert set(head.draft_ids.tolist()) == {0, 1, 3, *range(42, MOST_TEXT_IDS + 40)}
    assert head.lm_head.values[1:, 0].tolist() == head.draft_ids[1:].tolist()


def test_passes_beyond_the_end_are_void():
    model = model_of(num_hidden_layers=2)
    stages = DeviceStages(weights_of(model, "norm"), 32)
    stages.begin([1, 2], GREEDY, end=4, most=15, lookahead=15)
    for _ in range(3):
        stages.draft_step()
        stages.early_step()
        stages.verification()
    assert text_of(stages) == plain_of(model, [1, 2], GREEDY, 4)
    assert stages.buffers.text[4:].tolist() == [0] * len(stages.buffers.text[4:])


def test_what_does_not_fit_is_refused():
    model = model_of(num_hidden_layers=2)
    weights = weights_of(model)
    with pytest.raises(UsageError, match="cannot be cut"):
        DeviceStages(weights, 32, (2,))
    with pytest.raises(UsageError, match="do not fit 32 positions"):
        DeviceStages(weights, 32).begin([1] * 31, GREEDY, end=33)
    with pytest.raises(UsageError, match="dtype 'int3' is unknown"):
        weights_of(model, format="int3")


@pytest.mark.parametrize("tied", [True, False])
def test_int4_leaves_keys_values_and_the_lm_head_int8(tmp_path, monkeypatch, tied):
    """And errors are weighed by importance."""
    monkeypatch.setenv("PPSD_CACHE", str(tmp_path / "cache"))
    shape = {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    checkpoint = Checkpoint(write_model(tmp_path / "model", **shape))
    importance = torch.from_numpy(importance_for("int4", checkpoint, 1))
    weights = DeviceWeights.from_checkpoint(checkpoint, "int4", "cpu")
    layer, hidden = weights.layers[1], checkpoint.config.hidden_size

    def of(*names):
        rows = [from_numpy(checkpoint.tensors[f"model.layers.1.{name}.weight"]) for name in names]
        return torch.cat(rows).bfloat16()

    for matrix, names, place in (
        (layer.qkv, ("self_attn.q_proj",), 0),
        (layer.out, ("self_attn.o_proj",), 1),
        (layer.gate_up, ("mlp.gate_proj", "mlp.up_proj"), 2),
        (layer.down, ("mlp.down_proj",), 3),
    ):
        expected = quantise_int4(of(*names), importance[1, place * hidden :][: matrix.inputs])
        assert torch.equal(matrix.wide(), expected.wide()), names
    assert torch.equal(layer.kv.wide(), quantise(of("self_attn.k_proj", "self_attn.v_proj")).wide())
    table = from_numpy(checkpoint.tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]).bfloat16()
    assert torch.equal(weights.lm_head.wide(), quantise(table).wide())
    head = weights.with_head(HeadFile.norm(1, checkpoint, 40)).head.lm_head
    assert head.format == "int4"
    assert torch.equal(head.wide()[:40], quantise_int4(table[:40] if tied else weights.lm_head.wide()[:40]).wide())


def test_weights_count_their_bytes():
    model = model_of(num_hidden_layers=2)
    weights = weights_of(model, "layer", draft_ids=DRAFTABLE)
    layer = sum(p.nbytes for n, p in model.model.layers[0].named_parameters() if "norm" not in n)
    assert weights.bytes == 2 * layer + 4 * VOCAB * 32
    assert weights.draft_bytes == 2 * layer + 4 * (len(DRAFTABLE) + MOST_TEXT_IDS) * 32
    assert weights_of(model).draft_bytes == 0
    assert isinstance(weights.embedding, torch.Tensor)
    assert weights.lm_head.values.data_ptr() == weights.embedding.data_ptr(), "a tied LM head is not copied"
