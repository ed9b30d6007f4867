"""The real model, smollm2-135m: the numbers of transformers, and the same answer at every schedule."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from support import slow

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.bench.cli.check import SAMPLINGS, SCHEDULES
from ppsd_rt.bench.cli.prompt_files import read_prompts
from ppsd_rt.pipeline.schedule import parse_schedule

PROMPTS = read_prompts(None)
FAMILIES = ["chat", "story", "summary", "qa", "math", "code"]
ONE_OF_EACH = [next(group) for _, group in itertools.groupby(PROMPTS, key=lambda prompt: prompt.family)]


@pytest.fixture(scope="module", params=[slow("torch"), "cpu"])
def exact(request, default_model):
    """Float32, as the peer has it."""
    return Engine.from_pretrained(default_model, dtype="float32", backend=request.param, threads=1)


@pytest.fixture(scope="module")
def fast(request, default_model):
    backend, dtype = request.param.split("-")
    return Engine.from_pretrained(default_model, dtype=dtype, backend=backend, threads=2)


@pytest.fixture(scope="module")
def peer(default_folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def peer_answer(peer):
    """peer_answer(ids): its greedy answer, worked out once."""

    @cache
    @torch.no_grad()
    def answer(ids):
        return peer.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()

    return answer


def chat(engine, prompt):
    return engine.encode([{"role": "user", "content": prompt.prompt}])


@torch.no_grad()
def test_logits_equal_transformers(exact, peer):
    """After every prefix that the stages are asked for, cached rows and all."""
    for prompt in ONE_OF_EACH[:3]:
        ids = chat(exact, prompt)
        expected = peer(torch.tensor([ids])).logits[0]
        for length in (len(ids) - 7, len(ids) - 1, len(ids)):
            logits = torch.from_numpy(exact.backend.logits(ids[:length])[-1])
            true = expected[length - 1]
            torch.testing.assert_close(logits, true, rtol=1e-4, atol=1e-4 * float(true.abs().max()))


@pytest.mark.parametrize("family", ["chat", *map(slow, FAMILIES[1:])])
def test_greedy_answers_equal_transformers(exact, peer_answer, family):
    ids = chat(exact, ONE_OF_EACH[FAMILIES.index(family)])
    ours = exact.generate(ids, SamplingParams(max_tokens=12), "plain").run()
    assert list(ours.ids) == peer_answer(tuple(ids))


# The default format and the smallest one with a prompt each; the others are slow.
TORCH = "torch-bfloat16" if torch.cpu._is_avx512_bf16_supported() else "torch-float32"
FORMATS = [TORCH, "cpu-bfloat16", "cpu-int8", "cpu-int4"]
FAST = [("cpu-int8", "chat"), ("cpu-int4", "qa")]
CASES = [case if case in FAST else slow(*case) for case in itertools.product(FORMATS, FAMILIES)]


@pytest.mark.parametrize(("fast", "family"), CASES, indirect=["fast"])
def test_every_schedule_gives_the_plain_answer(fast, family):
    """One prompt of each family, with a sampling setting each; `ppsd-run check` does all of both.

    A prompt meets every fourth schedule, and the next ones the others. Torch is slow: it meets every sixth.
    """
    assert fast.head is not None, "the default model comes with an exit head"
    number = FAMILIES.index(family)
    ids = chat(fast, ONE_OF_EACH[number])
    slow = fast.backend.name == "torch"
    params = replace(list(SAMPLINGS.values())[number % len(SAMPLINGS)], max_tokens=8 if slow else 16)
    plain = fast.generate(ids, params, "plain").run()
    accepted = 0
    step = 6 if slow else 4
    for text in SCHEDULES[number % step :: step]:
        completion = fast.generate(ids, params, parse_schedule(text)).run()
        assert completion.ids == plain.ids, text
        assert completion.text == plain.text
        accepted += completion.statistics.accepted
    assert accepted > 0
