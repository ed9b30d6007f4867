"""benchmarks/train_eagle3.py: what is trained is what drafts, and it learns, on a tiny model."""

import importlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support import tiny_model, write_model

from ppsd_rt.distill.shards import Text
from ppsd_rt.distill.train import Trainer, TrainSettings
from ppsd_rt.engine import Engine
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.eagle3 import Eagle3File
from ppsd_rt.models.eagle3_head import Eagle3Head
from ppsd_rt.models.llama import LlamaForCausalLM, to_numpy
from ppsd_rt.models.rope import Rope
from ppsd_rt.reference.eagle_stage import EagleDraftStage
from ppsd_rt.reference.stage import Taps
from ppsd_rt.sampling.params import SamplingParams

TAPS, IDS = (1, 2, 3), [*range(2, 120)]


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("eagle3_trainer")


@pytest.fixture
def model():
    return tiny_model()


def texts_of(model: LlamaForCausalLM, lengths: Sequence[int]) -> list[Text]:
    """Random ids, with the states that the model makes of them."""
    generator = torch.Generator().manual_seed(1)
    layers = (*TAPS, model.config.num_hidden_layers)
    texts = []
    for length in lengths:
        ids = torch.randint(2, 120, (length,), generator=generator)
        _, kept = model.forward_batch(ids[None], Rope(model.config, 64), keep=layers)
        texts.append(Text(ids, 8, True, states={layer: to_numpy(kept[layer][0].bfloat16()) for layer in layers}))
    return texts


def shaken(head: Eagle3Head) -> Eagle3Head:
    """Each of its parts matters."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return head


@torch.no_grad()
def test_the_unrolled_steps_are_what_a_chain_drafts(module, model, tmp_path):
    trained = shaken(module.fresh_head(model, TAPS, IDS, "tiny", "0"))
    checkpoint = Checkpoint(write_model(tmp_path / "model", model))
    importlib.import_module("train_eagle3").write_head(tmp_path / "head", trained)
    head = Eagle3Head.from_file(Eagle3File.load_folder(tmp_path / "head", checkpoint), model)
    assert head.draft_ids.tolist() == IDS
    torch.testing.assert_close(head.lm_head.weight, trained.lm_head.weight, atol=0.01, rtol=0.01)  # it has 16 bits

    (text,) = texts_of(model, [24])
    taps = torch.stack([text.after(layer).float() for layer in TAPS], dim=1)  # [rows, taps, hidden]
    embeddings = model.model.embed_tokens(text.ids[1:])
    outputs = module.unrolled(head, embeddings[None], taps[None, :-1].flatten(2), Rope(model.config, 64), 4)
    unrolled = [head.logits(output)[0] for output in outputs]
    for verified in (1, 9, 15):  # rows of the text; the drafts are the text, too
        kept = Taps(TAPS, model.model.embed_tokens.weight)
        stage = EagleDraftStage(model, head, kept)
        stage.reserve(64)
        for row in range(verified):
            kept.put(row, taps[row])
        kept.length = verified
        stage.run_tokens(text.ids[: verified + 1].tolist())
        for step in range(4):
            row = verified - 1 + step
            torch.testing.assert_close(stage.draft_logits(), unrolled[step][row], atol=1e-4, rtol=1e-4)
            stage.run_tokens([int(text.ids[row + 2])])


def trainer_of(module, model: LlamaForCausalLM, texts: Sequence[Text]) -> Trainer:
    head = module.fresh_head(model, TAPS, IDS, "tiny", "0")
    return module.EagleTrainer(model, [head], texts, TrainSettings(learning_rate=3e-3, warm_up=0.1), 30)


def test_the_gradient_is_that_of_the_loss(module, model, monkeypatch):
    """A step along it lowers the loss by as much as it says; the loss is that of Trainer, step by step."""
    monkeypatch.setattr(module, "CHUNK", 7)
    texts = texts_of(model, [24, 31])
    trainer = trainer_of(module, model, texts)
    head = shaken(trainer.heads[0])
    rows = sum(len(text.ids) - text.answer for text in texts)
    (loss,) = trainer._backward([0, 1], rows)
    outputs, last, _ = trainer._outputs(texts)
    p = trainer._logits(model.model.norm(last)).softmax(-1)
    top = torch.nn.functional.one_hot(p.argmax(-1), p.shape[-1])
    shares = module.LATER ** torch.arange(module.STEPS)
    expected = 0.0
    for output, share in zip(outputs, shares / shares.sum(), strict=True):
        log_q = head.logits(output).log_softmax(-1)
        expected += share * (0.5 * (p * (p.log() - log_q)).sum() - 0.5 * (top * log_q).sum()) / rows
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    named = dict(head.named_parameters())
    gradients = torch.autograd.grad(expected, list(named.values()))
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        assert gradient.any(), name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_training_lowers_the_loss(module, model):
    texts = texts_of(model, range(24, 36))
    trainer = trainer_of(module, model, texts)
    losses = [trainer.learn(range(len(texts)))[0] for _ in range(30)]
    assert losses[-1] < 0.8 * losses[0]


def test_what_counts_as_foreseen(module, model):
    """A head that names one id whatever it reads is right as often as that id comes up."""
    texts = texts_of(model, [24, 31])
    trainer = trainer_of(module, model, texts)
    tokens = torch.cat([text.ids[text.answer :] for text in texts]).tolist()
    named = max(IDS, key=tokens.count)
    with torch.no_grad():
        trainer._head_logits = lambda output: torch.eye(len(IDS))[IDS.index(named)].expand(len(output), -1)
    ((share,),) = trainer.accept(texts)
    assert share == pytest.approx(tokens.count(named) / len(tokens))
    assert trainer.by_step == [share] * module.STEPS


def test_the_command_writes_a_head_that_drafts_and_goes_on_when_called_again(module, tmp_path, monkeypatch, capsys):
    script = importlib.import_module("train_eagle3")
    monkeypatch.setattr(script, "read_prompts", lambda path: [])
    model = write_model(tmp_path / "model")
    options = ["--tokens", "2048", "--slots", "2", "--epochs", "1", "--vocabulary", "100", "--batch-tokens", "512"]
    folders = [word for name in ("text", "work", "out") for word in (f"--{name}", str(tmp_path / name))]
    monkeypatch.setattr("sys.argv", ["train_eagle3.py", "-m", str(model), "--taps", "1", "2", "3", *options, *folders])
    script.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["steps"] > 1
    assert len(told["eagle3"]) == module.STEPS
    monkeypatch.setattr(module.EagleTrainer, "learn", None)  # nothing is trained again
    script.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == told
    engine = Engine.from_pretrained(model, exit_head=tmp_path / "out", backend="cpu", dtype="int8", threads=1)
    answer = engine.generate("Hello", SamplingParams(max_tokens=20, ignore_eos=True), "eesd:stop_rule=fixed").run()
    assert answer.statistics.judged > 0
    choices = importlib.import_module("small_trees")
    monkeypatch.setattr("sys.argv", ["x", str(tmp_path / "out"), "-m", str(model), "--text", str(tmp_path / "text")])
    choices.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["found"]["made up, row 0.014"]
    assert found["siblings"]["speed"] >= found["chain"]["speed"] > 0


def test_the_best_tree_of_choices(module):
    """Of 10 rounds the text takes the first choice in 6, the second in 3, and after the second the first in 2."""
    trees = importlib.import_module("small_trees")
    taken = Counter({(): 10, (0,): 6, (1,): 3, (0, 0): 3, (1, 0): 2})
    costs = importlib.import_module("made_up_costs").one_machine(0.1, 0.02)
    speeds = {family: trees.best(taken, family, costs, dear=False) for family in trees.FAMILIES}
    assert speeds["chain"]["tokens"] == pytest.approx(1.9)
    assert speeds["siblings"]["tokens"] == pytest.approx(2.2)
    assert speeds["tree"]["tokens"] == pytest.approx(2.4)

    def seconds(nodes):  # of which two are the chain; the others pass the early layers, too
        return costs.round(2) + (costs.verify[nodes] - costs.verify[2]) * (1 + costs.row_step / costs.verify[0])

    assert speeds["tree"]["speed"] == pytest.approx(2.4 / seconds(4))
    # Where that draft after the second choice has its price, it does not pay.
    assert 2.2 / seconds(3) > 2.4 / (seconds(4) + 0.1)
    assert trees.best(taken, "tree", costs, dear=True)["speed"] == pytest.approx(2.2 / seconds(3))
