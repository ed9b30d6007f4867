"""Self-distillation: what is sampled, what is learned, and that a run can be cut off and taken up anywhere."""

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support import EOS, FAMILIES, TEMPLATE, VOCAB, slow, tiny_model

from ppsd_rt.cpu.backend import CpuBackend
from ppsd_rt.distill import run as distillation
from ppsd_rt.distill import shards
from ppsd_rt.distill.deduplication import Deduplication
from ppsd_rt.distill.mix import mix_of
from ppsd_rt.distill.prompts import FAMILY, prompts_of
from ppsd_rt.distill.run import Distillation, Settings
from ppsd_rt.distill.samplers import NativeSampler, TorchSampler, in_areas
from ppsd_rt.distill.self_text import MAX_ANSWER, SelfText
from ppsd_rt.distill.successors import count_successors, foreseen
from ppsd_rt.distill.train import Trainer, TrainSettings, batches
from ppsd_rt.engine import Engine
from ppsd_rt.errors import PpsdError, UsageError
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.exit_head import ExitHead
from ppsd_rt.models.head_file import HeadFile, HeadInfo
from ppsd_rt.models.llama import LlamaForCausalLM, causal_attention
from ppsd_rt.models.rope import Rope
from ppsd_rt.models.tokenizer import load_tokenizer
from ppsd_rt.sampling.params import SamplingParams

STEPS = 250  # long enough for conversations to end inside a shard


@pytest.fixture(scope="module")
def model(folder):
    return LlamaForCausalLM.from_checkpoint(Checkpoint(folder), torch.float32)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def mix(tokenizer):
    return mix_of(tokenizer, frozenset({EOS}))


def capacity(mix):
    return mix.longest + MAX_ANSWER


def written(generated, steps=STEPS):
    for _ in generated.run(steps):
        pass
    return generated


@pytest.fixture(scope="module")
def generated(model, mix):
    return written(SelfText(TorchSampler(model, 12, capacity(mix), 3, mix.end_ids), mix, seed=3))


def test_texts_of_like_length_pass_together_within_an_area():
    lengths = {0: 5, 1: 2, 2: 3, 3: 9, 4: 2}
    assert list(in_areas(lengths, 9)) == [[1, 4, 2], [0], [3]]  # three texts, each padded to 3


def test_the_template_is_cut_where_the_question_stands(tokenizer, mix):
    text = [tokenizer.decode(opening, skip_special_tokens=False) for opening in mix.openings]
    assert text[0] == "<|im_start|>user\n"
    assert text[1].startswith("<|im_start|>system\n") and text[1].endswith("<|im_start|>user\n")
    assert tokenizer.decode(mix.between, skip_special_tokens=False) == "<|im_end|>\n<|im_start|>assistant\n"
    assert "<|im_start|>{{ m['role'] }}" in TEMPLATE


def test_conversations_have_the_shape_of_the_template(generated, mix):
    assert len(generated.finished) > 12
    for conversation in generated.finished:
        ids, answer, beginning = conversation.ids, conversation.answer, conversation.beginning
        assert tuple(ids[: len(beginning.ids)]) == beginning.ids
        if beginning.most_question:
            question = ids[len(beginning.ids) : answer - len(mix.between)]
            assert any(beginning.ids[: len(opening)] == opening for opening in mix.openings)
            assert tuple(ids[answer - len(mix.between) : answer]) == mix.between
            assert 1 <= len(question) <= beginning.most_question
            assert EOS not in question
        else:
            assert answer == len(beginning.ids)
        assert 1 <= len(ids) - answer <= MAX_ANSWER
        assert EOS not in ids[answer:-1]
    assert {c.temperature == 0 for c in generated.finished} == {True, False}
    assert len({c.beginning.family for c in generated.finished}) > 4


@pytest.mark.parametrize("format", ["float32", "int8", "int4"])
def test_what_cpp_writes_is_what_the_engine_says(folder, tokenizer, mix, format):
    """Greedy answers are the engine's plain ones, whatever stands beside them; the states are those of the layers."""
    backend = CpuBackend(Checkpoint(folder), format, "cpu", 2)
    generated = written(SelfText(NativeSampler(backend, 16, capacity(mix), (0, 2, 4), mix.end_ids), mix, seed=3), 300)
    engine, checked = Engine(Checkpoint(folder), tokenizer, backend, "tiny"), 0
    for text in generated.finished[:12]:
        if text.temperature == 0:
            params = SamplingParams(max_tokens=len(text.ids) - text.answer)
            plain = engine.generate(text.ids[: text.answer], params, "plain").run().ids
            assert list(plain) == text.ids[text.answer :]
            checked += 1
    assert checked > 2
    reference = LlamaForCausalLM.from_checkpoint(Checkpoint(folder), torch.float32)
    ids = torch.tensor(text.ids[:-1])
    states = torch.from_numpy(text.states).view(torch.bfloat16)[:-1].float()
    with torch.no_grad():
        _, kept = reference.forward_batch(ids[None], Rope(reference.config, 1024), keep=(2, 4))
    assert torch.equal(states[:, 0], reference.model.embed_tokens(ids).bfloat16().float())
    close = {"float32": 0.02, "int8": 0.15, "int4": 0.4}[format]
    for kind, layer in ((1, 2), (2, 4)):
        error = (states[:, kind] - kept[layer][0]).norm() / kept[layer][0].norm()
        assert error < close


def test_no_text_is_trained_on_twice_and_none_that_heads_are_judged_by(tokenizer):
    """Eight ids in common suffice (here ids are bytes); a shorter prompt has to stand there whole."""

    def text(words):
        return shards.Text(torch.tensor(tokenizer.encode(words)), 1, True)

    unique = Deduplication(tokenizer, ["Rain?", "How does a lock work"])
    leaks = ["so what is rain?", "HOW DOES A", "a padlock work?"]
    texts = ["a b c", "a b c", *leaks, "rain", "how do", "? a lock"]
    kept = unique.new([*map(text, texts), shards.Text(torch.tensor([VOCAB + 7, 5]), 1, True)])
    assert [tokenizer.decode(t.ids.tolist()) for t in kept[:-1]] == ["a b c", "rain", "how do", "? a lock"]
    assert (unique.doubles, unique.leaks) == (1, 3)
    assert unique.new([text("how d"), text("oes a")]), "two texts do not make one leak"
    assert unique.leaking([]).tolist() == []


def prompts(tokenizer, count, **changes):
    given = [[{"role": "user", "content": f"Prompt {number:03}, please."}] for number in range(count)]
    options = {"leaking": lambda texts: [False] * len(texts), "share": 0.5, "longest": 200, "seed": 1}
    return prompts_of(given, tokenizer, **{**options, "tell": lambda text: None, **changes})


def test_prompts_are_answered_greedily_once(folder, mix, tokenizer):
    given = prompts(tokenizer, 8, share=0.7)
    sampler = NativeSampler(CpuBackend(Checkpoint(folder), "float32", "cpu", 1), 12, capacity(mix), (), mix.end_ids)
    generated = written(SelfText(sampler, mix, 3, given.share, given.of_shard(1, 8, random.Random(3))), 600)
    answered = [c for c in generated.finished if c.beginning.family == FAMILY]
    assert 0.5 < len(answered) / len(generated.finished) < 0.85
    assert {c.beginning.ids for c in answered} == set(given.learned)
    greedy = [c.beginning.ids for c in answered if c.temperature == 0]
    assert len(greedy) == len(set(greedy))
    assert all(c.answer == len(c.beginning.ids) for c in answered)


@torch.no_grad()
@pytest.mark.parametrize("fused", [False, slow(True)])
@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_torch_writes_what_the_model_says_in_every_family(family, fused):
    """Texts of several lengths begin in slots that others have left, with plain attention and with the kernel."""
    if fused:
        pytest.importorskip("triton", reason="Triton is not installed")
    model = tiny_model(**FAMILIES.get(family, {}))
    sampler = TorchSampler(model, 3, 60, 1, (EOS,))
    sampler.fused, sampler.stride = fused, 2 if fused else 8
    source, texts, waiting, longest = random.Random(2), [], 4 if fused else 9, 6 if fused else 30
    while waiting or not all(text.over for _, text in texts):
        running = sum(not text.over for _, text in texts)
        for _ in range(min(waiting, 3 - running)):
            ids = [source.randrange(VOCAB - 1) for _ in range(source.randrange(1, 30))]
            texts.append((ids, sampler.write(ids, 0.0, 0, source.randrange(1, longest))))
            waiting -= 1
        sampler.step()
    for ids, text in texts:
        whole = [*ids, *text.written]
        hidden, _ = model.forward_batch(torch.tensor([whole]), Rope(model.config, 64))
        logits = model.lm_head(hidden)[0, len(ids) - 1 : -1]
        assert 1 <= len(text.written) <= text.most
        assert len(text.written) == text.most or text.written[-1] == EOS
        true = logits.gather(1, torch.tensor(text.written)[:, None])[:, 0]
        assert (true >= logits.max(-1).values - 1e-3).all(), "equal but for rounding"


def test_sampled_answers_follow_their_temperature(folder, model, tokenizer):
    """Mean log-probability of warm answers, against its expectation: the model's entropy at that temperature."""
    mix = mix_of(tokenizer, frozenset({EOS}))
    backend = CpuBackend(Checkpoint(folder), "float32", "cpu", 1)
    sampler = NativeSampler(backend, 24, capacity(mix), (), mix.end_ids)
    generated = written(SelfText(sampler, mix, seed=8), 600)
    rope = Rope(model.config, 1024)
    for temperature in (0.4, 1.0):
        got, expected, count = 0.0, 0.0, 0
        for conversation in generated.finished:
            if conversation.temperature == temperature:
                with torch.no_grad():
                    hidden, _ = model.forward_batch(torch.tensor([conversation.ids]), rope)
                    logits = model.lm_head(hidden)[0, conversation.answer - 1 : -1]
                log_p = (logits / temperature).log_softmax(-1)
                true = torch.tensor(conversation.ids[conversation.answer :])
                got += float(log_p.gather(1, true[:, None]).sum())
                expected += float((log_p.exp() * log_p).sum())
                count += len(true)
        assert count > 500
        assert got / count == pytest.approx(expected / count, abs=0.15)


def test_a_context_that_is_too_short_is_refused(mix):
    model = tiny_model(max_position_embeddings=100)
    with pytest.raises(PpsdError, match="context"):
        SelfText(TorchSampler(model, 1, 100, 0, mix.end_ids), mix, seed=0)


def test_loss_and_gradient_are_those_of_autograd():
    model = tiny_model()
    head = ExitHead.from_model(model, HeadInfo("layer", 2, "tiny", "0"), list(range(0, VOCAB, 3)))
    weight = 0.3
    text = shards.Text(torch.tensor([5, 5, 3, 3, 3, 9]), answer=1, greedy=True)  # of which 3 and 9 can be drafted
    trainer = Trainer(model, [head], [text], TrainSettings(top_weight=weight), steps=1)
    generator = torch.Generator().manual_seed(0)
    hidden, teacher = (torch.randn(7, 64, generator=generator) for _ in range(2))
    (loss,), (gradient,), guess = trainer._loss([hidden], teacher)

    hidden.requires_grad_(True)
    rows = model.lm_head.weight[head.draft_ids]
    log_q, log_p = (hidden @ rows.t()).log_softmax(-1), (teacher @ rows.t()).log_softmax(-1)
    divergence = torch.nn.functional.kl_div(log_q, log_p, reduction="sum", log_target=True)
    top = torch.nn.functional.cross_entropy(hidden @ rows.t(), log_p.argmax(-1), reduction="sum")
    expected = (1 - weight) * divergence + weight * top
    counts = torch.tensor([1.0 + {3: 3, 9: 1}.get(id, 0) for id in head.draft_ids.tolist()])
    log_u = (counts / counts.sum()).log().expand(7, -1)
    divergence = torch.nn.functional.kl_div(log_u, log_p, reduction="sum", log_target=True)
    blind = (1 - weight) * divergence + weight * torch.nn.functional.nll_loss(log_u, log_p.argmax(-1), reduction="sum")
    assert guess.item() == pytest.approx(blind.item(), rel=1e-4)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    torch.testing.assert_close(gradient, hidden.grad, rtol=1e-4, atol=1e-5)


def test_acceptance_is_the_share_of_foreseen_tokens(model, generated):
    """Against a plain loop over one answer at a time."""
    head = ExitHead.from_model(model, HeadInfo("layer", 3, "tiny", "0"))
    texts = [shards.Text(torch.tensor(c.ids), c.answer, c.temperature == 0) for c in generated.finished]
    ((measured,),) = Trainer(model, [head], [], TrainSettings(), steps=1).accept(texts)
    right = judged = 0
    with torch.no_grad():
        for text in texts:
            if text.greedy:
                _, kept = model.forward_batch(text.ids[None], Rope(model.config, 512), keep=(3,))
                hidden = head.hidden(kept[3], causal_attention(Rope(model.config, 512)))
                drafts = head.lm_head(hidden)[0, text.answer - 1 : -1].argmax(-1)
                right += int((drafts == text.ids[text.answer :]).sum())
                judged += len(drafts)
    assert measured == pytest.approx(right / judged, abs=0.005)
    assert measured > 0.99  # a fresh `layer` head after the second to last layer is the model's own last layer


def test_every_answer_token_is_trained_on_once_an_epoch(generated):
    texts = [shards.Text(torch.tensor(c.ids), c.answer, True) for c in generated.finished]
    settings = TrainSettings(batch_tokens=300, epochs=2)
    plan = batches(texts, settings, seed=1)
    assert sorted(index for step in plan for index in step) == sorted([*range(len(texts))] * 2)
    assert plan == batches(texts, settings, seed=1) != batches(texts, settings, seed=2)


def test_states_that_came_with_the_text_teach_the_same(model, generated):
    """As those that are computed anew, but for their rounding to bfloat16. Embeddings (layer 0) do not come with it."""
    texts = [shards.Text(torch.tensor(c.ids), c.answer, True) for c in generated.finished]
    known = []
    for text in texts:
        hidden = []
        x = model.model.embed_tokens(text.ids[None])
        for layer in model.model.layers:
            x = layer(x, causal_attention(Rope(model.config, 1024)))
            hidden.append(x[0])
        states = {layer: hidden[layer - 1].bfloat16().view(torch.uint16).numpy() for layer in (2, 4)}
        known.append(replace(text, states=states))
    losses = []
    for some in (texts, known):
        heads = [ExitHead.from_model(model, HeadInfo("adapter", layer, "tiny", "0"), [*range(99)]) for layer in (0, 2)]
        trainer = Trainer(model, heads, some, TrainSettings(), 4)
        losses.append([trainer.learn(batch).tolist() for batch in ([5, 1, 7], [2, 3], [5, 1, 7])])
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.01, atol=0.01)


@pytest.fixture
def job(folder, model, tokenizer, tmp_path, monkeypatch):
    """A small distillation; job(name, ...) makes one that works in the folder `name`."""
    monkeypatch.setattr(shards, "STEPS", 300)
    monkeypatch.setattr(distillation, "STEPS", 300)
    checkpoint = Checkpoint(folder)

    def make(name, resume=False, text=None, begin=None, rate=3e-3, **changes):
        options = {
            "kinds": ("layer",),
            "exit_layers": (0, 2),
            "tokens": 9000,
            "draft_vocabularies": (128,),
            "slots": 16,
            "format": "float32",
            "seed": 5,
        }
        train = TrainSettings(learning_rate=rate, batch_tokens=512, epochs=4)
        settings = Settings(model_hash=checkpoint.hash, train=train, **{**options, **changes})
        begin = HeadFile.load(begin, checkpoint) if begin else None
        job = Distillation(
            checkpoint, model, tokenizer, settings, tmp_path / name, text or tmp_path / name, begin=begin
        )
        job.prepare(resume)
        return job

    return make


def play(steps, count=None):
    """Run a phase, or only its first `count` steps -> the last one."""
    return list(itertools.islice(steps, count))[-1]


def test_training_teaches(job, tmp_path):
    work = job("work", kinds=("layer", "feedback"), draft_vocabularies=(128, 64), tap=3)
    play(work.sample())
    last = play(work.train())
    assert last.done == last.total == work.trainer.step
    fresh = Trainer(work.model, work._fresh_heads(), [], work.settings.train, 1)
    held_out = shards.read_shard(work.folder, 0)
    for (before,), (after, fewer) in zip(fresh.accept(held_out), work.acceptance, strict=True):
        assert after > before + 0.05
        assert fewer > before  # fewer ids may even do better: some mistakes cannot be made any more
    assert 1 >= work.coverage[0] > work.coverage[1] > 0.5
    assert work.foreseen > 0.02
    paths = work.save(lambda head, size: tmp_path / f"{head.kind}-{head.exit_layer}-{size}.safetensors")
    heads = ["layer-0", "layer-2", "feedback-0", "feedback-2"]
    assert [path.stem for path in paths] == [f"{head}-{size}" for head in heads for size in (128, 64)]
    for path, size, acceptance, coverage in zip(paths[6:], (128, 64), work.acceptance[3], work.coverage, strict=True):
        loaded = ExitHead.from_file(HeadFile.load(path, work.checkpoint), work.model)
        assert (loaded.info.kind, loaded.info.exit_layer, len(loaded.draft_ids)) == ("feedback", 2, size)
        assert loaded.info.tap == 3
        assert loaded.tap.keys.weight.any()
        assert loaded.info.recipe["seed"] == 5
        assert loaded.info.acceptance["held_out_greedy"] == pytest.approx(acceptance, abs=1e-4)
        assert loaded.info.acceptance["draft_vocabulary_coverage"] == pytest.approx(coverage, abs=1e-4)
    assert EOS in loaded.draft_ids
    assert HeadFile.load(path, work.checkpoint).successors.tolist() == work.successors.tolist()
    log = [json.loads(line) for line in (work.folder / "log.jsonl").read_text().splitlines()]
    assert log[-1]["acceptance"] == work.acceptance


def test_heads_of_one_run_are_those_of_runs_of_their_own(model, generated):
    def trained(*kinds):
        heads = [ExitHead.from_model(model, HeadInfo(kind, 2, "tiny", "")) for kind in kinds]
        trainer = Trainer(model, heads, texts, TrainSettings(), 2)
        losses = [trainer.learn(range(len(texts))).tolist() for _ in range(2)]
        return heads, list(zip(*losses, strict=True))

    texts = [shards.Text(torch.tensor(c.ids), c.answer, c.temperature == 0) for c in generated.finished[:6]]
    together, losses = trained("two-layer", "feedback")
    for head, loss in zip(together, losses, strict=True):
        (alone,), own = trained(head.info.kind)
        assert own == [loss] and loss[1] < loss[0]
        for name, parameter in alone.named_parameters():
            assert torch.equal(parameter, head.get_parameter(name))


def test_what_follows_most_often_is_counted():
    texts = [shards.Text(torch.tensor(ids), 1, True) for ids in ([1, 2, 3, 1, 2, 3], [1, 2, 4], [7, 7, 7])]
    counted = count_successors(texts).tolist()
    assert [1, 2, 3, 4] in counted  # twice of three times: 5 of 8, which is count 4
    assert [-1, 1, 2, 7] in counted  # always
    assert [-1, 2, 3, 4] in counted
    assert [-1, 7, 7, 7] in counted
    assert all(row[:2] != [7, 7] for row in counted), "once is no habit"
    assert foreseen(np.array([[-1, 2, 4, 1]]), [texts[1]]) == 0.5
    assert foreseen(np.zeros((0, 4)), []) is None


def test_texts_that_have_ended_are_kept_when_sampling_is_cut_off(job):
    first = job("cut").sample()
    play(first, count=590)  # inside the second shard
    first.close()
    again = job("cut", resume=True)
    ((steps, path),) = shards.cuts(again.folder, 1).items()
    kept = shards._read_texts(path)
    assert kept and steps == 590 - 300 and again.plan.there == 16 * 590
    assert play(again.sample()).done == 16 * 900
    texts = shards.read_shard(again.folder, 1)
    assert len(texts) >= len(kept) > 10
    assert all(torch.equal(one.ids, other.ids) for one, other in zip(kept, texts, strict=False))
    assert all(2 in text.states for text in texts)


def test_threads_write_the_shards_that_one_writes_and_keep_what_has_ended(job):
    one, several = job("one"), job("several")
    several.workers = 3
    sampling = several.sample()
    while next(sampling).done == 0:
        pass
    sampling.close()
    several.prepare(resume=True)
    assert play(several.sample()).done == play(one.sample()).done == 16 * 900
    whole = job("whole")
    whole.workers = 3
    play(whole.sample())
    for number in range(3):
        texts = shards.read_shard(one.folder, number)
        found = shards.read_shard(whole.folder, number)
        assert [(text.ids.tolist(), text.answer) for text in texts] == [
            (text.ids.tolist(), text.answer) for text in found
        ]


@pytest.mark.slow
def test_training_that_was_cut_off_ends_as_if_it_had_not_been(job, monkeypatch):
    monkeypatch.setattr(distillation, "CHECKPOINT_SECONDS", 0.0)
    whole = job("whole")
    play(whole.sample())
    play(whole.train())
    play(job("cut", text=whole.text).train(), count=7)
    final = job("cut", resume=True, text=whole.text)
    assert play(final.train(), count=1).done == 8  # the seven before it were saved
    play(final.train())
    for a, b in zip(whole.trainer.heads, final.trainer.heads, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_damaged_files_say_what_to_delete(job, monkeypatch):
    monkeypatch.setattr(distillation, "CHECKPOINT_SECONDS", 0.0)
    work = job("work")
    play(work.sample())
    play(work.train(), count=2)
    for path, words in (
        (work.folder / "training.pt", "delete it, and --resume trains from the beginning"),
        (shards.shard_path(work.folder, 1), "delete text-00001.safetensors, and --resume samples it anew"),
        (shards.states_path(work.folder, 0), "delete text-00000.safetensors, and --resume samples it anew"),
    ):
        whole = path.read_bytes()
        for damaged in (whole[:-100], whole[: len(whole) // 2], b""):
            path.write_bytes(damaged)
            with pytest.raises(PpsdError) as caught:
                play(job("work", resume=True).train(), count=1)
            assert str(path.parent) in str(caught.value)
            assert words in str(caught.value)
            assert "\n" not in str(caught.value)
        path.write_bytes(whole)
    again = job("work", resume=True)
    assert play(again.train(), count=1).done == 3  # nothing that was not damaged is lost


def test_a_head_is_written_where_no_held_out_answer_is_greedy(job, tmp_path, monkeypatch):
    def read_shard(folder, number):
        return [replace(text, greedy=number > 0) for text in shards.read_shard(folder, number)]

    monkeypatch.setattr(distillation, "read_shard", read_shard)
    work = job("work", draft_vocabularies=(128, 0), tokens=4800)
    play(work.sample())
    assert play(work.train()).acceptance == ()
    path, *_ = work.save(lambda head, size: tmp_path / f"{head.exit_layer}-{size}.safetensors")
    assert HeadFile.load(path, work.checkpoint).info.acceptance == {}  # `auto` takes what it takes for unknown heads


def test_an_earlier_run_is_not_overwritten_or_mixed(job):
    work = job("work")
    with pytest.raises(PpsdError, match="--resume"):
        job("work")
    with pytest.raises(PpsdError, match="seed = 5, not 6"):
        job("work", resume=True, seed=6)
    for layers in (None, 3, ["1"], [[1]]):
        settings = json.loads((work.folder / "text.json").read_text())
        (work.folder / "text.json").write_text(json.dumps({**settings, "layers": layers}))
        with pytest.raises(PpsdError, match="was begun with layers = "):
            job("work", resume=True)


def test_settings_are_checked(job):
    for changes in (
        {"kinds": ("layer", "norm")},
        {"tokens": 0},
        {"slots": 0},
        {"slots": 65},
        {"draft_vocabularies": (-1,)},
    ):
        with pytest.raises(UsageError):
            job("work", **changes)
    with pytest.raises(PpsdError, match="0 to 3"):
        job("work", exit_layers=(4,))
