"""Heads of other sizes while layers are cut into stages: refused or right, whatever comes after what."""

import random

import pytest
import torch
from support import tiny_head, tiny_model, write_model

from ppsd_rt import Engine, PpsdError, SamplingParams
from ppsd_rt.models.checkpoint import Checkpoint
from ppsd_rt.models.head_file import HeadFile

KINDS = {
    "feedback 6": ("feedback", 6, (0, 0)),
    "feedback 3": ("feedback", 3, (0, 0)),
    "smaller": ("feedback", 6, (32, 32)),
    "layer": ("layer", 2, (0, 0)),
}
SCHEDULES = ("ppsd", "elastic", "eesd", "auto", "lookup", "eesd:length=3,stop_rule=fixed", "ppsd:lookahead=2")


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """-> a folder of a model with eight layers, and heads for it."""
    torch.set_num_threads(1)
    place, model = tmp_path_factory.mktemp("swaps"), tiny_model(3, num_hidden_layers=8)
    folder = write_model(place / "model", model, num_hidden_layers=8)
    hash, paths = Checkpoint(folder).hash, []
    for kind, exit_layer, sizes in KINDS.values():
        paths.append(place / f"{len(paths)}.safetensors")
        tiny_head(model, kind, exit_layer, hash, sizes).save(paths[-1], torch.float32)
    return folder, paths


def answers_over_swaps(folder, paths, seed, count):
    """-> how many swaps came about and how many were refused, while `count` random answers were those of plain
    decoding."""
    rng, swapped, refused = random.Random(seed), 0, 0
    checkpoint = Checkpoint(folder)
    files = [HeadFile.load(path, checkpoint) for path in paths]
    stages = rng.choice((2, 3, [7], [4, 6]))
    with Engine.from_pretrained(folder, dtype="float32", threads=2, exit_head="none", stages=stages) as engine:
        for _ in range(count):
            if rng.random() < 0.2:
                named = [*paths, "none", "norm:1", "norm:5"]
                try:
                    engine.use_head(rng.choice(named))
                except PpsdError:  # a cut that was asked for lies before the head
                    refused += 1
            if rng.random() < 0.5:
                try:
                    same = [file for file in files if file.info == engine.head]
                    swapped += engine.swap_head(rng.choice([*files, *same * 4]))
                except PpsdError as error:
                    assert "other sizes" in str(error)
                    refused += 1
            prompt = [rng.randrange(3, 200) for _ in range(rng.randrange(1, 12))]
            hot = {"temperature": 0.9, "seed": rng.randrange(99)} if rng.random() < 0.5 else {}
            params = SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True, **hot)
            schedule = rng.choice(SCHEDULES if engine.head else ("auto", "lookup"))
            plain = engine.generate(prompt, params, "plain").run().ids
            assert engine.generate(prompt, params, schedule).run().ids == plain, (seed, stages, schedule, engine.head)
    return swapped, refused


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_exact_whatever_heads_come(heads, seed):
    swapped, refused = answers_over_swaps(*heads, seed, 40)
    assert swapped and refused


def test_what_is_learned_from_another_head_is_refused(heads, tmp_path):
    folder, paths = heads
    with Engine.from_pretrained(folder, dtype="float32", threads=2, exit_head="none", stages=2) as engine:
        with pytest.raises(PpsdError, match="other sizes than this engine's"):
            engine.learn(tmp_path, str(paths[0]))
        assert engine.learner is None
        engine.use_head(paths[0])
        engine.learn(tmp_path)
        learner = engine.learner
        assert learner.heads.root == paths[0]
        engine.use_head("norm:1")
        assert engine.learner is None and not learner.close.alive, "it would replace the head that was asked for"


def test_stages_refuse_cuts_that_do_not_rise_from_the_exit_layer(heads):
    folder, paths = heads
    with Engine.from_pretrained(folder, dtype="float32", threads=2, exit_head=paths[0], stages=2) as engine:
        for cuts in ([4], [6], [7, 7], [8]):
            engine.backend._answers.forget_loop()
            engine.backend._cuts = cuts
            with pytest.raises(ValueError, match="do not rise from the exit layer"):
                engine.generate("abc", SamplingParams(max_tokens=4), "ppsd").run()
