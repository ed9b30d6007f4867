"""A head that hears one layer in the middle: the same drafts from C++ and torch, and never another answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from support import drafts_of, loud_head, slow, tiny_model, write_model

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.distill.shards import Text
from ppsd_rt.distill.train import Trainer, TrainSettings
from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import HeadFile
from ppsd_rt.models.rope import Rope
from ppsd_rt.reference.passes import TorchPasses

SCHEDULES = (
    "ppsd",
    "elastic:first_chunk=0",
    "eesd:stop_rule=fixed,length=6",
    "eesd:length=12,recycle=on,lookup=2",
    "auto",
)
FORTY = SamplingParams(max_tokens=40, ignore_eos=True)
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
CASES = [({}, 1, 2), ({"attention_bias": True}, 0, 1), slow({"attention_bias": True}, 2, 3), slow(QWEN3, 1, 2)]


def write_head(folder, path, exit_layer=1, tap=2, strength=0.5, **shape):
    loud_head(Checkpoint(folder).hash, strength, exit_layer=exit_layer, tap=tap, **shape).save(path, torch.float32)
    return path


@pytest.fixture
def head(folder, tmp_path):
    return write_head(folder, tmp_path / "head.safetensors")


def load(folder, head, backend="cpu", dtype="float32", **options):
    return Engine.from_pretrained(
        folder, exit_head=head, backend=backend, device="cpu", dtype=dtype, threads=2, **options
    )


@pytest.mark.parametrize(("shape", "exit_layer", "tap"), CASES, ids=str)
def test_cpp_drafts_what_torch_drafts(tmp_path, shape, exit_layer, tap):
    """In float32: prompts of several passes, drafts in a row, copies, shared beginnings."""
    folder = write_model(tmp_path / "model", **shape)
    path = write_head(folder, tmp_path / "head.safetensors", exit_layer, tap, **shape)
    engines = [load(folder, path, backend) for backend in ("torch", "cpu")]
    for prompt in ("ab" * 76, "ab" * 76 + "c"):
        for schedule in ("eesd:length=5,stop_rule=fixed", "eesd:lookup=2,stop_rule=fixed"):
            expected, found = (drafts_of(engine, prompt, FORTY, schedule) for engine in engines)
            assert found == expected, (prompt, schedule)
    write_head(folder, path, exit_layer, tap, 0.0, **shape)
    assert drafts_of(load(folder, path), "ab" * 76, FORTY, "eesd:length=5,stop_rule=fixed") != drafts_of(
        engines[1], "ab" * 76, FORTY, "eesd:length=5,stop_rule=fixed"
    )


@pytest.mark.parametrize("part", ["tap.keys.weight", "tap.values.weight", "tap.feedback.weight", "tap.norm.bias"])
def test_every_part_of_the_tap_is_heard(folder, head, part):
    schedule = "eesd:length=5,stop_rule=fixed"
    whole = load(folder, head)
    expected = drafts_of(whole, "Hello, world", FORTY, schedule)
    deaf = whole.backend
    file = HeadFile.load(head, Checkpoint(folder))
    deaf.use_head(replace(file, tensors={**file.tensors, part: 0 * file.tensors[part]}))
    assert drafts_of(whole, "Hello, world", FORTY, schedule) != expected


@pytest.mark.parametrize(
    "format", ["cpu int8", "cpu int4", "cpu bfloat16", slow("torch float32"), slow("torch bfloat16")]
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_schedule_gives_the_plain_answer(folder, head, format, temperature):
    backend, dtype = format.split()
    engine = load(folder, head, backend, dtype)
    params = SamplingParams(max_tokens=60 if backend == "cpu" else 16, temperature=temperature, seed=3, ignore_eos=True)
    for prompt in ("abc", "abcdefg" * 12):  # shares rows with the text before
        plain = engine.generate(prompt, params, "plain").run()
        for schedule in SCHEDULES:
            assert engine.generate(prompt, params, schedule).run().ids == plain.ids, schedule


@pytest.mark.parametrize("backend", ["cpu", slow("torch")])
def test_many_at_once(folder, head, backend):
    """Prompts that begin alike share blocks; some answers are interrupted, and computed again."""
    pages = {"kv_memory": 40_000_000 if backend == "torch" else 450_000}
    engine = load(folder, head, backend, **pages)
    beginning = "In the beginning was the word. " * 5
    prompts = [beginning + str(i) * (i % 4 + 1) for i in range(10)] + ["x", "y" * 130]
    params = SamplingParams(max_tokens=90 if backend == "cpu" else 12, temperature=0.7, seed=1, ignore_eos=True)
    alone = [engine.generate(prompt, params, "plain").run().ids for prompt in prompts]
    for schedule in ("eesd:stop_rule=fixed,length=4", "auto"):
        assert [each.ids for each in engine.generate_many(prompts, params, schedule).run()] == alone
    if backend == "cpu":
        assert engine.backend._answers.loop.counts["preempted"] > 0


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_of_one_process(folder, head, stages):
    engine = load(folder, head, stages=stages)
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    plain = engine.generate("abc", params, "plain").run()
    for schedule in SCHEDULES:
        assert engine.generate("abc", params, schedule).run().ids == plain.ids, schedule


@pytest.mark.parametrize(("tap", "said"), [(4, "2 to 3"), (1, "2 to 3")])
def test_a_layer_that_it_cannot_hear(folder, tmp_path, tap, said):
    path = tmp_path / "head.safetensors"
    head = loud_head(Checkpoint(folder).hash, exit_layer=1, tap=2)
    head.info = replace(head.info, tap=tap)
    head.save(path)
    with pytest.raises(PpsdError, match=f"with the tap {tap}: this model takes {said}"):
        load(folder, path)


def test_training_sees_what_decoding_does(folder):
    """A whole text at once, row for row what the loop's calls give, chunk by chunk."""
    head = loud_head(Checkpoint(folder).hash, exit_layer=1, tap=2)
    model = tiny_model()
    places, ids = [1, 2, 3, 1, 2, 1, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2], list(range(40, 56))
    trainer = Trainer(model, [head], [], TrainSettings(), 1)
    padded, _ = trainer._pad([Text(torch.tensor(ids), 1, True)])
    whole = trainer._student(head, trainer._teacher([Text(torch.tensor(ids), 1, True)], padded), torch.tensor([places]))

    passes = TorchPasses(model, head.requires_grad_(False))
    passes.reserve(64, 0)
    exits = passes.early([(0, 16, [0], 0)], passes.embed(ids), None)
    last, tapped = passes.late([(0, 16, [0], 0)], exits, None)
    drawn = []
    for row, place in enumerate(places):
        start = row - place + 1
        heard = np.concatenate((last[start - 1], tapped[start - 1, 0]))[None]
        (logits,) = passes.draw([((row, 1, [0], 0), exits[row : row + 1], place if start else 0, heard, ())], None)
        torch.testing.assert_close(torch.from_numpy(logits), head.lm_head(whole[0, row]).detach(), rtol=1e-3, atol=1e-3)
        drawn.append(passes.drawn[0])
        if row + 1 == len(places) or places[row + 1] == 1:
            rows = slice(start, row + 1)
            passes.hear([(start, place, [0], 0)], np.stack(drawn[rows]), tapped[rows, 0])


def test_an_old_head_begins_with_a_tap_that_says_nothing(folder, tmp_path):
    """And training it measures what it hears."""
    path, model = tmp_path / "head.safetensors", tiny_model()
    old = loud_head(Checkpoint(folder).hash, exit_layer=1)
    old.save(path, torch.float32)
    file = HeadFile.load(path, Checkpoint(folder))
    info = replace(old.info, tap=2)
    file.check_grows(info, model.config)
    with pytest.raises(UsageError, match="--tap 3 cannot begin as one that hears layer 2"):
        HeadFile.load(write_head(folder, path), Checkpoint(folder)).check_grows(replace(info, tap=3), model.config)
    head = ExitHead.from_model(model, info, old.draft_ids.tolist())
    head.begin_as(file)
    texts = [Text(torch.arange(20, 60), 3, True), Text(torch.arange(90, 120), 5, True)]
    trainers = [Trainer(model, [each], texts, TrainSettings(), 2) for each in (old, head)]
    for distances in (torch.ones(2, 40, dtype=torch.int64), torch.arange(80).reshape(2, 40) % 8 + 1):
        old_rows, rows = (
            trainer._student(trainer.heads[0], trainer._teacher(texts, trainer._pad(texts)[0]), distances)
            for trainer in trainers
        )
        torch.testing.assert_close(old_rows, rows)
    trainers[1].learn([0, 1])
    _, kept = model.forward_batch(torch.arange(20, 60)[None], Rope(model.config, 40), [2])
    assert 0.1 < head.tap.norm(kept[2][0]).std(0).median() < 0.3, "z varies by 0.2"
    assert all(weight.any() for weight in (head.tap.keys.weight, head.tap.values.weight, head.tap.feedback.weight))
    head.save(path, torch.int8)
    assert torch.equal(
        ExitHead.from_file(HeadFile.load(path, Checkpoint(folder)), model).tap.norm.bias, head.tap.norm.bias
    )
