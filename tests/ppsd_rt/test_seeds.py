"""Noise by seed, prompt and number of the answer: independent, and still repeatable."""

from dataclasses import replace

import numpy as np
import pytest
import scipy
from noise_twin import gumbel
from support import VOCAB

from ppsd_rt import Engine, SamplingParams
from ppsd_rt.sampling.params import noise_key

WARM = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
PROMPTS = 2000


@pytest.fixture(scope="module")
def engine(folder):
    return Engine.from_pretrained(folder, exit_head="norm:2", backend="cpu", threads=1)


def test_first_tokens_of_many_prompts_with_one_seed_fit_their_softmaxes(engine):
    """Chi-square of 2,000 prompts of one length; with one noise for all of them it is hopeless."""
    once = replace(WARM, max_tokens=1, seed=0)
    counts, expected = np.zeros(VOCAB), np.zeros(VOCAB)
    for number in range(PROMPTS):
        prompt = [number // 250, number % 250, 7]
        counts[engine.generate(prompt, once, "plain").run().ids[0]] += 1
        logits = engine.backend.logits(prompt)[0].astype(np.float64)
        probabilities = np.exp(logits - logits.max())
        expected += probabilities / probabilities.sum()
    order = np.argsort(-expected)
    bins = np.minimum(np.cumsum(expected[order]) // 25, PROMPTS // 25 - 1).astype(int)  # of 25 expected and more
    seen, wanted = (np.bincount(bins, weights=of[order]) for of in (counts, expected))
    filled = wanted > 0
    assert filled.sum() > 20
    assert scipy.stats.chisquare(seen[filled], wanted[filled] * seen.sum() / wanted.sum()).pvalue > 1e-3


def test_without_a_seed_every_answer_draws_its_own_and_says_which(engine):
    answers = [engine.generate("Once", WARM).run() for _ in range(4)]
    assert len({answer.seed for answer in answers}) == len({answer.ids for answer in answers}) == 4
    for answer in answers:
        assert 0 <= answer.seed < 2**53
        assert engine.generate("Once", replace(WARM, seed=answer.seed), "plain").run().ids == answer.ids


def test_answers_to_one_prompt_are_told_apart_by_their_number(engine):
    numbered = [engine.generate("Once", replace(WARM, seed=5, index=i)).run() for i in range(4)]
    assert len({answer.ids for answer in numbered}) == 4
    assert {answer.seed for answer in numbered} == {5}
    assert engine.generate("Once", replace(WARM, seed=5, index=2), "elastic").run().ids == numbered[2].ids


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_the_key_is_that_of_the_prompt_on_every_backend(folder, backend):
    engine = Engine.from_pretrained(folder, exit_head="none", backend=backend, dtype="float32")
    prompt = list(b"Once upon a time")
    for index in (0, 3):
        params = replace(WARM, max_tokens=1, seed=2**63 + 1, index=index)
        noisy = engine.backend.logits(prompt)[0] + gumbel(
            noise_key(2**63 + 1, prompt, index), len(prompt), np.arange(VOCAB)
        )
        assert engine.generate(prompt, params, "plain").run().ids == (int(noisy.argmax()),)


@pytest.mark.parametrize("temperature", [1e30, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 259}, {"repetition_penalty": 1.1}, {"logprobs": 0}])
def test_at_the_highest_temperatures_every_id_is_as_likely(engine, temperature, filters):
    params = SamplingParams(max_tokens=200, temperature=temperature, ignore_eos=True, seed=1, **filters)
    assert len(set(engine.generate("Once", params, "eesd").run().ids)) > 100
