"""Weights and logits that are no numbers end in one line: no crash, no endless loop, no answer made of garbage."""

import itertools

import pytest
import torch
from support import loud_head, tiny_head, tiny_model, write_model

from ppsd_rt import Engine, PpsdError, SamplingParams, UsageError, _native
from ppsd_rt.models.checkpoint import Checkpoint

SAMPLINGS = [SamplingParams(max_tokens=8), SamplingParams(max_tokens=8, temperature=1.0, top_p=0.9, seed=0)]


def damaged(folder, name, value):
    model = tiny_model()
    model.get_parameter(name).data.flatten()[5] = value
    return write_model(folder, model)


@pytest.mark.parametrize(
    ("name", "where"),
    [("model.layers.2.mlp.down_proj.weight", "layer 2"), ("model.layers.1.input_layernorm.weight", "layer 1"),
     ("model.norm.weight", "the final norm"), ("lm_head.weight", "the LM head")],
)  # fmt: skip
def test_weights_that_are_not_finite_are_refused(tmp_path, monkeypatch, name, where):
    for value in (torch.nan, torch.inf, -torch.inf):
        folder = damaged(tmp_path / str(value), name, value)
        for isa, dtype in itertools.product(_native.usable_isas(), ["int4", "int8", "bfloat16", "float32"]):
            monkeypatch.setenv("PPSD_ISA", isa)
            with pytest.raises(PpsdError, match=rf"{where}: a weight is NaN or infinite"):
                Engine.from_pretrained(folder, backend="cpu", dtype=dtype)


def test_exit_heads_that_are_not_finite_are_refused(tmp_path):
    folder = write_model(tmp_path / "model")
    for name in ("norm.weight", "layers.0.mlp.up_proj.weight", "feedback.2.weight", "feedback.norm.weight"):
        head = loud_head(Checkpoint(folder).hash)
        head.get_parameter(name).data.flatten()[0] = torch.nan
        head.save(tmp_path / "head.safetensors")
        with pytest.raises(PpsdError, match="exit head.*a weight is NaN or infinite"):
            Engine.from_pretrained(folder, exit_head=str(tmp_path / "head.safetensors"), backend="cpu")


WAYS = {
    "greedy": {},
    "greedy with logprobs": {"logprobs": 2},
    "greedy with a penalty": {"presence_penalty": 0.5},
    "greedy with a bias": {"logit_bias": {3: 1.0}},
    "greedy with an end that waits": {"min_tokens": 3},
    "sampled": {"temperature": 1.0},
    "sampled with top_k": {"temperature": 1.0, "top_k": 5},
    "sampled with top_p": {"temperature": 1.0, "top_p": 0.9},
    "sampled with a repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.2},
    "sampled with logprobs": {"temperature": 1.0, "logprobs": 0},
}


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory):
    """What overflows: all logits (nan), or that of one id (its row of the LM head: infinite, of either sign)."""
    engines = {}
    for name in ("all", "one"):
        model = tiny_model(tie_word_embeddings=False)
        if name == "all":
            model.model.layers[3].mlp.down_proj.weight.data.fill_(3e38)
        else:
            model.lm_head.weight.data[7] = 3e38
        folder = write_model(tmp_path_factory.mktemp(name) / "model", model, tie_word_embeddings=False)
        for backend in ("cpu", "torch"):
            engines[name, backend] = Engine.from_pretrained(
                folder, exit_head="norm:2", backend=backend, dtype="float32", threads=2 if backend == "cpu" else None
            )
    return engines


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("what", ["all", "one"])
@pytest.mark.parametrize("way", WAYS)
def test_logits_that_are_no_numbers_end_the_answer_however_tokens_are_chosen(overflowing, what, backend, way):
    engine, params = overflowing[what, backend], SamplingParams(max_tokens=8, seed=1, **WAYS[way])
    for prompt in ([1, 2, 3], [9, 8], [40, 41]):  # of which some overflow upwards, and some downwards
        with pytest.raises(PpsdError, match="output is not a number"):
            engine.generate(prompt, params, "eesd").run()
    if backend == "cpu":  # and among others
        answers = [engine.generate([1, 2, i], params, "plain") for i in range(3)]
        for answer in answers:
            with pytest.raises(PpsdError, match="output is not a number"):
                answer.run()


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("schedule", ["plain", "elastic"])
def test_embeddings_that_are_not_finite_end_the_answer(tmp_path, schedule, dtype):
    model = tiny_model(tie_word_embeddings=False)
    model.model.embed_tokens.weight.data[7, 3] = torch.nan
    folder = write_model(tmp_path, model, tie_word_embeddings=False)
    engine = Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", dtype=dtype)
    assert engine.generate([1, 2, 3], SAMPLINGS[0], "plain").run().ids
    with pytest.raises(PpsdError, match="embedding of token 7 is NaN"):
        engine.generate([1, 7, 3], SAMPLINGS[0], schedule).run()


@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "sampled"])
def test_an_exit_head_that_overflows_is_wrong_and_harmless(tmp_path, params):
    folder = write_model(tmp_path / "model")
    head = tiny_head(tiny_model(), hash=Checkpoint(folder).hash)
    head.norm.weight.data.fill_(3e38)
    head.layers[0].mlp.down_proj.weight.data.mul_(1e6)
    head.save(tmp_path / "head.safetensors")
    engine = Engine.from_pretrained(
        folder, exit_head=str(tmp_path / "head.safetensors"), backend="cpu", dtype="float32"
    )
    plain = engine.generate([1, 2, 3], params, "plain").run().ids
    for schedule in ("eesd", "eesd:stop_rule=calibrated", "eesd", "elastic", "auto"):
        assert engine.generate([1, 2, 3], params, schedule).run().ids == plain


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("ids", "last"), [([1, 2], 0), ([1, 2], 3), ([], 1), ([1, 259], 1), ([-1, 2], 1), ([999999], 1)]
)
def test_logits_of_what_is_not_there_are_refused(tmp_path, backend, ids, last):
    engine = Engine.from_pretrained(write_model(tmp_path / "model"), backend=backend)
    with pytest.raises(UsageError):
        engine.backend.logits(ids, last)
