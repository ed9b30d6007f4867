"""Families of models on the cpu backend: norms of heads, layers that do not rotate, windows, stretched rotation."""

import numpy as np
import pytest
import torch
from support import FAMILIES, tiny_head, tiny_model, write_model

from ppsd_rt import Engine, SamplingParams, _native
from ppsd_rt.distill.samplers import NativeSampler, TorchSampler
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.pipeline.schedule import parse_schedule

# Longer than every window, than a span of positions of the attention kernels (64), and than a pass of rows.
PROMPT = "The quick brown fox jumps over the lazy dog, " * 4
SCHEDULES = ["eesd", "ppsd", "elastic", "elastic:lookup=2", "eesd:length=3,lookup=1"]
SAMPLINGS = [
    SamplingParams(max_tokens=50, ignore_eos=True),
    SamplingParams(max_tokens=50, ignore_eos=True, temperature=0.9, seed=5),
]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 9 for i in range(8)],
    "long_factor": [1.5 * 2**i for i in range(8)],
    "original_max_position_embeddings": 200,
}
ALL = {
    **FAMILIES,
    "llama 3.2": {"rope_scaling": LLAMA3},
    "biases in the MLP": {"mlp_bias": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
    # The answer begins within the length that these were trained for, and ends beyond it.
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 200},
    "longrope": {"rope_scaling": LONGROPE},
}


@pytest.fixture(scope="module", params=ALL.values(), ids=ALL.keys())
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("family") / "model", **family)


@pytest.fixture(scope="module")
def peer(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def load(folder, dtype="float32", **options):
    return Engine.from_pretrained(folder, **{"exit_head": "norm:2", "backend": "cpu", "dtype": dtype, **options})


def close(found, expected, tolerance):
    """Root mean square of the difference, against that of what is expected."""
    assert np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)) < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_logits_are_those_of_transformers(folder, peer, dtype):
    engine = load(folder, dtype)
    ids = engine.encode(PROMPT)
    with torch.no_grad():
        expected = peer(torch.tensor([ids])).logits[0].numpy()
    close(engine.backend.logits(ids, len(ids)), expected, {"float32": 1e-5, "bfloat16": 0.03, "int8": 0.1}[dtype])


def test_greedy_ids_are_those_of_transformers(folder, peer):
    engine = load(folder)
    ids = engine.encode(PROMPT)
    with torch.no_grad():
        expected = peer.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=50, min_new_tokens=50, eos_token_id=None
        )
    assert list(engine.generate(ids, SAMPLINGS[0], "plain").run().ids) == expected[0, len(ids) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_every_schedule_gives_the_plain_answer(folder, dtype):
    engine = load(folder, dtype, threads=2)
    for params in SAMPLINGS:
        plain = engine.generate(PROMPT, params, "plain").run()
        for text in SCHEDULES:
            completion = engine.generate(PROMPT, params, parse_schedule(text)).run()
            assert completion.ids == plain.ids, text
            assert completion.statistics.judged > 0


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_every_instruction_set_agrees(folder, isa, monkeypatch):
    best = load(folder)
    ids = best.encode(PROMPT)
    monkeypatch.setenv("PPSD_ISA", isa)
    close(load(folder).backend.logits(ids, len(ids)), best.backend.logits(ids, len(ids)), 1e-5)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_row_has_the_same_bits_alone_and_among_others(folder, dtype):
    """Whatever rows share its pass, and whatever threads share its heads."""
    one, three = load(folder, dtype, threads=1), load(folder, dtype, threads=3)
    ids = one.encode(PROMPT)
    whole = one.backend.logits(ids, len(ids))
    assert np.array_equal(three.backend.logits(ids, len(ids)), whole)
    for length in (1, 20, 21, 22, 63, 64, 65, 70, 71, 72, 129):
        assert np.array_equal(one.backend.logits(ids[:length])[-1], whole[length - 1]), length


def test_texts_side_by_side_are_what_they_are_alone(folder):
    """A row of each in a pass, at positions of their own: what samples the text that heads are trained on."""
    engine, reference = load(folder), load(folder, backend="torch")
    texts = [engine.encode(PROMPT[start:90]) for start in (0, 30)]
    alone = [engine.generate(text, SAMPLINGS[0], "plain").run().ids[0] for text in texts]
    model = reference.backend.model
    samplers = NativeSampler(engine.backend, 2, 256, [], ()), TorchSampler(model, 2, 256, seed=0, ends=())
    for sampler in samplers:
        writing = [sampler.write(text, 0.0, 0, 1) for text in texts]
        while not all(text.over for text in writing):
            sampler.step()
        assert [text.written for text in writing] == [[id] for id in alone]


def test_a_head_with_layers_attends_as_the_last_layers_do(folder, family, tmp_path):
    """A head with the last two layers' weights, after all layers but these, drafts what the model itself says."""
    model = tiny_model(**family)
    head = tiny_head(model, "two-layer", hash=Checkpoint(folder).hash)
    head.draft_ids = None
    head.save(tmp_path / "head.safetensors")
    for backend in ("cpu", "torch"):
        engine = load(folder, backend=backend, exit_head=tmp_path / "head.safetensors")
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        completion = engine.generate(PROMPT, params, "eesd").run()
        assert completion.ids == engine.generate(PROMPT, params, "plain").run().ids
        assert completion.statistics.judged == completion.statistics.accepted > 0


def test_a_window_that_nothing_leaves_changes_nothing(tmp_path):
    wide = write_model(tmp_path / "wide", **{**FAMILIES["mistral"], "sliding_window": 200})
    none = write_model(tmp_path / "none", **{**FAMILIES["mistral"], "sliding_window": None})
    narrow = write_model(tmp_path / "narrow", **FAMILIES["mistral"])
    logits = []
    for folder in (wide, none, narrow):
        engine = load(folder)
        logits.append(engine.backend.logits(engine.encode(PROMPT), 60))
    assert np.array_equal(logits[0], logits[1])
    assert not np.allclose(logits[0], logits[2])


def test_a_prompt_beyond_the_original_length(tmp_path):
    """transformers rotates all rows of such a prompt by its length: with another prompt nothing of it can be kept, and
    side by side one waits for the other."""
    transformers = pytest.importorskip("transformers")
    for changes in (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 90},
        {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 90}},
    ):
        folder = write_model(tmp_path / changes["rope_scaling"]["rope_type"], **changes)
        engines = [load(folder, threads=2), load(folder, backend="torch")]
        alone = []
        for prompt in (PROMPT[:80], PROMPT, PROMPT + "and on"):
            ids = engines[0].encode(prompt)
            # A new one each time: it goes on with the longest text that it has seen.
            peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            with torch.no_grad():
                expected = peer(torch.tensor([ids])).logits[0].numpy()
                said = peer.generate(
                    torch.tensor([ids]), do_sample=False, max_new_tokens=8, min_new_tokens=8, eos_token_id=None
                )
            for engine in engines:
                for schedule in ("plain", "eesd", "elastic:lookup=2"):
                    params = SamplingParams(max_tokens=8, ignore_eos=True)
                    if schedule != "plain" and engine.backend.name == "torch":
                        continue
                    answer = engine.generate(ids, params, schedule).run()
                    assert list(answer.ids) == said[0, len(ids) :].tolist(), (changes, len(ids), schedule)
                close(engine.backend.logits(ids, len(ids)), expected, 1e-5)
            alone += [(ids, answer.ids)] * 2
        together = [engine.generate(ids, params, "plain") for engine in engines for ids, _ in alone]
        for answer in together:
            next(iter(answer))
        assert [answer.run().ids for answer in together] == [said for _, said in alone] * 2
