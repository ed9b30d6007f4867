"""The `heads` experiment of papers.py: given text as shards for distillation, training and judging, on a tiny model."""

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from support import EOS, write_model

from ppsd_rt.cli.prompts import NamedPrompt
from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.distill.mix import mix_of
from ppsd_rt.distill.samplers import NativeSampler
from ppsd_rt.distill.shards import Plan, Text, read_shard, shard_path, states_path, write_shards
from ppsd_rt.distill.train import TrainSettings
from ppsd_rt.errors import PpsdError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import HeadInfo
from ppsd_rt.models.llama import LlamaForCausalLM
from ppsd_rt.models.rope import Rope
from ppsd_rt.models.tokenizer import load_tokenizer

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model")


def test_documentation_strings_are_found_once_and_in_the_same_order(load):
    texts = load("given_text").documentation()
    assert texts == load("given_text").documentation()
    assert len(set(texts)) == len(texts) > 1000
    assert any("JSON" in text for text in texts)


def test_given_text_becomes_shards_with_the_states_that_the_model_makes_of_it(load, folder, tmp_path):
    module, checkpoint = load("given_text"), Checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    mix = mix_of(tokenizer, frozenset({EOS}))
    own, plan = (Plan(tmp_path / name, 2, 2, 1, mix, (2, 4)) for name in ("own", "given"))
    with pytest.raises(PpsdError, match="self-generated text comes first"):
        module.write_given(plan, own.folder, checkpoint, tokenizer, "float32")
    backend = CpuBackend(checkpoint, "float32", "cpu", 1)
    for _ in write_shards(Plan(own.folder, 1, 2, 1, mix, (2, 4)), lambda seed: NativeSampler(backend, 2, 500, (2, 4))):
        pass
    plan.folder.mkdir()
    module.write_given(plan, own.folder, checkpoint, tokenizer, "float32")
    assert plan.missing() == []
    held_out, judged = read_shard(own.folder, 0), read_shard(plan.folder, 0)
    assert [text.ids.tolist() for text in judged] == [text.ids.tolist() for text in held_out]
    texts = read_shard(plan.folder, 1)
    assert len(texts) == 2 * 1024 // module.PIECE
    ids = [id for text in texts for id in text.ids.tolist()]
    assert ids == tokenizer.encode("\n\n".join(module.documentation()))[: len(ids)]
    assert {(len(text.ids), text.answer, text.greedy) for text in texts} == {(module.PIECE, module.CONTEXT, False)}
    reference = LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)
    for text in (texts[0], texts[-1]):
        _, kept = reference.forward_batch(text.ids[None], Rope(reference.config, 512), keep=(2, 4))
        for layer in (2, 4):
            error = (text.after(layer).float() - kept[layer][0]).norm() / kept[layer][0].norm()
            assert error < 0.02
    before = [path(plan.folder, 1).stat().st_mtime_ns for path in (shard_path, states_path)]
    module.write_given(plan, own.folder, checkpoint, tokenizer, "float32")  # what is there stays
    assert before == [path(plan.folder, 1).stat().st_mtime_ns for path in (shard_path, states_path)]


def test_too_little_given_text_is_one_line(load, folder, monkeypatch):
    module = load("given_text")
    monkeypatch.setattr(module, "documentation", lambda: ["short"])
    with pytest.raises(PpsdError, match="have 5 tokens, not 256"):
        module.pieces(load_tokenizer(folder), 1)


def test_the_best_length_by_what_survives_and_what_rounds_cost(load):
    predicted = load("paper_experiments.heads").predicted
    assert predicted([0.5, 0.3, 0.1], [1.2, 1.4, 1.6]) == (pytest.approx(1.8 / 1.4), 2)
    assert predicted([0.1, 0.0, 0.0], [1.2, 1.4, 1.6]) == (pytest.approx(1.1 / 1.2), 1)


def test_the_table_and_the_figure(load):
    module = load("paper_experiments.heads")
    judged = {"acceptance": 0.5, "warm": 0.25, "survival": [0.5, 0.25], "by_family": {}, "held_out": {}}
    trained = {**judged, "held_out": {"held_out_greedy": 0.4}}
    cost = {"draft": 0.1, "rounds": [1.25, 1.75]}
    found = {
        "costs": dict.fromkeys(("norm:3", *module.KINDS), cost),
        "untrained, norm:3": {"norm:3": judged},
        "self-generated, 65536": dict.fromkeys(module.KINDS, trained),
        "given, 65536": dict.fromkeys(module.KINDS, trained),
    }
    rows = module.table(found).splitlines()[2:]
    assert len(rows) == 9
    assert rows[0] == "| `norm:3` | untrained | - | - | 0.500 | 0.250 | 0.100 | 1.20 | 1 |"
    assert rows[1] == "| `adapter` | self-generated | 65,536 | 0.400 | 0.500 | 0.250 | 0.100 | 1.20 | 1 |"
    held_out, prompts = module.charts(found)["heads"].panels
    assert {line.name for line in held_out.lines} >= {"feedback", "feedback, given text"}
    assert [line.points for line in prompts.lines] == [[(65.536, 0.5)]] * 8


@pytest.mark.slow
def test_heads_are_trained_once_and_judged(load, folder, tmp_path, monkeypatch):
    module, text = load("paper_experiments.heads"), load("given_text")
    changes = {"MODEL": str(folder), "FORMAT": "float32", "VOCABULARY": 100, "SLOTS": 2, "LENGTH": 2}
    changes |= {"UNTRAINED": ("norm:3", "norm:3:100")}
    changes |= {"work": lambda: tmp_path / "work", "read_prompts": lambda path: [NamedPrompt("1", "Hi", "chat")]}
    for name, value in changes.items():
        monkeypatch.setattr(module, name, value)
    for each in (module, text):
        monkeypatch.setattr(each.os, "cpu_count", lambda: 1)
    module.default_model.cache_clear()
    tokens = 2 * 1024
    found = {"costs": module.costs(1)}
    for kind in ("self-generated", "given"):
        files = module.trained(kind, tokens, True)
        assert [Path(file).stem for file in files.values()] == list(module.KINDS)
        found[f"{kind}, {tokens}"] = module.judged(files, True)
    monkeypatch.setattr(module, "Distillation", None)  # nothing is trained again
    assert set(module.trained("self-generated", tokens, True)) == set(module.KINDS)
    assert np.isfinite([head["acceptance"] for heads in list(found.values())[1:] for head in heads.values()]).all()
    assert len(module.table(found).splitlines()) == 2 + 8
    module.default_model.cache_clear()


def test_an_lm_head_of_its_own_learns_by_the_gradient_of_the_loss(load, folder):
    module = load("paper_experiments.eesd_head")
    checkpoint = Checkpoint(folder)
    model = LlamaForCausalLM.from_checkpoint(checkpoint, torch.float32)
    info = HeadInfo("layer", 1, checkpoint.name, checkpoint.hash)
    heads = [ExitHead.from_model(model, info, [*range(2, 40)]) for _ in module.FORMS]
    trainer = module.OwnHeads(model, heads, [Text(torch.arange(2, 30), 4, True)], TrainSettings(), 10)
    torch.manual_seed(0)
    hidden, teacher = torch.randn(2, 5, model.config.hidden_size).unbind()
    with torch.no_grad():
        trainer.changes[1].normal_(0, 0.1)
    losses, _, _ = trainer._loss([hidden] * 3, teacher)

    # The same by autograd, from the loss as Trainer writes it down.
    p = (teacher @ trainer._lm_head.t()).softmax(-1)
    rows = trainer._lm_head.detach() + trainer.changes[1]
    log_q = (hidden @ rows.t()).log_softmax(-1)
    top = torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1])
    loss = 0.5 * (p * (p.log() - log_q)).sum() - 0.5 * (top * log_q).sum()
    (gradient,) = torch.autograd.grad(loss, trainer.changes[1])
    assert losses[1] == pytest.approx(loss.item(), rel=1e-4)
    torch.testing.assert_close(trainer._sums[1], gradient, rtol=1e-3, atol=1e-5)
    assert losses[0] != losses[1]
    assert not trainer._sums[0].any()  # the model's LM head does not learn


def test_eesds_head_is_held_against_layer_seed_by_seed(load):
    module = load("paper_experiments.eesd_head")
    assert list(module.parts(True)) == ["65,536 tokens, seed 1"]
    cases = [
        {"tokens": 1024, "judged": 2000, "losses": [3.0, 2.0, 1.0], "acceptance": [share, 0.3, 0.4]}
        for share in (0.1, 0.2)
    ]
    table = module.table({str(number): case for number, case in enumerate(cases)}).splitlines()
    assert table[2] == f"| 1,024 | {next(iter(module.FORMS))} | 2 | 0.150 | 0.100 to 0.200 | - | 3.00 |"
    assert table[3] == f"| 1,024 | {[*module.FORMS][1]} | 2 | 0.300 | 0.300 to 0.300 | +0.100 to +0.200 | 2.00 |"
    assert "2,000 held-out tokens" in table[-1]
